"""A set that is found for a few samples is tried on many, and those that fail join the samples."""

import itertools
import math
from collections.abc import Collection

from halfeven.exporters.search.delta_debugging import (
    NOT_ALL,
    ROUNDS,
    Budget,
    Found,
    Score,
    refined,
    smallest_set,
)

AMPLE = Budget(evaluations=100_000, operations=1 << 60)
NODES = [f"n{index}" for index in range(20)]


class Samples:
    """Each node is needed by one sample; the judge asks the samples it has, ``counterexamples`` tries all."""

    def __init__(self, needs: dict[str, str], asked: Collection[str], most: int = 1) -> None:
        self.needs, self.asked, self.most, self.added = needs, set(asked), most, 0

    def judge(self, kept: frozenset[str]) -> Score:
        failed = [name for name in sorted(self.asked) if self.needs[name] not in kept]
        return Score(not failed, math.inf if failed else 0.5, " ".join(failed))

    def counterexamples(self, kept: Collection[str]) -> bool:
        failed = [name for name in sorted(self.needs) if self.needs[name] not in kept]
        self.asked |= set(failed[: self.most])
        self.added += bool(failed)
        return bool(failed)

    def refined(self, said: list[str] | None = None) -> Found | None:
        notify = (said if said is not None else []).append
        return refined(NODES, self.judge, self.counterexamples, budget=AMPLE, notify=notify)


def test_counterexamples_are_searched_for_until_there_are_none() -> None:
    samples = Samples({"a": "n3", "b": "n7", "c": "n11"}, asked="a")
    found = samples.refined()
    assert found is not None and set(found.kept) == {"n3", "n7", "n11"} and found.minimal
    assert samples.added == 2, "one for each that the samples did not show"
    assert "b" in found.certificate["n7"].reason, "the certificate names the counterexample"


def test_a_plan_without_counterexamples_is_searched_for_once() -> None:
    samples = Samples({"a": "n3"}, asked="a")
    found = samples.refined()
    assert found is not None and found.kept == ("n3",) and samples.added == 0


def test_a_counterexample_that_no_set_passes_leaves_what_was_found_before() -> None:
    said: list[str] = []
    found = Samples({"a": "n3", "hopeless": "none of them"}, asked="a").refined(said)
    assert found is not None and found.kept == ("n3",) and found.exhausted and said[-1] == NOT_ALL


def test_where_the_samples_themselves_cannot_pass_nothing_is_found_and_nothing_claimed_of_others() -> None:
    said: list[str] = []
    samples = Samples({"hopeless": "none of them"}, asked=["hopeless"])
    assert samples.refined(said) is None and samples.added == 0 and NOT_ALL not in said


def test_refinement_ends() -> None:
    samples = Samples({f"i{n}": f"n{n}" for n in range(20)}, asked=["i0"])
    found = samples.refined()
    assert samples.added == ROUNDS + 1
    assert found is not None and len(found.kept) == ROUNDS + 1 and found.exhausted


def test_a_spent_budget_ends_it_with_a_set_that_passed() -> None:
    spent = itertools.count()
    samples = Samples({"a": "n3", "b": "n7"}, asked="a")
    found = refined(
        NODES, samples.judge, samples.counterexamples, budget=Budget(1000, 5), spent=spent.__next__
    )
    assert found is not None and not found.minimal and found.exhausted
    assert samples.judge(frozenset(found.kept)).passed


def test_what_a_spent_budget_ends_with_is_tried_on_unseen_samples_all_the_same() -> None:
    samples = Samples({"a": "n3", "b": "n7"}, asked="a")
    found = refined(NODES, samples.judge, samples.counterexamples, budget=Budget(0, 0))
    assert found is not None and {"n3", "n7"} <= set(found.kept) and found.exhausted


def test_what_was_found_keeps_its_place_and_is_not_tried_again_from_one() -> None:
    samples, asked = Samples({"a": "n3", "b": "n7"}, asked="a"), list[frozenset[str]]()

    def judge(kept: frozenset[str]) -> Score:
        asked.append(kept)
        return samples.judge(kept)

    refined(NODES, judge, samples.counterexamples, budget=AMPLE)
    again = asked[max(place for place, kept in enumerate(asked) if not kept) :]
    assert {len(kept) for kept in again if kept and kept <= {"n3"}} <= {1}


def test_where_every_search_ends_with_a_set_that_unseen_samples_refuse_a_larger_one_that_they_passed_is_held() -> (
    None
):
    """Each smaller set fails some sample: the search holds the prefix that it tried first."""
    nodes = [f"n{index}" for index in range(100)]
    asked = list[int]()

    def counterexamples(kept: Collection[str]) -> bool:
        asked.append(len(kept))
        return len(kept) < 40

    found = refined(
        nodes,
        lambda kept: Score(len(kept) >= 20, 1.0, ""),
        counterexamples,
        budget=AMPLE,
        reorder=lambda names: list(names),
    )
    assert found is not None and found.exhausted and not found.minimal and found.certificate == {}
    assert len(found.kept) == min(size for size in asked if size >= 40) and found.after.passed


def test_counterexamples_that_no_set_passes_leave_the_prefix_that_was_tried_on_them() -> None:
    nodes, hopeless = [f"n{index}" for index in range(100)], list[bool]()
    said: list[str] = []

    def counterexamples(_: Collection[str]) -> bool:
        hopeless.append(True)
        return True

    found = refined(
        nodes,
        lambda kept: Score(len(kept) >= 20 and not hopeless, 1.0, ""),
        counterexamples,
        budget=AMPLE,
        notify=said.append,
        reorder=lambda names: list(names),
    )
    assert found is not None and found.exhausted and len(found.kept) == 20 and said[-1] == NOT_ALL
    assert found.after.passed, "on the samples of the search"


def test_what_the_first_search_leaves_of_the_budget_makes_its_set_smaller() -> None:
    """Each search may use half of what is left; without counterexamples the rest would be lost."""
    spent, needed = [0], {f"n{index}" for index in range(0, 100, 9)}
    nodes = [f"n{index}" for index in range(100)]

    def judge(kept: frozenset[str]) -> Score:
        spent[0] += 1
        return Score(needed <= kept, 1.0, "")

    half = smallest_set(nodes, judge, budget=Budget(1000, 50), spent=lambda: spent[0])
    spent[0] = 0
    found = refined(nodes, judge, lambda _: False, budget=Budget(1000, 100), spent=lambda: spent[0])
    assert half is not None and half.exhausted and found is not None
    assert needed <= set(found.kept) and found.minimal and len(found.kept) < len(half.kept)
