"""The one road: capture, plan, rewrite, export, prove, publish. There is no other way to be served."""

import hashlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.export import ExportedProgram

from ..models.archive import save_program
from ..models.capture import Captured, Limits, capture
from ..models.engines.arrays import to_torch
from ..models.engines.onnx_engine import OnnxEngine
from ..models.engines.torch_engine import TorchEngine, use_true_fp32
from ..models.errors import BadInput, CannotConvert
from ..models.package import ModelFolder, Precision, read_folder
from ..models.program import runnable
from ..models.spec import ModelSpec
from ..models.store import LIVE, REFUSED, Draft, Store, Version, sha256_of
from .autocast import HalfProgram, rewrite
from .environment import environment
from .onnx import write_onnx
from .plan import make_plan
from .prove import Exam, Taken, answers_of, check_whole_form, emulated, judged, set_exam, take
from .report import render_html
from .samples import Samples, load_samples
from .synthetic import generate
from .verdict import ParityReport

CPU = torch.device("cpu")
GENERATED = 32
SOURCE_SUFFIXES = (".py", ".toml", ".md", ".txt", ".json")
SOURCE_MAX_BYTES = 2**20

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Options:
    """What the asker may say beyond the folder; None leaves the folder's word."""

    forms: tuple[str, ...] = ("torch", "onnx")
    level: str | None = None
    dtype: str | None = None
    keep: tuple[str, ...] = ()
    samples: Path | None = None
    new_signature: bool = False
    capture_limits: Limits | None = None


@dataclass(slots=True)
class Form:
    """What became of one form: ``facts`` as the command line prints them, ``report`` where it was judged."""

    facts: dict[str, Any]
    report: ParityReport | None = None
    error: CannotConvert | None = None

    @property
    def passed(self) -> bool:
        return bool(self.facts["passed"])


@dataclass(frozen=True, slots=True)
class Conversion:
    """A published version with its facts; ``unchanged`` where the folder gave no new one."""

    version: Version
    facts: Mapping[str, Any]
    unchanged: bool = False

    @property
    def asked_passed(self) -> bool:
        """Whether every form that was attempted passed."""
        return all(form["passed"] for form in self.facts["forms"].values())

    @property
    def any_passed(self) -> bool:
        return any(form["passed"] for form in self.facts["forms"].values())

    def shown(self) -> dict[str, Any]:
        """The facts with each form's parity report, as `report.render_terminal` takes them."""
        reports = self.version.json("parity.json")["forms"]
        forms = {name: form | {"parity": reports.get(name)} for name, form in self.facts["forms"].items()}
        return {**self.facts, "forms": forms}


def convert(
    folder: Path, store: Store, options: Options | None = None, say: Say = lambda _: None
) -> Conversion:
    """Convert a model folder and publish the result, live or refused.

    Raises BadInput for what the operator can mend, CannotConvert where no form can be made at all.
    """
    options = options or Options()
    use_true_fp32()
    asked = _asked(read_folder(folder), options)
    fingerprint = _fingerprint(asked, options)
    newest = store.newest(asked.spec.name)
    if newest is not None and newest.manifest.get("fingerprint") == fingerprint:
        return Conversion(newest, facts_of(newest), unchanged=True)
    samples = _samples(asked, options)
    say(f"capturing {asked.spec.name}")
    captured = capture(asked, samples.arrays, options.capture_limits)
    _check_signature(captured.spec, newest, options)
    with store.draft(asked.spec.name) as draft:
        return _Road(asked, captured, samples, options, draft, store, say).travel(fingerprint)


def facts_of(version: Version) -> dict[str, Any]:
    """What the command line prints for a version (design, §3.2); paths are relative to the store."""
    forms = {}
    for name, facts in version.manifest["forms"].items():
        file = facts.get("file")
        path = {"path": f"models/{version.name}/{version.number}/{file}"} if file and facts["passed"] else {}
        forms[name] = {key: value for key, value in facts.items() if key != "file"} | path
    return {
        "model": version.name,
        "version": version.number,
        "digest": next((form["digest"] for form in forms.values() if form.get("digest")), version.digest),
        "status": version.status,
        "reason": version.manifest["reason"],
        "forms": forms,
    }


@dataclass(slots=True)
class _Road:
    asked: ModelFolder
    captured: Captured
    samples: Samples
    options: Options
    draft: Draft
    store: Store
    say: Say
    whole: ExportedProgram = field(init=False)
    spec: ModelSpec = field(init=False)

    def travel(self, fingerprint: str) -> Conversion:
        started = time.perf_counter()
        self.whole, self.spec = self.captured.program, self.captured.spec
        planning, judging = self.samples.split()
        self.say("planning and rewriting")
        example = self._example()
        plan = make_plan(runnable(self.whole).graph, self.asked.precision)
        half = rewrite(self.whole, plan, self.spec, example)
        whole_engine = TorchEngine(self.whole, "fp32", CPU)
        self.say("answering the judging samples in FP32")
        exam = set_exam(self.spec, judging, answers_of(self.spec, whole_engine))
        self._write_whole()
        if half.half_nodes:
            save_program(half.program, self.draft.folder / "half.pt2", weights=True)
        forms = {name: self._form(name, half, exam, example) for name in self.options.forms}
        if all(form.error for form in forms.values()):
            raise next(form.error for form in forms.values() if form.error)
        status = LIVE if any(form.passed for form in forms.values()) else REFUSED
        self._drop_refused(forms, status)
        reason = _reason(forms, half)
        evidence = self._write_evidence(half, forms, status, reason, planning, judging)
        version = self.draft.publish(status, self._manifest(fingerprint, half, forms, reason, started))
        if status == LIVE:
            self.store.promote(version)
        self.say(f"{version} is {status}")
        return Conversion(version, facts_of(version) | evidence)

    def _example(self) -> list[Tensor]:
        rows = min(3, max(1, self.spec.max_batch_size)) if self.spec.batched else 0
        _, arrays = next(iter(self.samples.batches(rows, 1)))
        return [to_torch(arrays[tensor.name]) for tensor in self.spec.inputs]

    def _write_whole(self) -> None:
        folder = self.draft.folder
        self.draft.write_json("spec.json", self.spec.to_json())
        self.samples.save(folder / "samples.safetensors")
        save_file(_untied(self.whole.state_dict), folder / "weights.safetensors")
        save_program(self.whole, folder / "whole.pt2", weights=False)
        _copy_source(self.asked.folder, folder / "source")

    def _form(self, name: str, half: HalfProgram, exam: Exam, example: Sequence[Tensor]) -> Form:
        """Make one form, prove it, and leave its file in the draft only if it passed."""
        self.say(f"proving the {name} form")
        facts = _program_facts(half)
        try:
            if name == "torch":
                file, report = self._torch_form(half, exam)
            else:
                file, report = self._onnx_form(half, exam, example)
        except CannotConvert as error:
            return Form(facts | {"passed": False, "error": str(error)}, error=error)
        if report is None:  # nothing in it is half: it is the whole
            facts |= {"passed": True, "max_error_u": 0.0, "sqnr_db": None}
        else:
            found = report.to_json()
            facts |= {key: found[key] for key in ("passed", "max_error_u", "sqnr_db")}
        if facts["passed"]:
            facts |= {"file": file, "digest": sha256_of(self.draft.folder / file)}
        return Form(facts, report)

    def _drop_refused(self, forms: Mapping[str, Form], status: str) -> None:
        """A file that was refused is not kept where somebody could load it.

        The half program stays beside a proven ONNX form: on a CPU that form is judged with its help.
        """
        if status == REFUSED:
            (self.draft.folder / "half.pt2").unlink(missing_ok=True)
        if "onnx" in forms and not forms["onnx"].passed:
            (self.draft.folder / "half.onnx").unlink(missing_ok=True)

    def _torch_form(self, half: HalfProgram, exam: Exam) -> tuple[str, ParityReport | None]:
        return ("half.pt2", self._judged(half, exam)) if half.half_nodes else ("whole.pt2", None)

    def _onnx_form(
        self, half: HalfProgram, exam: Exam, example: Sequence[Tensor]
    ) -> tuple[str, ParityReport | None]:
        folder = self.draft.folder
        about = {"model": self.spec.name, "precision": "fp32"}
        write_onnx(self.whole, self.spec, folder / "whole.onnx", example, about)
        check_whole_form(exam, answers_of(self.spec, OnnxEngine(folder / "whole.onnx", "fp32", CPU)))
        if not half.half_nodes:
            return "whole.onnx", None
        about |= {
            "precision": self.asked.precision.dtype,
            "level": self.asked.precision.level,
            "kept": ",".join(kept.node for kept in half.plan.kept),
        }
        write_onnx(half.program, self.spec, folder / "half.onnx", example, about)
        session = OnnxEngine(folder / "half.onnx", self.asked.precision.dtype, CPU)
        # ONNX Runtime computes FP16 chains in FP32 on a CPU: the program's own half storage judges as well
        return "half.onnx", self._judged(half, exam, take(exam, answers_of(self.spec, session)))

    def _judged(self, half: HalfProgram, exam: Exam, *others: Taken) -> ParityReport:
        engine = TorchEngine(half.program, self.asked.precision.dtype, CPU)
        trials = take(exam, answers_of(self.spec, engine), emulated(self.spec, half.program))
        return judged(exam, self.asked.precision.dtype, [trials, *others])

    def _write_evidence(
        self,
        half: HalfProgram,
        forms: Mapping[str, Form],
        status: str,
        reason: str,
        planning: Samples,
        judging: Samples,
    ) -> dict[str, Any]:
        reports = {name: form.report.to_json() for name, form in forms.items() if form.report}
        here = environment(CPU)
        self.draft.write_json("parity.json", {"environment": here, "forms": reports})
        self.draft.write_json("precision.json", half.plan.to_json(runnable(self.whole).graph))
        facts = {
            "model": self.spec.name,
            "version": "draft",
            "digest": next((f.facts["digest"] for f in forms.values() if "digest" in f.facts), ""),
            "status": status,
            "reason": reason,
            "precision": {
                "level": self.asked.precision.level,
                "dtype": self.asked.precision.dtype,
                "policy lists": f"torch.autocast, {half.plan.lists}",
            },
            "forms": {n: form.facts | {"parity": reports.get(n)} for n, form in forms.items()},
            "samples": {
                "source": self.samples.source,
                "planning": planning.count,
                "judging": judging.count,
                "batch_sizes": next((report["batch_sizes"] for report in reports.values()), []),
            },
            "environment": here,
            "capture": {"notes": list(self.captured.notes)},
            "replay": f"halfeven parity {self.spec.name}",
        }
        (self.draft.folder / "report.html").write_text(render_html(facts))
        return {"notes": list(self.captured.notes)} if self.captured.notes else {}

    def _manifest(
        self, fingerprint: str, half: HalfProgram, forms: Mapping[str, Form], reason: str, started: float
    ) -> dict[str, Any]:
        return {
            "model": self.spec.name,
            "half": self.asked.precision.dtype if half.half_nodes else None,
            "reason": reason,
            "forms": {name: form.facts for name, form in forms.items()},
            "parent": None,
            "lineage": {"source": "convert", "level": self.asked.precision.level},
            "environment": environment(CPU),
            "fingerprint": fingerprint,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "seconds": round(time.perf_counter() - started, 2),
        }


def _asked(folder: ModelFolder, options: Options) -> ModelFolder:
    """The folder with the command line's words in place of its own; keep patterns add up."""
    own = folder.precision
    level, dtype = options.level or own.level, options.dtype or own.dtype
    precision = Precision.parse(level, dtype, (*own.keep, *options.keep), own.embeddings, "--level/--dtype:")
    if "live" in options.forms or (folder.spec.form == "live"):
        raise BadInput("the live form is not built yet: use --form torch, onnx or both")
    return replace(folder, precision=precision)


def _samples(folder: ModelFolder, options: Options) -> Samples:
    path = options.samples or folder.samples
    samples = load_samples(path, folder.spec) if path else generate(folder.spec, GENERATED)
    if samples.count == 0:
        raise BadInput(f"{path} holds no samples: give at least one, better a hundred")
    return samples


def _check_signature(spec: ModelSpec, newest: Version | None, options: Options) -> None:
    if newest is None or options.new_signature or newest.spec().signature() == spec.signature():
        return
    raise BadInput(
        f"'{spec.name}' has changed its signature since {newest}: {newest.spec().signature()} became "
        f"{spec.signature()}; callers would break. Say --new-signature if that is meant"
    )


def _program_facts(half: HalfProgram) -> dict[str, Any]:
    return {
        "passed": False,
        "max_error_u": None,
        "sqnr_db": None,
        "nodes": half.nodes,
        "half_nodes": half.half_nodes,
        "fp32_by_policy": half.plan.fp32_by_policy,
        "kept": [kept.to_json() for kept in half.plan.kept],
        "casts": half.casts,
        "bytes": half.bytes,
        "bytes_fp32": half.bytes_fp32,
    }


def _reason(forms: Mapping[str, Form], half: HalfProgram) -> str:
    if not half.half_nodes:
        return "no node of the program is half under this policy: it is served in FP32"
    refusals = [
        f"{name}: {form.report.summary() if form.report else form.facts['error']}"
        for name, form in forms.items()
        if not form.passed
    ]
    return "; ".join(refusals) or "proven equal in every form asked for"


def _untied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """safetensors refuses names that share memory; here each is written whole and tied again by the program."""
    return {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}


def _copy_source(folder: Path, target: Path) -> None:
    """The folder's text, for the trainer and for making the program again under another torch."""
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        hidden = any(part.startswith((".", "__pycache__")) for part in inside.parts)
        if (
            path.is_file()
            and not hidden
            and path.suffix in SOURCE_SUFFIXES
            and path.stat().st_size < SOURCE_MAX_BYTES
        ):
            (target / inside).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / inside)


def _fingerprint(folder: ModelFolder, options: Options) -> str:
    """Equal for equal work: the folder's bytes, what was asked, and what does the work."""
    digest = hashlib.sha256(repr((folder.precision, options, sorted(environment(CPU).items()))).encode())
    files = {path for path in (folder.weights, folder.samples, options.samples) if path}
    files |= {p for p in folder.folder.rglob("*") if p.is_file() and p.suffix in SOURCE_SUFFIXES}
    for path in sorted(files):
        digest.update(f"\0{path}\0{sha256_of(path)}".encode())
    return digest.hexdigest()
