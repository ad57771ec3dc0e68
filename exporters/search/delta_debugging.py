"""Delta debugging for precision: the fewest nodes that must stay in FP32, with a certificate.

A variant of ddmin (Zeller and Hildebrandt, 2002) for an ordered list of suspects: find a passing prefix by
doubling, then take away from its far end in steps that double while the judge passes and are bisected when
it fails. Keeping more nodes usually helps, but nothing rests on that: only sets that the judge passed are
ever held, and the last pass takes single nodes away until none can go. Where the first suspects do not suffice, the
others are put into a measured order (`measured_order.py`), and the doubling begins again. The prefix that passes then
is tried on unseen samples before anything is taken away from it: so that there is early a set about as large as errors
ask for that passes those too, and no run goes into a set that they refuse.

The search is refined by counterexamples (Solar-Lezama et al., ASPLOS 2006). The smallest set of nodes that a few
samples need lies close to its limit for others by nature. What is found is therefore tried on many unseen samples;
those that fail join the samples, and the search goes on from what it kept.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Score:
    """A judge's verdict on one set of nodes kept in FP32; ``error_u`` in units of the precision, inf if non-finite."""

    passed: bool
    error_u: float
    reason: str


@dataclass(frozen=True, slots=True)
class Budget:
    """Runs of the judge, and operations (`policy.operations.Meter`), after which a search ends with what it has."""

    evaluations: int
    operations: int


@dataclass(frozen=True, slots=True)
class Found:
    """A passing set. ``certificate``: kept node → what happens when it alone is given back to half.

    ``minimal``: the certificate is complete and each of its scores fails; False where the budget ended first.
    ``exhausted``: the budget ended before all was tried that would have been.
    ``before``, ``after``: the scores with nothing kept and with ``kept``; ``evaluations``: runs of the judge.
    ``unseen``: samples besides, on which what was found was tried (`refined`).
    """

    kept: tuple[str, ...]
    certificate: Mapping[str, Score]
    before: Score
    after: Score
    evaluations: int
    minimal: bool
    unseen: int = 0
    exhausted: bool = False


Judge = Callable[[frozenset[str]], Score]
Reorder = Callable[[Sequence[str]], Sequence[str]]
# Gives whether unseen samples fail; if so, the judge asks them from now on.
Counterexamples = Callable[[Sequence[str]], bool]
SUSPECTS = 16  # that are tried in the order given
LATE = 4  # suspects at most that are moved to the front
LARGE = 4  # they are moved while a prefix of more than 1 / LARGE of all suspects is needed
GROWTH = 4  # a prefix that unseen samples refuse grows by 1 / GROWTH of itself

# The values of ``search`` in the facts of a form.
NOT_ASKED, NOT_NEEDED, COMPLETE = "not asked", "not needed", "complete"
EXHAUSTED, FAILED = "exhausted", "failed"


def outcome(found: Found | None) -> str:
    """The outcome of a search: ``not needed`` where the plan passes as it is, ``complete``, ``exhausted`` where its
    budget ended before all was tried, ``failed`` where nothing passes, whatever is kept in FP32.
    """
    if found is None:
        return FAILED
    if found.exhausted:
        return EXHAUSTED
    return COMPLETE if found.kept else NOT_NEEDED


def smallest_set(
    candidates: Sequence[str],
    judge: Judge,
    *,
    budget: Budget,
    notify: Callable[[str], None] = lambda line: None,
    spent: Callable[[], int] = lambda: 0,
    elsewhere: bool = True,
    reorder: Reorder | None = None,
    counterexamples: Counterexamples = lambda kept: False,
    needed: int = 0,
) -> Found | None:
    """The smallest passing set that the budget lets us find; no single node can be taken away from it.

    ``candidates``: most suspicious first; they stay longest. ``judge``: scores a set of kept nodes, and is asked once
    per set. ``spent``: the operations of all runs so far. ``reorder``: gives the candidates another order, where the
    first `SUSPECTS` do not suffice. ``elsewhere``: where they do, look a second time, for a smaller set of other
    nodes. ``needed``: so many of the first candidates are known not to suffice; they keep their place. Keeping
    nothing, everything, the first 1, 2, 4, … and what lies between the last two are tried whatever the budget. None
    where even all candidates kept do not pass. Deterministic.
    """
    search = _Search(list(dict.fromkeys(candidates)), judge, budget, notify, spent)
    before, exhausted = search.score(()), False
    if not before.passed and not search.score(search.suspects).passed:
        return None
    if not before.passed:
        try:
            search.run(needed, reorder, counterexamples)
            if elsewhere and len(search.best) > 1 and not search.reordered:
                search.second_start()
        except _BudgetSpent:
            exhausted = True
            notify(f"search: the budget is spent, {search.state}")
    kept = tuple(search.best)
    certificate = {node: score for node in kept if (score := search.known(_without(kept, node)))}
    return Found(
        kept=kept,
        certificate=certificate,
        before=before,
        after=search.score(kept),
        evaluations=search.runs,
        minimal=len(certificate) == len(kept),  # none of them passes, or it would be the best
        exhausted=exhausted,
    )


class _BudgetSpent(Exception):
    pass


class _Search:
    """The judge's answers so far and the best passing set among them; lists are in the suspects' order."""

    def __init__(
        self,
        suspects: list[str],
        judge: Judge,
        budget: Budget,
        notify: Callable[[str], None],
        spent: Callable[[], int],
    ) -> None:
        self.suspects, self.scores = suspects, dict[frozenset[str], Score]()
        self.best, self.reordered, self.runs = suspects, False, 0
        self._judge, self._budget, self._notify, self._spent = judge, budget, notify, spent
        self._end = spent() + budget.operations

    @property
    def state(self) -> str:
        runs = "1 run" if self.runs == 1 else f"{self.runs} runs"
        return f"{len(self.best)} of {len(self.suspects)} suspects kept, {runs}"

    def known(self, kept: Sequence[str]) -> Score | None:
        return self.scores.get(frozenset(kept))

    def score(self, kept: Sequence[str]) -> Score:
        """The judge's answer, within no budget; a passing set smaller than the best becomes the best."""
        key = frozenset(kept)
        if key not in self.scores:
            self.scores[key] = self._judge(key)
            self.runs += 1
        if self.scores[key].passed and len(key) < len(self.best):
            self.best = [node for node in self.suspects if node in key]
            self._notify(f"search: {self.state}")
        return self.scores[key]

    @property
    def over(self) -> bool:
        """True if the budget is spent."""
        return self.runs >= self._budget.evaluations or self._spent() >= self._end

    def passes(self, kept: Sequence[str]) -> bool:
        if self.over and self.known(kept) is None:
            raise _BudgetSpent
        return self.score(kept).passed

    def run(self, needed: int, reorder: Reorder | None, counterexamples: Counterexamples) -> None:
        size = self.shortest_prefix(needed, reorder)
        for _ in range(LATE):
            if self.reordered and not self.over and size * LARGE > len(self.suspects):
                self.bring_forward(needed, size)
                size = self.bisected(needed, size)
        while self.reordered and size < len(self.suspects):
            if self.score(self.suspects[:size]).passed:
                if not counterexamples(self.suspects[:size]):
                    break
                before = self.scores, self.best
                self.ask_again()
                if not self.score(self.suspects).passed:  # no set passes these
                    self.scores, self.best = before
                    return
            elif not self.over:
                self.bring_forward(size, self.bisected(size, len(self.suspects)))
                size += 1
                continue
            size = min(len(self.suspects), size + max(1, size // GROWTH))
        self.one_minimal(self.reduced([], self.suspects[:size]))

    def bring_forward(self, place: int, passing: int) -> None:
        """Move the last suspect of the shortest passing prefix to ``place``. ``passing``: the length of that prefix.

        Without that suspect the prefix fails, although all suspects before it are kept. Such a suspect may stand far
        behind in the measured order, because it costs nothing alone, or nothing on the samples of the measurement.
        """
        last, others = self.suspects[passing - 1], _without(self.suspects, self.suspects[passing - 1])
        self.suspects = [*others[:place], last, *others[place:]]

    def shortest_prefix(self, needed: int, reorder: Reorder | None) -> int:
        """The length of a passing prefix, found by doubling in few runs whatever the budget: else all stay in FP32."""
        more = 1
        while not self.score(self.suspects[: needed + more]).passed:
            more *= 2
            if more > SUSPECTS and reorder is not None:
                self.suspects = [*self.suspects[:needed], *reorder(self.suspects[needed:])]
                more, reorder, self.reordered = 1, None, True
        passing = min(needed + more, len(self.suspects))
        # `reduced` finds the same length in the order given.
        return self.bisected(needed + more // 2, passing) if self.reordered or self.over else passing

    def bisected(self, failing: int, passing: int) -> int:
        """The length of a prefix that passes, one less of which fails."""
        while passing - failing > 1:
            size = (passing + failing) // 2
            if self.score(self.suspects[:size]).passed:
                passing = size
            else:
                failing = size
        return passing

    def ask_again(self) -> None:
        """Forget what passed: the judge has become stricter."""
        self.scores = {kept: score for kept, score in self.scores.items() if not score.passed}
        self.best = self.suspects

    def second_start(self) -> None:
        """Look for a smaller set elsewhere, unless each node of the best one is needed whatever else is kept."""
        first = list(self.best)
        core = [node for node in first if not self.passes(_without(self.suspects, node))]
        if len(core) == len(first):
            return
        others = [node for node in self.suspects if node not in first]
        found = self.reduced(core, [*others, *(node for node in first if node not in core)], len(first))
        if len(found) < len(first):
            self.one_minimal(found)

    def reduced(self, needed: list[str], pool: list[str], limit: float = float("inf")) -> list[str]:
        """Take away from the pool's far end, as much at once as passes; ``needed + pool`` passes.

        Gives up when as many as ``limit`` nodes are needed.
        """
        step = 1
        while pool and len(needed) < limit:
            size = self._shortest(needed, pool, step)
            step = len(pool) - size + 1  # needed nodes are likely to lie about as far apart as the last two
            needed, pool = [*needed, *pool[size - 1 : size]], pool[: max(0, size - 1)]
        return needed

    def _shortest(self, needed: list[str], pool: list[str], step: int) -> int:
        """The number of nodes of the pool that are enough: with one fewer the judge fails (0 where none is needed)."""
        passing, failing = len(pool), -1
        while passing and failing < 0:
            size = max(0, passing - step)
            if self.passes([*needed, *pool[:size]]):
                passing, step = size, step * 2
            else:
                failing = size
        while passing - failing > 1:
            size = (passing + failing) // 2
            if self.passes([*needed, *pool[:size]]):
                passing = size
            else:
                failing = size
        return passing

    def one_minimal(self, kept: list[str]) -> None:
        """Take single nodes away, the least suspicious first, until a whole pass takes none."""
        kept = [node for node in self.suspects if node in kept]
        before: list[str] = []
        while kept != before:
            before = kept
            for node in reversed(before):
                kept = less if self.passes(less := _without(kept, node)) else kept


def _without(nodes: Sequence[str], node: str) -> list[str]:
    return [other for other in nodes if other != node]


ROUNDS = 8  # searches after the first
NOT_ALL = "there are perturbed samples that are not equal under this plan"


def refined(
    candidates: Sequence[str],
    judge: Judge,
    counterexamples: Callable[[Collection[str]], bool],
    *,
    budget: Budget,
    notify: Callable[[str], None] = lambda line: None,
    spent: Callable[[], int] = lambda: 0,
    reorder: Reorder | None = None,
) -> Found | None:
    """`delta_debugging.smallest_set` for the samples and for the unseen ones that smaller sets fail.

    ``counterexamples``: tries these kept nodes on unseen samples, adds the worst that fail to what the judge asks, and
    returns whether there were any. Where no set passes those, what was found before them is returned, as an
    exhausted search. None where not even all candidates kept pass. The budget's operations are those of all searches:
    each may use half of what is left, one that goes on without a counterexample all of it; one without any left
    still adds nodes until the counterexamples pass.
    """
    end, before, needed, share = spent() + budget.operations, None, 0, 2
    passed = list[tuple[str, ...]]()  # sets that unseen samples passed

    def fails_unseen(kept: Sequence[str]) -> bool:
        fails = set(kept) not in map(set, passed) and counterexamples(kept)
        if not fails:
            passed.append(tuple(kept))
        return fails

    for search in range(ROUNDS + 1):
        found = smallest_set(
            candidates,
            judge,
            budget=replace(budget, operations=max((end - spent()) // share, 0)),
            notify=notify,
            spent=spent,
            elsewhere=not search,
            reorder=reorder,
            counterexamples=fails_unseen,
            needed=needed,
        )
        if found is None:
            break
        if not fails_unseen(found.kept):
            if not found.exhausted or spent() >= end or len(found.kept) == len(candidates):
                return found
            candidates, needed, share, reorder = list(found.kept), len(found.kept) - 1, 1, None
            continue
        notify(f"search: with {len(found.kept)} kept, perturbed samples are not equal; once more with them")
        order = dict.fromkeys([*found.kept, *min(passed, key=len, default=()), *candidates])
        candidates, before, needed, share = list(order), found, len(found.kept), 2
    return before and _spent(before, min(passed, key=len, default=()), judge, notify)


def _spent(before: Found, smallest: Sequence[str], judge: Judge, notify: Callable[[str], None]) -> Found:
    """The smallest set that unseen samples passed; if there is none, the finding of the last search."""
    if not smallest:
        notify(NOT_ALL)
        return replace(before, exhausted=True)
    after = judge(frozenset(smallest))
    return replace(before, kept=smallest, certificate={}, after=after, minimal=False, exhausted=True)
