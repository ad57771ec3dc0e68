"""Unseen samples on which a plan is tried once it passes on its own: those that fail are asked ever after."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, groupby

from ..gate.rule_verdicts import OVER_ALL
from ..gate.trial import Trial
from ..gate.verdict import ParityReport
from ..question import Question
from ..search.ranking import RANKED, OrderJudge
from .batched import Batch

OPERATIONS = 1 << 36  # for the original's answers: a large model is tried on fewer
BYTES = 1 << 28  # of the unseen samples with the original's answers to them
# The operations of the first part of a trial on unseen samples; each part is twice as large as the last.
PART_OPERATIONS = 1 << 33
ORDER_OPERATIONS = 1 << 33  # for the order of unseen samples, in every trial
WORST = 4  # sets of samples that join those that are asked, after one search
# The share of the allowed error that unseen samples may use up, because other samples are never tried: with 0.95 the
# corpus' 'rotary by a product' errs by 4.5u in one of 16 proofs.
SHARE = 0.9
# So many rows are enough for a half none of whose nodes is suspected of leaving half's range, if it errs on them by no
# more than `CALM` of what is allowed: an error of rounding alone grows slowly with more rows. An output that does not
# err at all in most rows is saturated, and may err much in the few in which it is not.
CALM_ROWS, CALM, ERRING = 1024, 0.5, 0.5

Ask = Callable[[Iterable[Batch]], Iterator[Trial]]  # lets one half answer, in order


@dataclass
class Counterexamples:
    """``rows``: samples of a set; sample ``i`` is of set ``i // rows``.

    Each set is judged by itself, as a proof on as many samples would be. Held against the largest of all answers,
    errors of sets whose answers are small pass: the corpus' 'warp' then errs by 4.9u in one of 64 such proofs.
    ``draw``: batches of unseen samples with the original's answers, sets in order. ``join``: batches of known
    questions. ``judge``: the gate's report at `SHARE` of its limit. ``rank``: the judge of the order
    (`search.ranking`); it asks for room for swaps until ``room_ends`` operations are spent. ``spent``: the operations
    so far (`policy.operations.Meter`).
    """

    rows: int
    draw: Callable[[], Iterator[Batch]]
    join: Callable[[Iterable[Question]], Iterator[Batch]]
    judge: Callable[[Sequence[Trial]], ParityReport]
    rank: OrderJudge | None = None
    spent: Callable[[], int] = lambda: 0
    room_ends: float = math.inf
    found: list[Question] = field(default_factory=list)
    tried: int = 0  # unseen rows: the most that one plan was asked
    _drawn: list[Batch] = field(default_factory=list)
    _batches: list[Batch] = field(default_factory=list)
    _ranked: list[Batch] = field(default_factory=list)

    @cached_property
    def unseen(self) -> list[Batch]:
        """The unseen samples: as many as the budget and memory allow, and one more."""
        self._drawn += self._drawing
        return self._drawn

    @cached_property
    def _drawing(self) -> Iterator[Batch]:
        held, spent, drawn = 0, 0, self.draw()
        while spent <= OPERATIONS and held <= BYTES:
            before = self.spent()
            if (batch := next(drawn, None)) is None:
                return
            spent += self.spent() - before
            held += sum(one.nbytes for one in batch.questions)
            yield batch

    def errs_little(self, ask: Ask) -> bool:
        """True for a half that errs by at most `CALM` of the limit, and breaks no order, on `CALM_ROWS` unseen rows.
        False where there are not so many, without asking any: `search` asks them all. False after the first set that
        errs more, without asking the others: `search` asks all of them again, and both count in its budget."""
        batches, rows = list[Batch](), 0
        for batch in chain(list(self._drawn), self._drawing_on()):
            batches.append(batch)
            rows += sum(len(one.samples) for one in batch.questions)
            if rows >= CALM_ROWS:
                break
        else:
            return False
        trials, reports, judged = list[Trial](), list[ParityReport](), 0
        for asked, batch in enumerate(batches, 1):
            trials += ask([batch])
            complete = len(trials) if asked == len(batches) else self._before_the_last_set(trials)
            of_sets = [report for _, report in self._reports(trials[judged:complete])]
            if any(not excess(report) <= CALM for report in of_sets):
                return False
            reports, judged = reports + of_sets, complete
        self.tried = max(self.tried, rows)
        return _every_output_errs(reports) and self._order_report(trials) is None

    def _drawing_on(self) -> Iterator[Batch]:
        for batch in self._drawing:
            self._drawn.append(batch)
            yield batch

    def search(self, ask: Ask) -> bool:
        """True if a half fails any unseen sample; the worst sets are asked of every half from now on.

        The samples are asked in parts, each twice as large as the one before: a half that fails some of the first is
        not asked the others.
        """
        left, trials, judged, part = deque(self.unseen), list[Trial](), 0, PART_OPERATIONS
        start = self.spent()
        while left:
            end = self.spent() + part
            while left and self.spent() < end:
                trials += ask([left.popleft()])
            part *= 2
            self.tried = max(self.tried, sum(len(trial.samples) for trial in trials))
            complete = self._before_the_last_set(trials) if left else len(trials)
            operations = (self.spent() - start) // len(trials)  # of one question
            failed = self._fails(trials[judged:complete])
            if self._breaks_order(trials, max(operations, 1)) or failed:
                return True
            judged = complete
        return False

    def _before_the_last_set(self, trials: Sequence[Trial]) -> int:
        """The number of trials of the sets before the last one; of the last one not all samples may have been asked."""
        if not trials:
            return 0
        last = trials[-1].samples[0] // self.rows
        return sum(trial.samples[0] // self.rows != last for trial in trials)

    def _fails(self, trials: Sequence[Trial]) -> bool:
        """True if a half fails some of these sets; the worst join those that are asked."""
        failed = [(excess(report), number) for number, report in self._reports(trials)]
        worst = sorted((one for one in failed if not one[0] <= 1), key=lambda one: -one[0])[:WORST]
        numbers = {number for _, number in worst}
        if worst:
            self.found += [one for one in self._questions if one.samples[0] // self.rows in numbers]
            self._batches = list(self.join(self.found))
        return bool(worst)

    @property
    def _questions(self) -> list[Question]:
        return [one for batch in self.unseen for one in batch.questions]

    def failed(self, ask: Ask) -> ParityReport | None:
        """The report on the first counterexample known that a half fails."""
        reports = (report for _, report in self._reports(ask(self._batches)))
        return next((report for report in reports if not excess(report) <= 1), None)

    def misordered(self, ask: Ask) -> ParityReport | None:
        """The report on a half that breaks the order of the samples on which earlier halves broke it; None
        otherwise."""
        return self._order_report(list(ask(self._ranked))) if self._ranked else None

    def _order_report(self, trials: Sequence[Trial]) -> ParityReport | None:
        return None if self.rank is None else self.rank(trials, self.spent() < self.room_ends)

    def _reports(self, trials: Iterable[Trial]) -> Iterator[tuple[int, ParityReport]]:
        for number, of_set in groupby(trials, key=lambda trial: trial.samples[0] // self.rows):
            yield number, self.judge(list(of_set))

    def _breaks_order(self, trials: Sequence[Trial], operations: int) -> bool:
        """True if a half breaks the order of `RANKED` rows. If so, those rows that err most are ranked in every trial
        from now on: as many as `ORDER_OPERATIONS` allow, twice as many each time that a half breaks the order again.
        ``operations``: of one question.
        """
        trials = list(_first(RANKED, trials))
        if not trials or self._order_report(trials) is None:
            return False
        held = sum(len(batch.questions) for batch in self._ranked)
        most = min(max(ORDER_OPERATIONS // operations, 2 * held, 2), len(trials))
        worst = sorted(range(len(trials)), key=lambda place: -self.judge([trials[place]]).max_error_u)[:most]
        questions = self._questions
        self._ranked = list(self.join([questions[place] for place in sorted(worst)]))
        return True


def _every_output_errs(reports: Sequence[ParityReport]) -> bool:
    """True where each output of numbers errs in at least `ERRING` of the rows, as rounding does."""
    errors: dict[str, list[float]] = {}
    for output in chain.from_iterable(report.outputs for report in reports):
        if output.scale:
            errors.setdefault(output.name, []).extend(output.per_sample_error_u)
    return all(sum(error > 0 for error in of_rows) >= ERRING * len(of_rows) for of_rows in errors.values())


def _first(rows: int, trials: Iterable[Trial]) -> Iterator[Trial]:
    """The first trials, until they have at least so many rows together."""
    for trial in trials:
        yield trial
        rows -= len(trial.samples)
        if rows <= 0:
            return


def excess(report: ParityReport) -> float:
    """The worst error of any output as a share of what is allowed, infinite where an answer is wrong altogether."""
    if any(failure.rule not in OVER_ALL | {"max_error"} for failure in report.all_failures):
        return math.inf
    return max(
        (output.max_error_u / output.limit_u for output in report.outputs if output.max_error_u), default=0.0
    )
