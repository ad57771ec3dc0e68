"""The one road: plan, rewrite, export, prove, publish. There is no other way to be served.

A conversion comes onto it from a model folder (`convert.py`), a fine-tuned model from its parent's captured
program with new weights (`retrain.py`).
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..models.archive import save_program
from ..models.engines.arrays import to_torch
from ..models.engines.onnx_engine import OnnxEngine
from ..models.engines.torch_engine import TorchEngine, use_true_fp32
from ..models.errors import CannotConvert
from ..models.program import runnable
from ..models.store import LIVE, REFUSED, Draft, Store, Version, sha256_of
from .autocast import HalfProgram, rewrite
from .evidence import Evidence, Form, copy_source, program_facts
from .onnx import write_onnx
from .plan import make_plan
from .prove import Answers, Exam, Taken, answers_of, check_whole_form, emulated, judged, set_exam, take
from .subject import FurtherVerdict, Subject
from .verdict import ParityReport

CPU = torch.device("cpu")
Say = Callable[[str], None]


def travel(subject: Subject, store: Store, say: Say) -> Version:
    """Go the whole way. The version is live and on duty, or kept as refused with its report.

    Raises CannotConvert where no form can be made at all; then nothing is left behind.
    """
    use_true_fp32()
    with store.draft(subject.spec.name) as draft:
        version = _Journey(subject, draft, say).go()
    if version.status == LIVE:
        store.promote(version)
    say(f"{version} is {version.status}")
    return version


@dataclass(slots=True)
class _Journey:
    subject: Subject
    draft: Draft
    say: Say
    half: HalfProgram = field(init=False)
    exam: Exam = field(init=False)
    example: list[Tensor] = field(init=False)
    proven: dict[str, Answers] = field(default_factory=dict)

    def go(self) -> Version:
        started = time.perf_counter()
        subject = self.subject
        self.say("planning and rewriting")
        self.example = self._example()
        plan = make_plan(runnable(subject.program).graph, subject.precision)
        self.half = rewrite(subject.program, plan, subject.spec, self.example)
        self.say("answering the judging samples in FP32")
        planning, judging = subject.samples.split()
        whole = TorchEngine(subject.program, "fp32", CPU)
        self.exam = set_exam(subject.spec, judging, answers_of(subject.spec, whole))
        self._write_programs()
        forms = {name: self._form(name) for name in subject.forms}
        errors = [form.error for form in forms.values() if form.error]
        if len(errors) == len(forms):
            raise errors[0]
        further = self._judge_further(forms)
        good = any(form.passed for form in forms.values()) and (further is None or further.passed)
        status = LIVE if good else REFUSED
        self._drop_refused(forms, status)
        evidence = Evidence(subject, self.half, forms, status, further)
        evidence.write(self.draft, planning.count, judging.count)
        return self.draft.publish(status, evidence.manifest(time.perf_counter() - started))

    def _example(self) -> list[Tensor]:
        spec = self.subject.spec
        rows = min(3, max(1, spec.max_batch_size)) if spec.batched else 0
        _, arrays = next(iter(self.subject.samples.batches(rows, 1)))
        return [to_torch(arrays[tensor.name]) for tensor in spec.inputs]

    def _write_programs(self) -> None:
        subject, folder = self.subject, self.draft.folder
        self.draft.write_json("spec.json", subject.spec.to_json())
        subject.samples.save(folder / "samples.safetensors")
        save_file(_untied(subject.program.state_dict), folder / "weights.safetensors")
        save_program(subject.program, folder / "whole.pt2", weights=False)
        copy_source(subject.source, folder / "source")
        if self.half.half_nodes:
            save_program(self.half.program, folder / "half.pt2", weights=True)

    def _form(self, name: str) -> Form:
        """Make one form and prove it."""
        self.say(f"proving the {name} form")
        facts = program_facts(self.half)
        try:
            file, report = self._torch_form() if name == "torch" else self._onnx_form()
        except CannotConvert as error:
            return Form(facts | {"error": str(error)}, error=error)
        if report is None:  # nothing in it is half: it is the whole
            facts |= {"passed": True, "max_error_u": 0.0}
        else:
            found = report.to_json()
            facts |= {key: found[key] for key in ("passed", "max_error_u", "sqnr_db")}
        if facts["passed"]:
            facts |= {"file": file, "digest": sha256_of(self.draft.folder / file)}
        return Form(facts, report)

    def _torch_form(self) -> tuple[str, ParityReport | None]:
        spec, dtype = self.subject.spec, self.subject.precision.dtype
        if not self.half.half_nodes:
            self.proven["torch"] = answers_of(spec, TorchEngine(self.subject.program, "fp32", CPU))
            return "whole.pt2", None
        self.proven["torch"] = answers_of(spec, TorchEngine(self.half.program, dtype, CPU))
        return "half.pt2", self._judged()

    def _onnx_form(self) -> tuple[str, ParityReport | None]:
        spec, folder = self.subject.spec, self.draft.folder
        about = {"model": spec.name, "precision": "fp32"}
        write_onnx(self.subject.program, spec, folder / "whole.onnx", self.example, about)
        whole = answers_of(spec, OnnxEngine(folder / "whole.onnx", "fp32", CPU))
        check_whole_form(self.exam, whole)
        if not self.half.half_nodes:
            self.proven["onnx"] = whole
            return "whole.onnx", None
        asked = self.subject.precision
        about |= {
            "precision": asked.dtype,
            "level": asked.level,
            "kept": ",".join(kept.node for kept in self.half.plan.kept),
        }
        write_onnx(self.half.program, spec, folder / "half.onnx", self.example, about)
        self.proven["onnx"] = answers_of(spec, OnnxEngine(folder / "half.onnx", asked.dtype, CPU))
        # ONNX Runtime computes FP16 chains in FP32 on a CPU: the program's own half storage judges as well
        return "half.onnx", self._judged(take(self.exam, self.proven["onnx"]))

    def _judged(self, *others: Taken) -> ParityReport:
        spec, dtype = self.subject.spec, self.subject.precision.dtype
        storage = answers_of(spec, TorchEngine(self.half.program, dtype, CPU))
        taken = take(self.exam, storage, emulated(spec, self.half.program))
        return judged(self.exam, dtype, [taken, *others])

    def _judge_further(self, forms: Mapping[str, Form]) -> FurtherVerdict | None:
        passed = {name: self.proven[name] for name, form in forms.items() if form.passed}
        if self.subject.further is None or not passed:
            return None
        self.say("judging what was learnt")
        return self.subject.further(passed)

    def _drop_refused(self, forms: Mapping[str, Form], status: str) -> None:
        """A file that was refused is not kept where somebody could load it.

        The half program stays beside a proven ONNX form: on a CPU that form is judged with its help.
        """
        if status == REFUSED:
            (self.draft.folder / "half.pt2").unlink(missing_ok=True)
        if status == REFUSED or ("onnx" in forms and not forms["onnx"].passed):
            (self.draft.folder / "half.onnx").unlink(missing_ok=True)
        if "onnx" in forms and forms["onnx"].error is not None:  # already its whole was not the program
            (self.draft.folder / "whole.onnx").unlink(missing_ok=True)


def _untied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """safetensors refuses names that share memory; each is written whole, and the program ties them again."""
    return {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}
