"""The evidence of a conversion that is stored with its version: manifest, plan, parity report, page, source text."""

import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...models.errors import CannotConvert
from ...models.files.opened_file import opened_inside
from ...models.store.store import Draft
from ..gate.diagnosis import worst_sample
from ..gate.refusals import accepting, without_advice
from ..gate.verdict import ParityReport
from ..inputs.samples import Samples
from ..on_device.environment import environment
from ..proof.maker import Maker
from ..proof.power import Power
from ..proof.prove import ReferenceRun
from ..proof.subject import FurtherVerdict, Subject
from ..search.delta_debugging import EXHAUSTED

SOURCE_SUFFIXES = (".py", ".toml", ".md", ".txt", ".json")
SOURCE_MAX_BYTES = 2**20


@dataclass(slots=True)
class Form:
    """The result of one form: ``facts`` as the command line prints them, ``report`` where it was judged."""

    facts: dict[str, Any]
    report: ParityReport | None = None
    error: CannotConvert | None = None

    @property
    def passed(self) -> bool:
        return bool(self.facts["passed"])


def _every_half_misses(last: ParityReport) -> str:
    """The reason why all nodes stay in FP32: the proof refused each half. ``last``: the report on the last of them."""
    beyond = [one for one in last.outputs if one.max_error_u > one.limit_u]
    worst = max(beyond, key=lambda one: one.max_error_u / max(one.limit_u, 1e-300), default=None)
    if worst is None or not worst.max_error_u < math.inf:
        failed = last.all_failures[0]
        missed = "the proof refuses the last half that was planned, so that every node stays in FP32"
        return f"{missed}: {without_advice(failed).message}"
    error_u, limit_u = worst.max_error_u, worst.limit_u
    limit = accepting("max_error_u", error_u)
    accept = (
        "" if limit is None else f"; accept such an error by setting max_error_u = {limit:g} under [parity]"
    )
    return (
        f"the last half that was planned errs by {error_u:.3g}u in the proof, where {limit_u:g}u are allowed, so that "
        f"every node stays in FP32{accept}"
    )


@dataclass(frozen=True, slots=True)
class Evidence:
    """All findings of a conversion, ready to be written.

    ``nearest``: of a refusal, as `Maker.nearest` gives it. ``missed``: the report on the last half that the proof
    refused before the plan of these forms was made; None where there was no such half. ``power``: of the proof, where
    it was measured.
    """

    subject: Subject
    maker: Maker
    forms: Mapping[str, Form]
    status: str
    further: FurtherVerdict | None = None
    nearest: str = ""
    missed: ParityReport | None = None
    power: Power | None = None

    @property
    def half_nodes(self) -> int:
        return int(self.maker.facts()["half_nodes"])

    @property
    def reason(self) -> str:
        """One sentence for people: why the version is live or refused."""
        refusals = [
            f"{name}: {form.report.summary() if form.report else form.facts['error']}"
            for name, form in self.forms.items()
            if not form.passed
        ]
        if self.further is not None and not self.further.passed:
            refusals.append(self.further.reason)
        if refusals:
            return "; ".join([*refusals, *filter(None, (self.nearest, self._not_all_tried))])
        if not self.half_nodes:
            why = "; ".join(filter(None, (self._why_nothing_is_half, self._not_all_tried)))
            return f"nothing is half, it is served in FP32: {why}"
        return "; ".join(filter(None, ("proven equal in every form asked for", self._not_all_tried)))

    @property
    def exhausted(self) -> bool:
        """True where the search for kept nodes used up its budget before it had tried everything."""
        return self.maker.facts()["search"] == EXHAUSTED

    @property
    def _not_all_tried(self) -> str:
        """Advice for an exhausted search: fewer nodes to try or cheaper trials let it end. Empty for other searches."""
        if not self.exhausted:
            return ""
        kept = Counter(one["op"] for one in self.maker.facts()["kept"])
        name = f"--keep op:{kept.most_common(1)[0][0]}" if kept else "--keep PATTERN"
        return (
            "the search for nodes that must stay in FP32 was exhausted before all was tried, so more may be in FP32 "
            f"than must be; what helps: {name} for nodes that need FP32 anyway, so that fewer are tried, or fewer, "
            "shorter or smaller samples (--samples FILE), whose trials cost less"
        )

    @property
    def _why_nothing_is_half(self) -> str:
        if why := self.maker.facts().get("original_because"):
            return str(why)
        if self.subject.precision.level == "O0":
            return "that was asked for (level O0)"
        if self.missed is not None and self.maker.facts()["kept"]:
            choosing = self.maker.facts().get("choosing")
            return "; ".join(filter(None, (_every_half_misses(self.missed), choosing)))
        if self.exhausted:
            return ""
        if kept := self.maker.facts()["kept"]:
            reasons = Counter(str(one["reason"]).partition(" (")[0] for one in kept)
            said = ", ".join(f"{reason} ({count} of {len(kept)})" for reason, count in reasons.most_common(3))
            return f"every node that the policy would run in half is kept in FP32: {said}"
        wide = [
            t.name for t in (*self.subject.spec.inputs, *self.subject.spec.outputs) if t.datatype == "FP64"
        ]
        if wide:
            return (
                f"its numbers are FP64 ('{wide[0]}'), and what is computed in FP64 stays so; export the model with "
                "FP32 inputs, outputs and weights"
            )
        return "no node of the program is half under this policy"

    def write(self, draft: Draft, reference_run: ReferenceRun, planning: int) -> None:
        """Plan, parity report and page, into the draft. ``planning`` counts the samples that chose."""
        subject, here = self.subject, environment(self.subject.device)
        reports = {name: form.report.to_json() for name, form in self.forms.items() if form.report}
        findings = self.maker.findings(reference_run) | self._worst()
        findings |= {"power": self.power.to_json()} if self.power else {}
        plan = self.maker.plan_json()
        draft.write_json("parity.json", {"environment": here, "forms": reports, **findings})
        draft.write_json("precision.json", plan)
        judging = len({sample for question in reference_run.bulk for sample in question.samples})
        facts = {
            "model": subject.spec.name,
            "version": "",
            "digest": next((f.facts["digest"] for f in self.forms.values() if "digest" in f.facts), ""),
            "status": self.status,
            "half": self.subject.precision.dtype if self.half_nodes else None,
            "reason": self.reason,
            "precision": {
                "level": subject.precision.level,
                "dtype": subject.precision.dtype,
                "policy lists": plan["lists"],
            },
            "forms": {name: form.facts | {"parity": reports.get(name)} for name, form in self.forms.items()},
            "samples": {
                "source": subject.samples.source,
                "planning": planning,
                "judging": judging,
                "batch_sizes": next((report["batch_sizes"] for report in reports.values()), []),
            },
            "environment": here,
            "capture": {"notes": list(subject.notes)},
            "gate": self.further and dict(self.further.numbers),
            "replay": f"halfeven parity {subject.spec.name}",
            **findings,
        }
        from .page import render_html  # imports jinja2, which a reader of evidence does not need

        (draft.folder / "report.html").write_text(render_html(facts))

    def _worst(self) -> dict[str, Any]:
        """The worst judged sample; its number is doubled, for every second sample of the file judges."""
        report = next((form.report for form in self.forms.values() if form.report), None)
        if report is None:
            return {}
        _, judging = self.subject.samples.split()
        rows = {sample: 2 * sample for sample in range(judging.count)}
        found = worst_sample(report, judging, rows)
        return {"worst": found} if found else {}

    def manifest(self, seconds: float) -> dict[str, Any]:
        """The facts that stand in the manifest beside the files' digests."""
        return {
            "model": self.subject.spec.name,
            "half": self.subject.precision.dtype if self.half_nodes else None,
            "row_operations": self.maker.row_operations,
            "reason": self.reason,
            "notes": list(self.subject.notes),
            "samples": _facts_of(self.subject.samples),
            "power": self.power and self.power.summary(),
            "forms": {name: form.facts for name, form in self.forms.items()},
            "gate": self.further and dict(self.further.numbers),
            "environment": environment(self.subject.device),
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "seconds": round(seconds, 2),
            **self.subject.origin,
        }


def _facts_of(samples: Samples) -> dict[str, Any]:
    drifted = {"drifted": samples.drifted} if samples.drifted else {}
    return {"source": samples.source, "count": samples.count, **drifted}


def files_of(folder: Path) -> list[Path]:
    """The files of a model folder, in order; not those of hidden folders, nor of a store that lies in it (`halfeven
    convert .` makes one there): what is written of a folder is no part of it."""
    found = list[Path]()
    for place, folders, files in os.walk(folder):
        folders[:] = [
            name
            for name in folders
            if not name.startswith((".", "__pycache__")) and not _is_store(Path(place, name))
        ]
        found += [Path(place, name) for name in files]
    return sorted(found)


def _is_store(folder: Path) -> bool:
    return any(folder.glob("models/*/[1-9]*/manifest.json"))


def copy_source(source: Path | str, target: Path, also: Sequence[str] = ()) -> None:
    """The folder's text, for the trainer and for making the program again under another torch.

    ``source`` is the folder, or the text of model.toml where that is all. ``also``: files that are copied whatever
    they are (the weights of nets that a training needs beside the model).
    """
    if isinstance(source, str):
        target.mkdir()
        (target / "model.toml").write_text(source)
        return
    for path in files_of(source):
        inside = path.relative_to(source)
        hidden = any(part.startswith((".", "__pycache__")) for part in inside.parts)
        fits = path.suffix in SOURCE_SUFFIXES and _is_small_and_inside(source, path)
        if (fits and not hidden) or str(inside) in also:
            (target / inside).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / inside)


def _is_small_and_inside(folder: Path, path: Path) -> bool:
    """True if ``path`` is a small file inside of ``folder``. A file that a link outside of it leads to is not
    copied into a store."""
    try:
        opened_inside(folder, path, SOURCE_MAX_BYTES - 1).close()
    except OSError:
        return False
    return True
