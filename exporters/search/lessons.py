"""A plan learns from counterexamples: found for a few samples, it is asked about many, and searched for again.

The smallest set of nodes that a few samples need lies close to its limit for others by nature. What is found is
therefore asked about many neighbours of the samples (`inputs/shaken.py`); those that it fails worst join the samples,
and the search goes on from what it kept (counterexample-guided synthesis: Solar-Lezama et al., ASPLOS 2006).
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Generic, Protocol, TypeVar

import numpy as np

from ..gate.trial import Trial
from ..gate.verdict import ParityReport
from .delta_debugging import Budget, Found, Judge, smallest_set
from .ranking import RANKED, RULES

MANY = 2048  # neighbours that a plan is asked about
TOGETHER = 4096  # where they may be asked together (`company.Company`)
OPERATIONS = 1 << 37  # for the whole's answers: a large model is asked about fewer
DRAWN = 16  # of them, as many as judge a folder without samples, have a scale of their own
ANSWERS_BYTES = 1 << 28  # that the whole's answers may take
WORST = 8  # batches that join the samples after one search
LESSONS = 8  # searches after the first
SHARE = 0.9  # of the error that the gate allows: there are others that nobody asked about
# Rules about all samples together, which one cannot break.
OVER_ALL = {"sqnr", "slice_sqnr", "kl", "flips", "accuracy", *RULES}
NOT_ALL = "there are neighbours of the planning samples that are not equal under this plan"


class Asked(Protocol):
    """One execution and the whole's answer to it."""

    @property
    def samples(self) -> tuple[int, ...]: ...

    @property
    def reference(self) -> Mapping[str, np.ndarray]: ...


A = TypeVar("A", bound=Asked)


@dataclass
class Lessons(Generic[A]):
    """Many neighbours of the samples, and those of them that halves failed.

    ``own``: the samples. ``draw`` gives the neighbours, as the whole answers them, one copy of the samples after the
    other. ``judge``: the gate's report at `SHARE` of its limit. ``apart``: whether every `DRAWN` of them are held to
    their own scale, as a proof on as many samples would hold them, or to that of all. ``rank``: `ranking.ranking`,
    asked about `RANKED` of them. ``spent``: the operations so far (`operations.Meter`). What is passed to ``learn`` and
    ``failed`` lets a half answer one.
    """

    own: Sequence[A]
    draw: Callable[[], Iterator[A]]
    judge: Callable[[Sequence[Trial]], ParityReport]
    apart: bool = True
    rank: Callable[[Sequence[Trial]], ParityReport | None] | None = None
    spent: Callable[[], int] = lambda: 0
    learned: list[A] = field(default_factory=list)
    ranked: Sequence[A] = ()  # among which a half broke the order
    asked: int = 0  # rows

    @cached_property
    def many(self) -> list[A]:
        return answered_within(OPERATIONS, self.draw(), self.spent)

    def learn(self, answered: Callable[[A], Trial]) -> bool:
        """Whether the half fails any neighbour: the worst are asked first of every half from now on."""
        self.asked = sum(len(one.samples) for one in self.many)
        excesses = [excess(self._report(one, answered)) for one in self.many]
        failed = [index for index, share in enumerate(excesses) if not share <= 1]
        new = sorted(failed, key=lambda index: -excesses[index])[:WORST]
        self.learned += [self.many[index] for index in new]
        if not self.ranked and self._misordered(self._rankable, answered):
            self.ranked = self._rankable
            return True
        return bool(new)

    def failed(self, answered: Callable[[A], Trial]) -> ParityReport | None:
        """The report on the first neighbour that was learned and that the half fails."""
        reports = (self._report(one, answered) for one in self.learned)
        failed = next((report for report in reports if not excess(report) <= 1), None)
        return failed or self._misordered(self.ranked, answered)

    def _report(self, one: A, answered: Callable[[A], Trial]) -> ParityReport:
        scale = self._scales[id(one)] if self.apart else self.scale
        return self.judge([*scale, answered(one)])

    @cached_property
    def _rankable(self) -> list[A]:
        rows = np.cumsum([len(one.samples) for one in self.many])
        return self.many[: int(np.searchsorted(rows, RANKED)) + 1]

    def _misordered(self, some: Sequence[A], answered: Callable[[A], Trial]) -> ParityReport | None:
        """The report where the half breaks the order among these."""
        return self.rank([answered(one) for one in some]) if self.rank and some else None

    @cached_property
    def scale(self) -> list[Trial]:
        """The largest answers, without error: the gate holds errors against the largest of all it is shown."""
        return _loudest([*self.own, *self.many])

    @cached_property
    def _scales(self) -> dict[int, list[Trial]]:
        """The same of every neighbour's draw."""
        scales = ((draw, _loudest(draw)) for draw in _draws(self.many))
        return {id(one): scale for draw, scale in scales for one in draw}


def _draws(neighbours: Iterable[A]) -> list[list[A]]:
    """`DRAWN` rows each. What is left over goes with the last."""
    draws: list[list[A]] = []
    rows = DRAWN
    for one in neighbours:
        if rows >= DRAWN:
            draws.append([])
            rows = 0
        draws[-1].append(one)
        rows += len(one.samples)
    if len(draws) > 1 and rows < DRAWN:
        left = draws.pop()
        draws[-1] += left
    return draws


def _loudest(several: Sequence[A]) -> list[Trial]:
    names = several[0].reference if several else ()
    loudest = {max(range(len(several)), key=lambda i: _size(several[i].reference[name])) for name in names}
    found = [several[index] for index in sorted(loudest)]
    return [Trial(one.samples, one.reference, one.reference) for one in found]


def answered_within(operations: int, asked: Iterable[A], spent: Callable[[], int]) -> list[A]:
    """As many as ``operations`` and memory allow, and one."""
    found, held, end = [], 0, spent() + operations
    for one in asked:
        found.append(one)
        held += sum(array.nbytes for array in one.reference.values())
        if spent() > end or held > ANSWERS_BYTES:
            break
    return found


def excess(report: ParityReport) -> float:
    """The worst error of any output as a share of what is allowed, infinite where an answer is wrong altogether."""
    if any(failure.rule not in OVER_ALL | {"max_error"} for failure in report.all_failures):
        return math.inf
    return max(
        (output.max_error_u / output.limit_u for output in report.outputs if output.max_error_u), default=0.0
    )


def _size(array: np.ndarray) -> float:
    finite = np.abs(array[np.isfinite(array)])
    return float(finite.max(initial=0.0))


@dataclass(frozen=True, slots=True)
class Taught:
    """``equal``: whether all neighbours are equal under what was found, as far as they were asked."""

    found: Found | None
    equal: bool


def taught(
    candidates: Sequence[str],
    judge: Judge,
    learn: Callable[[Collection[str]], bool],
    *,
    budget: Budget,
    say: Callable[[str], None] = lambda line: None,
    spent: Callable[[], int] = lambda: 0,
) -> Taught:
    """`search.smallest_set` for the samples and for the neighbours that smaller sets fail.

    ``learn``: asks the half that keeps these nodes about many neighbours, adds the worst that it fails to what the
    judge asks, and says whether there were any. Where no set gets those right, what was found before them stands.
    """
    end, before = spent() + budget.operations, None
    for lesson in range(LESSONS + 1):
        left = replace(budget, operations=max(end - spent(), 0))
        found = smallest_set(candidates, judge, budget=left, say=say, spent=spent, elsewhere=not lesson)
        if found is None:
            return Taught(before, before is None)
        if not found.minimal:
            return Taught(found, True)
        if not learn(found.kept):
            return Taught(found, True)
        say(
            f"search: with {len(found.kept)} kept, neighbours of the samples are not equal; once more with them"
        )
        candidates = [*found.kept, *(name for name in candidates if name not in found.kept)]
        before = found
    return Taught(before and replace(before, exhausted=True), False)
