"""The gate on planning samples, in emulation: how would the half under this plan do?

One trial costs one run of the model and no export. The samples that choose a plan never judge it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule

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
from ..operations import Meter
from ..prove import emulated, ties_of, tried
from ..question import Answers, Arrays, Question
from ..search.company import Company
from ..search.delta_debugging import Score
from ..search.lessons import MANY, SHARE, TOGETHER, Lessons
from ..search.ranking import RANKED, ranking, ranks
from .program_operations import program_operations

MAX_SAMPLES = 16  # that a trial is judged on
ROWS = 8  # of one batch
UNUSED = 1 << 20  # a number above those of all samples that are asked together


class Rehearsal:
    """Asks the emulated half of one prepared whole (`models.program.runnable`) under any plan."""

    def __init__(
        self, module: GraphModule, spec: ModelSpec, dtype: str, planning: Samples, example: Sequence[Tensor]
    ) -> None:
        self._module, self.spec = module, spec
        self.meter = Meter(program_operations(module, example))
        self._typing = Typing(module, example)
        self._excuse = ties_of(module, spec, dtype, planning)
        self._few = planning.take(slice(0, MAX_SAMPLES))
        self._more = planning.take(slice(MAX_SAMPLES, RANKED if ranks(spec) else MAX_SAMPLES))
        self._nothing_half = self._typing.under(make_plan(module, Precision("O0")))
        self._whole = self._half(self._nothing_half, half_rounding(torch.float16))
        self._company = Company(self._whole)
        own = list(self._answered_alone(self._unanswered([self._few])))
        self.questions = [*own, *self._neighbours([], self._few.count), *self._odd()]
        copies = -(-(TOGETHER if spec.batched else MANY) // max(self._few.count, 1))
        limits = replace(spec, parity=stricter(spec.parity, dtype, SHARE))
        self.lessons = Lessons(
            own,
            lambda: self._neighbours([self._more], UNUSED, copies=copies, seed=1),
            lambda trials: judge(limits, dtype, trials),
            rank=ranking(spec, dtype),
            spent=self.meter.spent,
        )

    def dtypes(self, plan: PrecisionPlan) -> Dtypes:
        return self._typing.under(plan)

    def report(self, plan: PrecisionPlan, limits: ParityLimits, floor: bool = False) -> ParityReport:
        """The gate's report on the emulated half; with ``floor``, on one that has FP32's range."""
        rounding = (mantissa_rounding if floor else half_rounding)(plan.dtype)
        dtypes = self._typing.under(plan)
        trials = list(map(self._trials(dtypes, rounding), self.questions))
        real, odd = [t for t in trials if not t.name], [t for t in trials if t.name]
        return judge(replace(self.spec, parity=limits), plan.precision.dtype, real, odd)

    def score(self, plan: PrecisionPlan, limits: ParityLimits) -> Score:
        failed = (
            self.lessons.failed(self._answered(plan)) if self.lessons.learned or self.lessons.ranked else None
        )
        if failed is not None:
            return Score(False, failed.max_error_u, failed.summary())
        report = self.report(plan, limits)
        error = max((output.max_error_u for output in report.outputs), default=np.inf)
        wrong = any(verdict.failures for verdict in report.adversarial)
        return Score(report.passed, np.inf if wrong else error, report.summary())

    def learn(self, plan: PrecisionPlan) -> bool:
        """Whether the half fails neighbours that it was not asked about (`lessons.Lessons`)."""
        learned = self.lessons.learn(self._answered(plan))
        if self.spec.batched:
            self._company.gather(self.lessons.learned)
        return learned

    def _answered(self, plan: PrecisionPlan) -> Callable[[Question], Trial]:
        return self._trials(self._typing.under(plan), half_rounding(plan.dtype))

    def _answered_alone(self, several: Iterable[Question]) -> Iterator[Question]:
        return (replace(one, reference=self._whole(one.inputs)) for one in several)

    def _neighbours(self, more: Iterable[Samples], first: int, **how: int) -> Iterator[Question]:
        unanswered = self._unanswered(chain(more, shaken(self.spec, self._few, **how)), first)
        return self._company.ask(unanswered) if self.spec.batched else self._answered_alone(unanswered)

    def _unanswered(self, parts: Iterable[Samples], first: int = 0) -> Iterator[Question]:
        """``first``: the number of the first sample; no two different ones have the same."""
        spec = self.spec
        rows = min(ROWS, spec.max_batch_size, max(self._few.count, 1)) if spec.batched else 0
        for part in parts:
            for samples, inputs in part.batches(rows):
                yield Question(tuple(first + sample for sample in samples), inputs, {})
            first += part.count

    def _odd(self) -> Iterator[Question]:
        for name, inputs in adversarial(self.spec, self._few):
            yield Question(_rows(self.spec, inputs), inputs, self._whole(inputs), name)

    def _trials(self, dtypes: Dtypes, rounding: Rounding) -> Callable[[Question], Trial]:
        """Lets one half answer."""
        answered = self._company.answered_by(self._half(dtypes, rounding))
        return lambda one: tried(
            one.samples, one.inputs, one.reference, answered(one), self._excuse, one.name
        )

    def _half(self, dtypes: Dtypes, rounding: Rounding) -> Answers:
        return self.meter.on(emulated(self.spec, Emulation(self._module, dtypes, rounding)))


def stricter(limits: ParityLimits, dtype: str, share: float) -> ParityLimits:
    """Limits with room to spare: the error's times ``share``, the ratios' as many decibels higher."""
    decibels = -20 * float(np.log10(share))
    return replace(
        limits,
        max_error_u=limits.max_error_u * share,
        min_sqnr_db=min_sqnr_db(limits, UNIT_ROUNDOFF[dtype]) + decibels,
        min_slice_sqnr_db=limits.min_slice_sqnr_db + decibels,
    )


def _rows(spec: ModelSpec, arrays: Arrays) -> tuple[int, ...]:
    return tuple(range(len(arrays[spec.inputs[0].name]) if spec.batched else 1))
