"""The one road to a version: plan, make the forms, prove them, publish. There is no other way to be served.

Kinds of model differ in how their forms are made: a captured program (`torch/forms.py`), an ONNX file
(`onnx/forms.py`), a module that is served live (`live/forms.py`). Each has a `Maker`; the road is the same.
"""

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...models.errors import CannotConvert, OrderEnded
from ...models.folder.training_reader import net_weights
from ...models.spec.spec import UNIT_ROUNDOFF
from ...models.store.manifest import sha256_of
from ...models.store.store import LIVE, REFUSED, Draft, Store, Version
from ..gate.verdict import ParityReport
from ..inputs.drifted_inputs import hand_over
from ..inputs.samples import Samples
from ..onnx.reading.large_files import remove_onnx
from ..plan.aims import RETREATS, SEARCHED, SHARES
from ..plan.counterexamples import excess
from ..proof.drawn_pictures import with_pixels
from ..proof.informative import note_of_sentinels, why_noise_proves_nothing, why_nothing_is_proven
from ..proof.maker import Made, Maker, Notify
from ..proof.neutral_lengths import JoinedLengths
from ..proof.no_reference import cause_of_noise, why_it_does_not_repeat, why_unstable
from ..proof.planted_faults import measured_power
from ..proof.power import Power, why_not_shown
from ..proof.prove import ReferenceRun, judged
from ..proof.subject import FurtherVerdict, Subject
from ..proof.threads import fixed_threads
from ..report.evidence import Evidence, Form, copy_source
from ..search.delta_debugging import COMPLETE, EXHAUSTED, NOT_NEEDED

NEAR = 2.0  # times the allowed error: a miss that more nodes in FP32 are likely to cure
PASSED = (NOT_NEEDED, COMPLETE, EXHAUSTED)  # outcomes of a search whose plan passes on the planning samples


def travel(
    subject: Subject, maker: Maker, store: Store, notify: Notify, twins_after: int | None = None
) -> Version:
    """Convert and publish. The version is live and active, or kept as refused with its report. Where the subject's
    origin has ``awaits_promotion`` it is only published: the caller decides whether it becomes active. ``twins_after``:
    see `Draft.publish`.

    Raises CannotConvert where no form can be made at all; then nothing is left in the store.
    """
    with fixed_threads(maker.row_operations), store.draft(subject.spec.name) as draft:
        if subject.origin.get("parent") is None:  # the samples of a parent are as it was judged
            subject = with_pixels(subject, maker.original_graph(), maker.row_operations)
        version = _Conversion(subject, maker, draft, notify, twins_after).go()
    promotes = version.status == LIVE and not version.awaits_promotion
    if promotes and not store.promote_published(version, by="conversion"):
        notify(f"{version} is not made active: version {store.live_number(version.name)} was published later")
    notify(f"{version} is {version.status}")
    return version


@dataclass(slots=True)
class _Conversion:
    subject: Subject
    maker: Maker
    draft: Draft
    notify: Notify
    twins_after: int | None = None
    made: dict[str, Made] = field(default_factory=dict)
    power: Power | None = None
    not_shown: str = ""  # why some outputs stay in FP32
    missed: ParityReport | None = None  # on the last half that was refused before another plan was made

    def go(self) -> Version:
        started = time.perf_counter()
        subject, maker = self.subject, self.maker
        planning, judging = subject.samples.split()
        self.notify("answering the judging samples in FP32")
        reference_run = maker.reference_run(judging)
        subject, reference_run = self._with_proven_lengths(reference_run)
        if why := self._why_no_half(reference_run):
            maker.serve_original(why)
        planning = planning if planning.count else judging
        self._write()
        forms = self._proven(planning, reference_run)
        reports = [form.report for form in forms.values() if form.report is not None]
        if why := (
            self._why_only_noise(reports, reference_run)
            or self._why_not_partly_half(forms)
            or self._why_planning_fails(forms)
        ):
            self._remove_halves_but(())
            maker.serve_original(why)
            forms = self._proven(planning, reference_run)
        errors = [form.error for form in forms.values() if form.error]
        if len(errors) == len(forms):
            raise errors[0]
        further = self._judge_further(forms)
        good = any(form.passed for form in forms.values()) and (further is None or further.passed)
        status = LIVE if good else REFUSED
        self._drop_refused(forms, status)
        unproven = status == REFUSED and any(map(_misses, forms.values()))
        nearest = maker.nearest(self.notify) if unproven else ""
        halves = [form for form in forms.values() if form.passed and form.facts["half_nodes"]]
        said = (reference_run.left_out, note_of_sentinels(reference_run) if halves else "")
        subject = replace(subject, notes=(*subject.notes, *filter(None, said)))
        if self.not_shown and self.power:
            outputs = ", ".join(f"'{name}'" for name in sorted(self.power.fp32_outputs))
            said = f"all that {outputs} is computed from stays in FP32: {self.not_shown}"
            subject = replace(subject, notes=(*subject.notes, said))
        evidence = Evidence(subject, maker, forms, status, further, nearest, self.missed, self.power)
        evidence.write(self.draft, reference_run, planning.count)
        facts = evidence.manifest(time.perf_counter() - started)
        return self.draft.publish(status, facts, self.twins_after)

    def _with_proven_lengths(self, run: ReferenceRun) -> tuple[Subject, ReferenceRun]:
        """The subject asks for lengths only where filling up is proven to change no answer."""
        spec = self.subject.spec
        if asked := spec.batching.lengths:
            notes = (*self.subject.notes, run.joined.sentence(asked))
            if run.joined.refused:
                spec = replace(spec, batching=replace(spec.batching, lengths=()))
                run = replace(run, spec=spec, joined=JoinedLengths())
            self.subject = replace(self.subject, spec=spec, notes=notes)
        return self.subject, run

    def _why_only_noise(self, reports: Sequence[ParityReport], run: ReferenceRun) -> str:
        """A reason to serve FP32 where these reports pass by the noise of FP32 alone; empty otherwise."""
        maker, u = self.maker, UNIT_ROUNDOFF[self.subject.precision.dtype]
        operations = maker.operations_by_name()
        return why_noise_proves_nothing(
            reports,
            self.subject.spec.parity,
            lambda advice: cause_of_noise(run, u, maker.original_graph(), operations, advice),
        )

    def _why_no_half(self, run: ReferenceRun) -> str:
        """A reason to make no half, found before one is planned; empty where there is none."""
        dtype, original, operations = (
            self.subject.precision.dtype,
            self.maker.original_graph(),
            self.maker.operations_by_name(),
        )
        why = why_it_does_not_repeat(run, self.maker.original(), operations)
        why = why or why_nothing_is_proven(run) or why_unstable(run, dtype, original, operations)
        if why or original is None or self.subject.precision.level == "O0":
            return why
        self.notify("planting faults in the FP32 model, to see whether the judging samples show them")
        self.power = measured_power(run, original, dtype)
        why = why_not_shown(self.power)
        if not (outputs := self.power.fp32_outputs):
            return why
        self.maker.keep_outputs(outputs)
        self.not_shown = why
        return ""

    def _why_not_partly_half(self, forms: Mapping[str, Form]) -> str:
        """The reason why some outputs stay in FP32, where that leaves no half that is proven; then all of them do."""
        if any(form.passed for form in forms.values()) and self.maker.facts()["half_nodes"]:
            return ""
        why, self.not_shown = self.not_shown, ""
        return why

    def _why_planning_fails(self, forms: Mapping[str, Form]) -> str:
        """The reason why nothing is half where the judged samples pass and those that chose the plan do not."""
        missed = self.maker.why_failed()
        if not (missed and self.maker.facts()["half_nodes"] and any(form.passed for form in forms.values())):
            return ""
        return (
            "the half passes on the judged samples, but not on those that choose its plan (every second sample and "
            f"inputs made of these), whatever is kept in FP32: counted among them, {missed}"
        )

    def _proven(self, planning: Samples, reference_run: ReferenceRun) -> dict[str, Form]:
        """The forms under the first plan that passes, or under the last; each is stricter than the one before.

        Where a form misses, the forms after it are proven under the next plan, and under this one only if it is the
        last: all forms have one plan, and a proof costs as much as a plan.
        """
        forms, last_share = dict[str, Form](), 1.0
        for share in (*SHARES, *RETREATS):
            if share in RETREATS and not all(map(_may_retreat, forms.values())):
                break
            expected = share * _worst_excess(forms)
            if share == SEARCHED and last_share < expected:
                continue  # a plan for this share is likely to miss the limits as well
            if share in RETREATS[:-1] and last_share < expected < math.inf:
                continue
            last_share = share
            if not self.maker.plan(planning, share, self.notify):
                if share in RETREATS or not forms:
                    break
                continue  # planned as strictly before
            self.missed = next((one.report for one in forms.values() if _misses(one)), self.missed)
            forms = {}
            for name in self.subject.forms:
                forms[name] = self._form(name, reference_run)
                if _misses(forms[name]):
                    break
            else:
                return forms
        others = [name for name in self.subject.forms if name not in forms]
        return forms | {name: self._form(name, reference_run) for name in others}

    def _write(self) -> None:
        subject, folder = self.subject, self.draft.folder
        self.draft.write_json("spec.json", subject.spec.to_json())
        subject.samples.save(samples := folder / "samples.safetensors")
        if subject.samples.drifted:
            hand_over(samples, folder.parent)
        declared = subject.origin.get("training", {}).get("declared_steps")
        copy_source(subject.source, folder / "source", net_weights(declared))
        for file in subject.beside:
            shutil.copyfile(file, folder / file.name)
        self.maker.write(self.draft)

    def _form(self, name: str, reference_run: ReferenceRun) -> Form:
        """Make one form and prove it."""
        self.notify(f"proving the {name} form")
        try:
            made = self.maker.make(name, self.draft, reference_run)
        except OrderEnded:
            raise  # how busy or small the machine is must not decide which forms a version has
        except CannotConvert as error:
            return Form(self.maker.facts() | {"passed": False, "error": str(error)}, error=error)
        self.made[name] = made
        facts = self.maker.facts() | {"passed": True, "max_error_u": 0.0, "sqnr_db": None}
        report = self._judged(made, reference_run)
        if report is not None:
            found = report.to_json()
            facts |= {key: found[key] for key in ("passed", "max_error_u", "sqnr_db")}
            if not report.passed:
                self.notify(f"the {name} form is not equal under this plan: {report.summary()}")
        if facts["passed"]:
            facts |= {"file": made.file, "digest": sha256_of(self.draft.folder / made.file)}
        return Form(facts, report)

    def _judged(self, made: Made, reference_run: ReferenceRun) -> ParityReport | None:
        if not made.taken:
            return None
        report = judged(reference_run, self.subject.precision.dtype, made.taken)
        return self.maker.diagnosed(report, reference_run)

    def _judge_further(self, forms: Mapping[str, Form]) -> FurtherVerdict | None:
        passed = {name: self.made[name].serves for name, form in forms.items() if form.passed}
        if self.subject.further is None or not passed:
            return None
        self.notify("judging what was learnt")
        return self.subject.further(passed)

    def _drop_refused(self, forms: Mapping[str, Form], status: str) -> None:
        """Delete the halves of refused forms and of earlier plans, so that they cannot be loaded."""
        passed = [form for form in forms.values() if form.passed and status != REFUSED]
        self._remove_halves_but([form.facts["file"] for form in passed])

    def _remove_halves_but(self, proven: Sequence[str]) -> None:
        if "half.pt2" not in proven:
            (self.draft.folder / "half.pt2").unlink(missing_ok=True)
        if "half.onnx" not in proven:
            remove_onnx(self.draft.folder / "half.onnx")


def _misses(form: Form) -> bool:
    """True if the form was made and its proof refuses it."""
    return form.report is not None and not form.report.passed


def _may_retreat(form: Form) -> bool:
    """True if a plan with more nodes in FP32 is likely to make this form equal; True as well where the form is equal.

    That is likely where the error is below `NEAR` times the allowed one. It is likely with any error where the plan
    passed on the planning samples: then a judged sample is only more sensitive than those. And where no setting would
    accept the half, FP32 serves in the end: a refusal would name no way out.
    """
    if form.report is None or form.passed or form.facts.get("search") in PASSED:
        return True
    return excess(form.report) < NEAR or not _is_acceptable(form.report)


def _is_acceptable(report: ParityReport) -> bool:
    """True if there are settings under ``[parity]`` that would accept the refused half of this report. True as well if
    the report has no diagnoses."""
    refused = [one for one in report.diagnoses if one.verdict != "equal"]
    return not report.diagnoses or (bool(refused) and all(one.override for one in refused))


def _worst_excess(forms: Mapping[str, Form]) -> float:
    """The largest error of all refused forms, divided by the allowed error; 1 where no form was refused."""
    return max((excess(form.report) for form in forms.values() if form.report and not form.passed), default=1)
