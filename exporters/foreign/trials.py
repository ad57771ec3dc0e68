"""The planning samples, asked of the whole once and of every candidate half: what the search's judge sees."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain

import numpy as np
from onnx import ModelProto

from ...models.spec import ModelSpec, ParityLimits
from ..gate.parity import UNIT_ROUNDOFF, judge, min_sqnr_db
from ..gate.trial import Trial
from ..gate.verdict import ParityReport
from ..inputs.samples import Samples
from ..inputs.shaken import shaken
from ..inputs.synthetic import adversarial
from ..operations import UNKNOWN, Meter, Operations
from ..question import Answers, Arrays, Question
from ..search.company import SAME_IN_FP32, Company
from ..search.delta_debugging import Score
from ..search.lessons import MANY, SHARE, TOGETHER, Lessons, answered_within
from ..search.ranking import ranking
from .graph import HALVES
from .oracle import Oracle
from .profile import LARGEST
from .rewrite import HalfGraph
from .ties import ForeignTies

Batch = tuple[tuple[int, ...], Arrays]

ROWS = 8
PLANNING_SAMPLES = 32  # that every half is asked; where outputs rank, more of them are neighbours like others
SAMPLES_OPERATIONS = 1 << 35  # for the whole's answers to what every candidate is asked
FEW = 16  # of them are asked again, shaken; but what picks boxes picks others then, and nobody is at fault
# What passed on planning samples is judged on others: the limits are tighter here (shares of the error that the gate
# allows, and dB above what it asks for). Once nodes must be kept the worst error is held tighter still, because it
# differs from sample to sample as ratios over all of them do not.
ENOUGH, AIM = (SHARE, 0.5), (0.8, 0.5)
THOROUGH, THOUSANDS = (0.95, 0.5), 2000  # where so many neighbours are asked there is less left to chance
HEADROOM = 2.0  # below half's largest number, for every value on real samples
LARGER = 1.5  # times real samples must not overflow either: exponentials grow faster than their inputs
UNUSED = 1 << 20  # a number above those of all samples that are asked together
HOPELESS = 8.0  # times the limit


class Trials:
    """The whole has answered when this is made; ``score`` lets a half answer."""

    def __init__(
        self,
        spec: ModelSpec,
        planning: Samples,
        whole: Answers,
        dtype: str,
        model: Callable[[], ModelProto] | None = None,
        apart: bool = True,
        operations: Operations = UNKNOWN,
    ) -> None:
        """``model`` gives the whole, to find integers that may differ because their scores tie. ``apart``: as
        `Lessons` has it. ``operations``: of one execution of the whole, or of a half."""
        self.meter = Meter(operations)
        whole = self.meter.on(whole)
        rows = min(spec.max_batch_size, ROWS, max(planning.count, 1)) if spec.batched else 0
        few, more = planning.take(slice(0, FEW)), planning.take(slice(PLANNING_SAMPLES, None))
        planning = planning.take(slice(0, PLANNING_SAMPLES))

        def neighbours(more: Iterable[Samples], first: int, **how: int) -> Iterator[Batch]:
            can_move = all(tensor.type.is_float for tensor in spec.outputs)
            for part in chain(more, shaken(spec, few, **how) if can_move else ()):
                for samples, inputs in part.batches(rows):
                    yield tuple(first + sample for sample in samples), inputs
                first += part.count  # no two different samples have the same number

        def asked(batches: Iterable[Batch]) -> Iterator[Question]:
            return (Question(samples, inputs, whole(inputs)) for samples, inputs in batches)

        spent = self.meter.spent
        self.own = answered_within(SAMPLES_OPERATIONS, asked(planning.batches(rows)), spent)
        left = SAMPLES_OPERATIONS - spent()
        self.real = [*self.own, *answered_within(left, asked(neighbours([], planning.count)), spent)]
        self._in_company = rows > 1
        copies = -(-(TOGETHER if self._in_company else MANY) // max(few.count, 1))
        self.lessons = Lessons(
            self.own,
            lambda: asked(neighbours([more], UNUSED, copies=copies, seed=1)),
            lambda trials: self._gate(self._lesson_aim, trials, []),
            apart,
            rank=ranking(spec, dtype),
            spent=spent,
        )
        self.odd = [
            Question(tuple(range(_rows(spec, inputs))), inputs, whole(inputs), name)
            for name, inputs in adversarial(spec, planning)
        ]
        self.company = Company(whole)
        for several in (self.real[1:], self.odd):
            self._gather(several)
        self.larger = [_larger(spec, asked.inputs) for asked in self.real[:1]]
        self.larger = [inputs for inputs in self.larger if _all_finite(whole(inputs))]
        self.dtype = dtype
        self.ties = ForeignTies(model(), UNIT_ROUNDOFF[dtype], self._judging) if model else None
        self.widened: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.specs = {
            shares: replace(spec, parity=_tightened(spec.parity, dtype, *shares))
            for shares in (ENOUGH, THOROUGH, AIM)
        }

    @cached_property
    def many(self) -> Sequence[Question]:
        """The neighbours that a half is asked about once it has passed on the samples."""
        self._gather(self.lessons.many)
        return self.lessons.many

    @cached_property
    def _lesson_aim(self) -> tuple[float, float]:
        """A large model is asked about fewer (`lessons.OPERATIONS`)."""
        return THOROUGH if sum(len(one.samples) for one in self.many) >= THOUSANDS else ENOUGH

    @cached_property
    def aim(self) -> tuple[float, float]:
        """For what a search finds: it needs less margin where it is asked about many neighbours afterwards."""
        return ENOUGH if self.many else AIM

    def learn(self, graph: HalfGraph) -> bool:
        """Whether a half fails neighbours that it was not asked about (`lessons.Lessons`)."""
        if not self.many:
            return False
        learned = self.lessons.learn(self._answers(Oracle(graph.model, graph.weights, widened=self.widened)))
        self._gather(self.lessons.learned)
        return learned

    def score(
        self, graph: HalfGraph, unwatched: Collection[str] = (), aim: tuple[float, float] = AIM
    ) -> Score:
        """Run a half with true half storage and let the gate judge, under limits that leave it a margin.

        The samples themselves have to pass, and then they and their shaken neighbours.
        A half value that comes near overflow on real samples fails as well: others will go further. Values
        that are infinite in the whole already may be, and those proven to be bounded need no watching.
        """
        largest: dict[str, float] = {}

        def observe(name: str, array: np.ndarray, type_: int) -> None:
            name = graph.sources.get(name, name)
            if type_ == HALVES[self.dtype] and array.size and name not in unwatched:
                largest[name] = max(largest.get(name, 0.0), _largest(array))

        oracle = Oracle(graph.model, graph.weights, observe=observe, widened=self.widened)
        answers = self._answers(oracle)
        failed = self.lessons.failed(answers)
        if failed is not None:
            return replace(_scored(failed), passed=False)
        real = [answers(self.real[0])]
        if _is_hopeless(report := self._judged(aim, real, [])):
            return _scored(report)
        real += map(answers, self.own[1:])
        if not (report := self._judged(aim, real, [])).passed:
            return _scored(report)
        real += map(answers, self.real[len(self.own) :])
        near = {name: size for name, size in largest.items() if size > LARGEST[self.dtype] / HEADROOM}
        for inputs in self.larger:
            self.meter.on(oracle.run)(inputs)
        near |= {name: size for name, size in largest.items() if size > LARGEST[self.dtype]}
        odd = [answers(one) for one in self.odd]
        report = self._judged(aim, real, odd)
        if report.passed and near:
            name, size = max(near.items(), key=lambda item: item[1])
            reason = f"'{name}' reaches {size:.3g}, too near to half's largest number"
            return replace(_scored(report), passed=False, reason=reason)
        return _scored(report)

    def _gather(self, several: Sequence[Question]) -> None:
        if self._in_company:
            self.company.gather(several)

    def _judged(self, aim: tuple[float, float], real: list[Trial], odd: list[Trial]) -> ParityReport:
        return self._gate(aim, [*self.lessons.scale, *real], odd)

    def _gate(self, aim: tuple[float, float], real: Sequence[Trial], odd: Sequence[Trial]) -> ParityReport:
        with np.errstate(all="ignore"):
            return judge(self.specs[aim], self.dtype, real, odd)

    def _answers(self, oracle: Oracle) -> Callable[[Question], Trial]:
        """Lets one half answer."""
        answered = self.company.answered_by(self.meter.on(oracle.run))
        return lambda one: self._trial(one, answered(one))

    def _trial(self, asked: Question, answers: Arrays) -> Trial:
        ties = self.ties.excused(asked.inputs, asked.reference, answers) if self.ties else {}
        return Trial(asked.samples, asked.reference, answers, ties, asked.name)

    def _judging(self) -> list[Arrays]:
        return [asked.inputs for asked in self.real]


def _largest(array: np.ndarray) -> float:
    """The largest magnitude; NaN is none."""
    sizes = np.abs(array)
    largest = float(sizes.max())
    return largest if not math.isnan(largest) else float(np.nan_to_num(sizes, nan=0.0, posinf=np.inf).max())


def _is_hopeless(report: ParityReport) -> bool:
    """Whether the first batch errs so much that the others need not be asked."""
    return any(
        not output.max_error_u <= HOPELESS * output.limit_u for output in report.outputs if output.failures
    )


def _scored(report: ParityReport) -> Score:
    error = report.max_error_u if np.isfinite(report.max_error_u) else float("inf")
    return Score(report.passed, error, report.summary())


def _tightened(limits: ParityLimits, dtype: str, share: float, decibels: float) -> ParityLimits:
    return replace(
        limits,
        max_error_u=limits.max_error_u * share,
        min_sqnr_db=min_sqnr_db(limits, UNIT_ROUNDOFF[dtype]) + decibels,
        min_slice_sqnr_db=limits.min_slice_sqnr_db + decibels,
    )


def _larger(spec: ModelSpec, inputs: Arrays) -> Arrays:
    floats = {
        tensor.name for tensor in spec.inputs if tensor.type.is_float and "mask" not in tensor.name.lower()
    }
    return {
        name: (array * LARGER).astype(array.dtype) if name in floats else array
        for name, array in inputs.items()
    }


def _all_finite(answers: Arrays) -> bool:
    return all(np.isfinite(array.astype(np.float64)).all() for array in answers.values())


def _rows(spec: ModelSpec, inputs: Arrays) -> int:
    return len(inputs[spec.inputs[0].name]) if spec.batched else 1


def answers_alone_differ(spec: ModelSpec, planning: Samples, whole: Answers) -> str | None:
    """Why rows must not be batched: they answer otherwise in company, or the graph takes no company."""
    if planning.count < 2:
        return None
    _, together = next(planning.batches(min(3, spec.max_batch_size)))
    alone = [whole({name: array[:1] for name, array in together.items()})]
    try:
        joint = whole(together)
    except Exception as error:
        return f"the graph does not run with more than one row ({str(error)[:200]})"
    for tensor in spec.outputs:
        one, other = alone[0][tensor.name], joint[tensor.name]
        if len(other) != len(next(iter(together.values()))):
            return f"output '{tensor.name}' gives {len(other)} rows for {len(next(iter(together.values())))}"
        if one.shape[1:] != other.shape[1:]:
            return f"output '{tensor.name}' has another shape in company"
        with np.errstate(all="ignore"):
            gap = np.abs(one[0].astype(np.float64) - other[0].astype(np.float64))
            scale = float(np.nanmax(np.abs(other.astype(np.float64)), initial=0.0)) or 1.0
        if not np.nanmax(gap, initial=0.0) <= SAME_IN_FP32 * scale:
            return f"the answer of output '{tensor.name}' depends on the other rows of its batch"
    return None
