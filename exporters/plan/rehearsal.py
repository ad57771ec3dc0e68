"""The gate on planning samples, in emulation: how would the half under this plan do?

One trial costs one run of the model and no export. The samples that choose a plan never judge it.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from itertools import chain

import numpy as np

from ...models.spec.spec import ModelSpec, ParityLimits
from ..gate.parity import judge
from ..gate.refusals import without_advice
from ..gate.trial import Trial
from ..gate.verdict import OutputVerdict, ParityReport
from ..graph.backend import Graph
from ..inputs.perturbed import COPIES, perturbed, perturbed_if_small
from ..inputs.samples import PLANNING_SAMPLES, Samples, executions, few
from ..inputs.synthetic import LARGEST, adversarial
from ..policy.operations import Meter
from ..proof.prove import noise_among, tried
from ..question import Answers, Arrays, Invented, Question, is_refused
from ..search.delta_debugging import Score
from ..search.measured_order import MEASUREMENTS, by_measured_error
from ..search.ranking import RANKED, ranking
from .aims import stricter
from .batched import Batch, batches, elements_together
from .counterexamples import SHARE, Ask, Counterexamples

UNSEEN = 4096  # rows that a plan is tried on
UNSEEN_ALONE = 2048  # where a model takes one row at a time
MEASURING = 1 << 38  # operations, for what nodes cost


class Rehearsal:
    """Asks the emulated half of one graph under any plan."""

    def __init__(self, graph: Graph, planning: Samples) -> None:
        self._graph, spec = graph, graph.spec
        self.meter = Meter(graph.operations())
        self._original = self.meter.on(graph.original())
        self._tie_tolerance = graph.tie_tolerance(planning)
        self._few = few(planning, graph.operations(), self._bytes_of_a_row(planning))
        self._rows = max(self._few.count, 1)
        joins = spec.batched and spec.max_batch_size > 1
        self._together = elements_together(graph.operations()) if joins else 0
        self.own = list(self._batches(self._questions([self._few], 0)))
        self._perturbed = Invented(self._original)
        copies = perturbed_if_small(spec, self._few, graph.operations().of(self._few.arrays))
        moved = list(self._invented(self._questions(copies, 1)))
        self.samples = [*self.own, *(moved if self._perturbed.is_used else [])]
        self._adversarial: dict[float, list[Batch]] = {}
        self.adversarial()  # those of every search, whose budget they are no part of
        own = [one for batch in self.own for one in batch.questions]
        self._operations_of_a_row = max(
            (graph.operations().of(one.inputs) // len(one.samples) for one in own), default=0
        )
        self._exact = self.meter.on(graph.exact())
        self._noise = noise_among(spec, own, self._original, self._exact, self._operations_of_a_row)
        limits = replace(spec, parity=stricter(spec.parity, graph.precision.dtype, SHARE))
        joined = -(-PLANNING_SAMPLES // self._rows)  # copies of few samples that are judged as one set
        self.counterexamples = Counterexamples(
            self._rows * joined,
            lambda: without_near_ties(
                self._invented(self._questions(self._unseen(planning), (1 + COPIES) * joined)),
                lambda: graph.half([one.node for one in graph.candidates()]),
            ),
            self._batches,
            lambda trials: judge(limits, graph.precision.dtype, trials, noise=self._noise),
            rank=ranking(spec, graph.precision.dtype),
            spent=self.meter.spent,
        )

    def _bytes_of_a_row(self, planning: Samples) -> int:
        numbers, inputs = next(planning.batches(1 if self._graph.spec.batched else 0))
        return Question(numbers, inputs, self._graph.original()(inputs)).nbytes  # no part of any budget

    def leave_room_for(self, operations: int) -> None:
        """A plan, for so many operations from now on, has to leave room for swaps of samples that are never tried.
        Afterwards the gate's own limit is enough, so that the search of a large net ends with a plan."""
        self.counterexamples.room_ends = self.meter.spent() + operations

    def score(self, kept: Collection[str], limits: ParityLimits, largest: float = LARGEST) -> Score:
        """The gate's score of the half with these nodes kept; the samples as given have to pass first.

        ``largest``: as `adversarial`.
        """
        ask = self._ask(kept)
        failed = self.counterexamples.failed(ask)
        if failed is not None:
            return Score(False, failed.max_error_u, failed.summary())
        real = list(ask(self.own))
        report = self._judged(limits, real)
        if report.passed:
            real += ask(self.samples[len(self.own) :])
            report = self._judged(limits, real, list(ask(self.adversarial(largest))))
        broken = self.counterexamples.misordered(ask) if report.passed else None
        return _score(report) if broken is None else Score(False, broken.max_error_u, broken.summary())

    @cached_property
    def most_costly_first(self) -> list[str]:
        """The candidates by what they cost in half, measured on one batch (`search.measured_order`)."""
        end = self.meter.spent() + MEASURING
        affordable = max(MEASURING // MEASUREMENTS // max(self._operations_of_a_row, 1), 1)
        rows = self._few.take(slice(0, affordable)) if self._graph.spec.batched else self._few
        batch = list(self._batches(self._questions([rows], 0)))[:1]
        places = {node.name: place for place, node in enumerate(self._graph.nodes())}
        candidates = sorted((one.node for one in self._graph.candidates()), key=places.__getitem__)

        def error_of(nodes: Collection[str]) -> float:
            kept = [name for name in candidates if name not in nodes]
            report = self._judged(self._graph.spec.parity, list(self._ask(kept)(batch)))
            return max(map(_noise_of, report.outputs), default=math.inf if report.failures else 0.0)

        return by_measured_error(candidates, error_of, lambda: self.meter.spent() < end)

    def find_counterexamples(self, kept: Collection[str]) -> bool:
        """True if the half fails unseen samples (`Counterexamples`)."""
        ask = self._ask(kept)
        if self._suspects <= set(kept) and self.counterexamples.errs_little(ask):
            return False
        return self.counterexamples.search(ask)

    @cached_property
    def _suspects(self) -> set[str]:
        return {one.node for one in self._graph.candidates() if one.reason}

    def floor_passes(self) -> bool:
        """True if rounding alone, with FP32's range, stays within the gate's limits."""
        return self._at_the_limits(self._ask((), floor=True)).passed

    def why_it_misses(self, kept: Collection[str]) -> str:
        """The first limit of the gate that the half misses on the planning samples; empty where it misses none."""
        report = self._at_the_limits(self._ask(kept))
        return "" if report.passed else without_advice(report.all_failures[0]).message

    def _at_the_limits(self, ask: Ask) -> ParityReport:
        return self._judged(self._graph.spec.parity, list(ask(self.samples)), list(ask(self.adversarial())))

    def _judged(
        self, limits: ParityLimits, real: list[Trial], odd: list[Trial] | None = None
    ) -> ParityReport:
        spec = replace(self._graph.spec, parity=limits)
        return judge(spec, self._graph.precision.dtype, real, odd or [], noise=self._noise)

    def _ask(self, kept: Collection[str], floor: bool = False) -> Ask:
        """Lets one half answer."""
        half: Answers = self.meter.on(self._graph.half(kept, floor=floor))

        def ask(several: Iterable[Batch]) -> Iterator[Trial]:
            for batch in several:
                for one, answers in batch.answers(half):
                    if isinstance(answers, Exception) and is_refused(self._exact, one.inputs):
                        continue  # an input of ours (`ReferenceRun.otherwise`): the planning samples run
                    yield tried(
                        one.samples, one.inputs, one.reference, answers, self._tie_tolerance, one.name
                    )

        return ask

    def _batches(self, questions: Iterable[Question]) -> Iterator[Batch]:
        return batches(questions, self._original, self._together)

    def _invented(self, questions: Iterable[Question]) -> Iterator[Batch]:
        """The questions in batches, without the perturbed samples that the original refuses."""
        return batches(questions, self._original, self._together, self._perturbed)

    def _unseen(self, planning: Samples) -> Iterator[Samples]:
        """Planning samples that are not asked of every plan, then perturbed ones, unless the original refuses most."""
        spec, rows = self._graph.spec, self._rows
        more = range(rows, min(planning.count, RANKED), rows)
        copies = -(-(UNSEEN if self._together else UNSEEN_ALONE) // rows)
        given = (planning.take(slice(start, min(start + rows, RANKED))) for start in more)
        return chain(given, perturbed(spec, self._few, copies, seed=1) if self._perturbed.is_used else ())

    def _questions(self, sets: Iterable[Samples], first: int) -> Iterator[Question]:
        """``first``: the number of the first set; no two different samples have the same number."""
        for number, some in enumerate(sets, first):
            for samples, inputs in executions(self._graph.spec, some):
                yield Question(tuple(number * self._rows + sample for sample in samples), inputs, {})

    def adversarial(self, largest: float = LARGEST) -> list[Batch]:
        """The original's answers to adversarial inputs, without those that it refuses."""
        if largest not in self._adversarial:
            spec = self._graph.spec
            questions = [
                Question(_rows(spec, inputs), inputs, {}, name)
                for name, inputs in adversarial(spec, self._few, largest)
            ]
            odd = Invented(self._original)
            self._adversarial[largest] = list(batches(questions, self._original, self._together, odd))
        return self._adversarial[largest]


def _score(report: ParityReport) -> Score:
    error = max((output.max_error_u for output in report.outputs), default=np.inf)
    wrong = any(verdict.failures for verdict in report.adversarial) or not np.isfinite(error)
    return Score(report.passed, np.inf if wrong else error, report.summary())


def _noise_of(output: OutputVerdict) -> float:
    """The root mean square of the error, as a share of the answer's; of integers the number of those that differ."""
    if math.isfinite(output.sqnr_db):
        return 10 ** (-output.sqnr_db / 20)
    return float(output.different or output.max_error_u)


def _rows(spec: ModelSpec, arrays: dict[str, np.ndarray]) -> tuple[int, ...]:
    return tuple(range(len(arrays[spec.inputs[0].name]) if spec.batched else 1))


def without_near_ties(several: Iterable[Batch], all_kept: Callable[[], Answers]) -> Iterator[Batch]:
    """The batches without the questions to which the program with every node kept in FP32 gives other integers than
    the original, because its sums come in another order.

    Two boxes may overlap by almost exactly the threshold of a NonMaxSuppression. To keep nodes in FP32 does not help
    there, and a search that must pass such a sample leaves no node in half.

    ``all_kept`` makes that program. It is not called for a model without integer outputs.
    """
    half: Answers | None = None
    for batch in several:
        if not any(map(_decided, batch.questions[0].reference.values())):
            yield batch
            continue
        half = half or all_kept()
        same = tuple(
            one
            for one, answers in batch.answers(half)
            if not isinstance(answers, Exception) and _same_decisions(one.reference, answers)
        )
        if same:
            yield Batch(same)


def _same_decisions(original: Arrays, other: Arrays) -> bool:
    return all(np.array_equal(array, other[name]) for name, array in original.items() if _decided(array))


def _decided(array: np.ndarray) -> bool:
    return array.dtype.kind != "f"
