"""Counterexample-guided refinement of a search (Solar-Lezama et al., ASPLOS 2006).

The smallest set of nodes that a few samples need lies close to its limit for others by nature. What is found is
therefore tried on many unseen samples; those that fail join the samples, and the search goes on from what it kept.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from .delta_debugging import Budget, Found, Judge, Reorder, smallest_set

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
        if any(set(kept) == set(one) for one in passed):
            return False
        if counterexamples(kept):
            return True
        passed.append(tuple(kept))
        return False

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
    """What the last search found, unless unseen samples passed another set."""
    if not smallest:
        notify(NOT_ALL)
        return replace(before, exhausted=True)
    after = judge(frozenset(smallest))
    return replace(before, kept=smallest, certificate={}, after=after, minimal=False, exhausted=True)
