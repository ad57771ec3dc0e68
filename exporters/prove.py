"""Run the whole and the half on the same inputs and let the gate judge.

On a CPU the bulk of the samples may be judged by half-rounding emulation where true half kernels would take
too long; those still answer at the small batch sizes. ONNX Runtime's CPU provider computes FP16 chains in
FP32, so there an ONNX half is judged by the same program's half storage as well.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.export import ExportedProgram

from ..models.engines.arrays import to_numpy, to_torch
from ..models.engines.engine import Engine
from ..models.errors import ExportFailed
from ..models.spec import ModelSpec
from .emulation import Emulation
from .parity import judge
from .samples import Samples
from .synthetic import adversarial
from .trial import Trial
from .verdict import ParityReport

Arrays = Mapping[str, np.ndarray]
Answers = Callable[[Arrays], dict[str, np.ndarray]]

SMALL_BATCHES = 4  # of each size below the largest
MAX_JUDGED = 2048
TRUE_KERNELS_SECONDS = 5.0  # above this the bulk is judged by emulation
SAME_IN_FP32 = 1e-4  # of the output's largest value: kernels may sum in another order


@dataclass(frozen=True, slots=True)
class Exam:
    """The inputs of one proof with the whole's answers to them: made once, used for every form."""

    spec: ModelSpec
    small: list[Trial]
    bulk: list[Trial]
    adversarial: list[Trial]
    inputs: dict[int, Arrays]
    targets: Mapping[str, np.ndarray]


def answers_of(spec: ModelSpec, engine: Engine) -> Answers:
    """An engine as a function of named arrays."""

    def answer(arrays: Arrays) -> dict[str, np.ndarray]:
        outputs = engine.run([[arrays[tensor.name]] for tensor in spec.inputs])
        return {tensor.name: output for tensor, output in zip(spec.outputs, outputs, strict=True)}

    return answer


def emulated(spec: ModelSpec, program: ExportedProgram) -> Answers:
    """A half program on a CPU without half kernels."""
    emulation = Emulation(program)

    def answer(arrays: Arrays) -> dict[str, np.ndarray]:
        with torch.inference_mode():
            outputs = emulation.run(*[to_torch(arrays[tensor.name].copy()) for tensor in spec.inputs])
        return {tensor.name: to_numpy(output) for tensor, output in zip(spec.outputs, outputs, strict=True)}

    return answer


def set_exam(spec: ModelSpec, judging: Samples, whole: Answers) -> Exam:
    """Let the whole answer the judging samples at batch sizes 1, 2, 3 and max, and the adversarial inputs."""
    judging = judging.take(slice(0, MAX_JUDGED))
    inputs: dict[int, Arrays] = {}

    def trial(indices: tuple[int, ...], arrays: Arrays, name: str = "") -> Trial:
        reference = whole(arrays)
        made = Trial(indices, reference, {}, name=name)
        inputs[id(made)] = arrays
        return made

    largest = min(spec.max_batch_size, max(judging.count, 3)) if spec.batched else 0
    sizes = sorted({rows for rows in (1, 2, 3) if rows < largest})
    small = [
        trial(indices, arrays) for rows in sizes for indices, arrays in judging.batches(rows, SMALL_BATCHES)
    ]
    bulk = [trial(indices, arrays) for indices, arrays in judging.batches(largest)]
    odd = [
        trial(tuple(range(_rows(spec, arrays))), arrays, name) for name, arrays in adversarial(spec, judging)
    ]
    return Exam(spec, small, bulk, odd, inputs, judging.targets)


def prove(exam: Exam, dtype: str, half: Answers, stand_in: Answers | None = None) -> ParityReport:
    """Judge ``half`` (the form on its device).

    ``stand_in`` is the emulated half program: it takes the bulk where ``half`` would take too long.
    """
    real, odd = take(exam, half, stand_in)
    return judge(exam.spec, dtype, real, odd, exam.targets)


def take(exam: Exam, half: Answers, stand_in: Answers | None = None) -> tuple[list[Trial], list[Trial]]:
    """The answered trials: real ones, adversarial ones."""
    real = list(_answered(exam, exam.small, half))
    if exam.bulk:
        start = time.perf_counter()
        real += _answered(exam, exam.bulk[:1], half)
        slow = (time.perf_counter() - start) * (len(exam.bulk) - 1) > TRUE_KERNELS_SECONDS
        real += _answered(exam, exam.bulk[1:], stand_in if slow and stand_in else half)
    return real, list(_answered(exam, exam.adversarial, half))


def judged(exam: Exam, dtype: str, trials: Sequence[tuple[list[Trial], list[Trial]]]) -> ParityReport:
    """One report over the trials of several executions of the same half."""
    real = [trial for one, _ in trials for trial in one]
    odd = [trial for _, one in trials for trial in one]
    return judge(exam.spec, dtype, real, odd, exam.targets)


def check_whole_form(exam: Exam, answers: Answers) -> None:
    """The FP32 program in another form answers as the whole does: an exporter's fault is not half's.

    Raises ExportFailed naming the output.
    """
    for trial in (*exam.small, *exam.bulk[:1]):
        came = answers(exam.inputs[id(trial)])
        for name, expected in trial.reference.items():
            gap = _gap(expected, came[name])
            if not gap <= SAME_IN_FP32:
                raise ExportFailed(
                    f"in FP32 the exported form of '{exam.spec.name}' already differs from the program: output "
                    f"'{name}' by {gap:.3g} of its largest value (at most {SAME_IN_FP32:g}); this is the exporter's "
                    "fault, not half precision's: serve the torch form (--form torch)"
                )


def _answered(exam: Exam, trials: Iterable[Trial], half: Answers) -> Iterable[Trial]:
    for trial in trials:
        yield Trial(trial.samples, trial.reference, half(exam.inputs[id(trial)]), trial.ties, trial.name)


def _rows(spec: ModelSpec, arrays: Arrays) -> int:
    return len(arrays[spec.inputs[0].name]) if spec.batched else 1


def _gap(expected: np.ndarray, came: np.ndarray) -> float:
    if expected.shape != came.shape or expected.dtype != came.dtype:
        return float("inf")
    with np.errstate(invalid="ignore"):
        one, other = expected.astype(np.float64), came.astype(np.float64)
        if not np.array_equal(np.isfinite(one), np.isfinite(other)):
            return float("inf")
        finite = np.isfinite(one)
        gap, scale = np.abs(one - other)[finite], np.abs(one)[finite]
    largest = float(scale.max(initial=0.0))
    return float(gap.max(initial=0.0)) / (largest or 1.0)
