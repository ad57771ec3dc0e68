"""The gate on planning samples, in emulation: how would the half under this plan do?

One trial costs one run of the model and no export. The samples that choose a plan never judge it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule

from ...models.engines.arrays import to_numpy, to_torch
from ...models.package import Precision
from ...models.spec import ModelSpec, ParityLimits
from ..autocast.dtypes import Dtypes, Typing
from ..autocast.emulation import Emulation, Rounding, half_rounding, mantissa_rounding
from ..autocast.plan import PrecisionPlan, make_plan
from ..gate.parity import UNIT_ROUNDOFF, judge, min_sqnr_db
from ..gate.trial import Trial
from ..gate.verdict import ParityReport
from ..inputs.samples import Samples
from ..inputs.shaken import shaken
from ..inputs.synthetic import adversarial
from ..prove import ties_of, tried
from ..search.delta_debugging import Score
from ..search.lessons import MANY, SHARE, Lessons

MAX_SAMPLES = 16  # that a trial is judged on
ROWS = 8  # of one batch


@dataclass(frozen=True, slots=True)
class Question:
    """A batch of planning samples and the whole's answer; a ``name`` marks an adversarial one."""

    samples: tuple[int, ...]
    inputs: list[Tensor]
    reference: Mapping[str, np.ndarray]
    name: str = ""


class Rehearsal:
    """Asks the emulated half of one prepared whole (`models.program.runnable`) under any plan."""

    def __init__(
        self, module: GraphModule, spec: ModelSpec, dtype: str, planning: Samples, example: Sequence[Tensor]
    ) -> None:
        self._module, self._spec = module, spec
        self._typing = Typing(module, example)
        self._excuse = ties_of(module, spec, dtype, planning)
        self._few = planning.take(slice(0, MAX_SAMPLES))
        self._nothing_half = self._typing.under(make_plan(module, Precision("O0")))
        own = list(self._asked(self._few))
        self.questions = [*own, *self._asked(*shaken(spec, self._few)), *self._odd()]
        copies = -(-MANY // max(self._few.count, 1))
        limits = replace(spec, parity=stricter(spec.parity, dtype, SHARE))
        self.lessons = Lessons(
            own,
            lambda: self._asked(*shaken(spec, self._few, copies, seed=1)),
            lambda trials: judge(limits, dtype, trials),
        )

    def dtypes(self, plan: PrecisionPlan) -> Dtypes:
        return self._typing.under(plan)

    def report(self, plan: PrecisionPlan, limits: ParityLimits, floor: bool = False) -> ParityReport:
        """The gate's report on the emulated half; with ``floor``, on one that has FP32's range."""
        rounding = (mantissa_rounding if floor else half_rounding)(plan.dtype)
        dtypes = self._typing.under(plan)
        trials = [self._trial(question, dtypes, rounding) for question in self.questions]
        real, odd = [t for t in trials if not t.name], [t for t in trials if t.name]
        return judge(replace(self._spec, parity=limits), plan.precision.dtype, real, odd)

    def score(self, plan: PrecisionPlan, limits: ParityLimits) -> Score:
        failed = self.lessons.failed(self._answered(plan)) if self.lessons.learned else None
        if failed is not None:
            return Score(False, failed.max_error_u, failed.summary())
        report = self.report(plan, limits)
        error = max((output.max_error_u for output in report.outputs), default=np.inf)
        wrong = any(verdict.failures for verdict in report.adversarial)
        return Score(report.passed, np.inf if wrong else error, report.summary())

    def learn(self, plan: PrecisionPlan) -> bool:
        """Whether the half fails neighbours that it was not asked about (`lessons.Lessons`)."""
        return self.lessons.learn(self._answered(plan))

    def _answered(self, plan: PrecisionPlan) -> Callable[[Question], Trial]:
        dtypes, rounding = self._typing.under(plan), half_rounding(plan.dtype)
        return lambda question: self._trial(question, dtypes, rounding)

    def _asked(self, *parts: Samples) -> Iterator[Question]:
        spec = self._spec
        rows = min(ROWS, spec.max_batch_size, max(self._few.count, 1)) if spec.batched else 0
        for part in parts:
            for samples, arrays in part.batches(rows):
                yield self._question(samples, arrays)

    def _odd(self) -> Iterator[Question]:
        for name, arrays in adversarial(self._spec, self._few):
            yield self._question(_rows(self._spec, arrays), arrays, name)

    def _question(
        self, samples: tuple[int, ...], arrays: Mapping[str, np.ndarray], name: str = ""
    ) -> Question:
        inputs = [to_torch(arrays[tensor.name].copy()) for tensor in self._spec.inputs]
        answer = self._answer(self._nothing_half, half_rounding(torch.float16), inputs)
        return Question(samples, inputs, answer, name)

    def _trial(self, question: Question, dtypes: Dtypes, rounding: Rounding) -> Trial:
        answer = self._answer(dtypes, rounding, question.inputs)
        arrays = {
            tensor.name: to_numpy(value)
            for tensor, value in zip(self._spec.inputs, question.inputs, strict=True)
        }
        return tried(question.samples, arrays, question.reference, answer, self._excuse, question.name)

    def _answer(self, dtypes: Dtypes, rounding: Rounding, inputs: Sequence[Tensor]) -> dict[str, np.ndarray]:
        with torch.inference_mode():
            outputs = Emulation(self._module, dtypes, rounding).run(*[tensor.clone() for tensor in inputs])
        answers = zip(self._spec.outputs, outputs, strict=True)
        return {tensor.name: to_numpy(answer.to(tensor.type.torch)) for tensor, answer in answers}


def stricter(limits: ParityLimits, dtype: str, share: float) -> ParityLimits:
    """Limits with room to spare: the error's times ``share``, the ratios' as many decibels higher."""
    decibels = -20 * float(np.log10(share))
    return replace(
        limits,
        max_error_u=limits.max_error_u * share,
        min_sqnr_db=min_sqnr_db(limits, UNIT_ROUNDOFF[dtype]) + decibels,
        min_slice_sqnr_db=limits.min_slice_sqnr_db + decibels,
    )


def _rows(spec: ModelSpec, arrays: Mapping[str, np.ndarray]) -> tuple[int, ...]:
    return tuple(range(len(arrays[spec.inputs[0].name]) if spec.batched else 1))
