"""The search for kept nodes: always a passing set, nothing in it that could go, within its budget."""

import itertools
import math
import random
from collections.abc import Callable, Iterable

import pytest
from halfeven.exporters.search.delta_debugging import Budget, Found, Judge, Score, outcome, smallest_set
from hypothesis import given, settings
from hypothesis import strategies as st

AMPLE = Budget(evaluations=100_000, operations=1 << 60)
# The trials for 40 nodes: none, all, the first 1, 2, 4, 8, 16, 32 (64), five between the last two
WHATEVER_THE_BUDGET = 2 + 7 + 5
PASS, FAIL = Score(True, 0.5, ""), Score(False, math.inf, "overflow")


def names(count: int) -> list[str]:
    return [f"n{index}" for index in range(count)]


def judged_by(passes: Callable[[frozenset[str]], bool], asked: list[frozenset[str]] | None = None) -> Judge:
    def judge(kept: frozenset[str]) -> Score:
        if asked is not None:
            asked.append(kept)
        return PASS if passes(kept) else FAIL

    return judge


def needs(*groups: Iterable[str]) -> Callable[[frozenset[str]], bool]:
    """A rule that passes where each group of alternatives has one of its nodes kept."""
    return lambda kept: all(kept & set(group) for group in groups)


def holds(found: Found, judge: Judge, candidates: list[str]) -> None:
    """Ask the judge again for the promises of every result."""
    assert set(found.kept) <= set(candidates) and len(set(found.kept)) == len(found.kept)
    assert judge(frozenset(found.kept)).passed and found.after == judge(frozenset(found.kept))
    assert found.before == judge(frozenset())
    for node, score in found.certificate.items():
        assert score == judge(frozenset(found.kept) - {node})
    if found.minimal:
        assert set(found.certificate) == set(found.kept)
        assert not any(score.passed for score in found.certificate.values())


def test_a_plan_that_passes_as_it_is_costs_one_run_and_keeps_nothing() -> None:
    asked: list[frozenset[str]] = []
    found = smallest_set(names(50), judged_by(lambda kept: True, asked), budget=AMPLE)
    assert found is not None and found.kept == () and found.minimal and found.certificate == {}
    assert asked == [frozenset()] and found.evaluations == 1


def test_where_keeping_everything_fails_there_is_no_set() -> None:
    asked: list[frozenset[str]] = []
    assert smallest_set(names(50), judged_by(lambda kept: False, asked), budget=AMPLE) is None
    assert len(asked) == 2
    assert smallest_set([], judged_by(lambda kept: False), budget=AMPLE) is None


def test_the_certificate_says_what_happens_without_each_kept_node() -> None:
    def judge(kept: frozenset[str]) -> Score:
        worst = max([812.0 * ("n3" not in kept), 7.0 * ("n9" not in kept), 0.25])
        return Score(worst <= 1, worst, "" if worst <= 1 else f"error {worst:g}u")

    found = smallest_set(names(12), judge, budget=AMPLE)
    assert found is not None and found.kept == ("n3", "n9") and found.minimal
    assert found.certificate["n3"] == Score(False, 812.0, "error 812u")
    assert found.certificate["n9"] == Score(False, 7.0, "error 7u")
    assert (found.before.error_u, found.after.error_u) == (812.0, 0.25)


@pytest.mark.parametrize("seed", range(20))
def test_ten_scattered_nodes_of_400_are_found_in_fewer_than_150_runs(seed: int) -> None:
    needed = random.Random(seed).sample(names(400), 10)
    found = smallest_set(names(400), judged_by(needs(*([node] for node in needed))), budget=AMPLE)
    assert found is not None and set(found.kept) == set(needed) and found.minimal
    assert found.evaluations < 150


def test_suspicious_nodes_that_are_all_guilty_cost_little_more_than_one_run_each() -> None:
    needed = names(400)[:100]
    found = smallest_set(names(400), judged_by(needs(*([node] for node in needed))), budget=AMPLE)
    assert found is not None and list(found.kept) == needed and found.minimal
    assert found.evaluations < 250


def test_one_guilty_node_that_is_suspected_first_costs_three_runs() -> None:
    found = smallest_set(names(400), judged_by(needs(["n0"])), budget=AMPLE)
    assert found is not None and found.kept == ("n0",) and found.evaluations == 3


def test_nodes_that_only_help_together_are_kept_together() -> None:
    pairs = [{"n5", "n77"}, {"n20", "n21"}]
    found = smallest_set(
        names(100), judged_by(lambda kept: any(pair <= kept for pair in pairs)), budget=AMPLE
    )
    assert found is not None and set(found.kept) in pairs and found.minimal


def test_one_node_that_stands_in_for_many_more_suspicious_ones_is_found() -> None:
    many = names(8)
    judge = judged_by(lambda kept: "n90" in kept or set(many) <= kept)
    found = smallest_set(names(100), judge, budget=AMPLE)
    assert found is not None and found.kept == ("n90",) and found.minimal


def test_errors_that_add_up_are_cured_by_keeping_the_largest() -> None:
    errors = {node: 1.0 / (1 + index) for index, node in enumerate(names(200))}

    def judge(kept: frozenset[str]) -> Score:
        error = sum(error for node, error in errors.items() if node not in kept)
        return Score(error <= 4, error, "")

    found = smallest_set(names(200), judge, budget=AMPLE)
    assert found is not None and list(found.kept) == names(len(found.kept)) and found.minimal
    assert sum(list(errors.values())[len(found.kept) - 1 :]) > 4, "one fewer of the largest would not do"


def test_the_judge_is_never_asked_twice_and_asking_is_deterministic() -> None:
    def run() -> list[frozenset[str]]:
        asked: list[frozenset[str]] = []
        judge = judged_by(needs(["n7", "n30"], ["n31", "n2"], ["n63"]), asked)
        smallest_set([*names(64), "n7", "n0"], judge, budget=AMPLE)
        return asked

    first = run()
    assert len(set(first)) == len(first) and run() == first


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.integers(1, 9), st.data())
def test_any_judge_however_erratic_gets_a_passing_set_with_a_true_certificate(
    size: int, data: st.DataObject
) -> None:
    nodes = names(size)
    subsets = [frozenset(c) for n in range(size + 1) for c in itertools.combinations(nodes, n)]
    passing = data.draw(st.sets(st.sampled_from(subsets), max_size=len(subsets) // 2))
    judge = judged_by((passing | {frozenset(nodes)}).__contains__)
    found = smallest_set(nodes, judge, budget=AMPLE)
    assert found is not None and found.minimal
    holds(found, judge, nodes)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sets(st.sampled_from(names(30)), min_size=1, max_size=3), min_size=1, max_size=8))
def test_where_more_kept_never_hurts_an_independent_set_of_needs_is_met_minimally(
    groups: list[set[str]],
) -> None:
    judge = judged_by(needs(*groups))
    found = smallest_set(names(30), judge, budget=AMPLE)
    assert found is not None and found.minimal and len(found.kept) <= len(groups)
    holds(found, judge, names(30))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 60), st.sets(st.sampled_from(names(40)), min_size=1, max_size=8))
def test_a_budget_of_runs_is_held_and_what_comes_back_still_passes(runs: int, needed: set[str]) -> None:
    judge = judged_by(lambda kept: needed <= kept)
    found = smallest_set(names(40), judge, budget=Budget(runs, 1 << 60))
    assert found is not None and found.evaluations <= max(WHATEVER_THE_BUDGET, runs)
    holds(found, judge, names(40))
    assert found.minimal or found.exhausted
    if found.exhausted:
        assert found.evaluations >= runs, "it stopped although it had runs left"


def test_without_any_budget_a_few_suspects_are_kept_and_not_all() -> None:
    judge = judged_by(needs(["n2"], ["n5"]))
    found = smallest_set(names(400), judge, budget=Budget(0, 0))
    assert found is not None and found.exhausted and list(found.kept) == names(6)
    assert outcome(found) == "exhausted"


def test_a_search_says_in_a_word_what_became_of_it() -> None:
    def search(passes: Callable[[frozenset[str]], bool]) -> str:
        return outcome(smallest_set(names(9), judged_by(passes), budget=AMPLE))

    assert search(lambda kept: True) == "not needed"
    assert search(needs(["n3"])) == "complete"
    assert search(lambda kept: False) == "failed"


def test_a_budget_of_operations_is_held_and_said() -> None:
    spent, said = [0], list[str]()

    def judge(kept: frozenset[str]) -> Score:
        spent[0] += 1000
        return PASS if {"n3", "n11", "n200"} <= kept else FAIL

    def search(operations: int) -> Found | None:
        budget = Budget(10_000, operations)
        return smallest_set(names(400), judge, budget=budget, notify=said.append, spent=lambda: spent[0])

    short = search(15_000)
    assert short is not None and not short.minimal and short.exhausted and short.evaluations == 15
    assert judge(frozenset(short.kept)).passed
    assert (
        said[-1].startswith("search: the budget is spent, ") and "of 400 suspects kept, 15 runs" in said[-1]
    )
    long = search(1_000_000)
    assert long is not None and long.minimal and not long.exhausted and long.kept == ("n3", "n11", "n200")


def test_progress_is_said_each_time_the_set_gets_smaller() -> None:
    said: list[str] = []
    smallest_set(names(40), judged_by(needs(["n5"], ["n17"])), budget=AMPLE, notify=said.append)
    sizes = [int(line.split()[1]) for line in said]
    assert sizes == sorted(set(sizes), reverse=True) and sizes[-1] == 2
    assert said[0].startswith("search: 32 of 40 suspects kept, ")


def test_what_the_judge_raises_comes_out_as_it_is() -> None:
    def judge(kept: frozenset[str]) -> Score:
        if 0 < len(kept) < 40:
            raise KeyboardInterrupt
        return PASS if kept else FAIL

    with pytest.raises(KeyboardInterrupt):
        smallest_set(names(40), judge, budget=AMPLE)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 400))
def test_without_any_budget_no_more_is_kept_than_the_order_asks_for(last: int) -> None:
    judge = judged_by(lambda kept: f"n{last - 1}" in kept)
    found = smallest_set(names(400), judge, budget=Budget(0, 0))
    assert found is not None and list(found.kept) == names(last)
    assert found.evaluations <= 2 * math.log2(400) + 4


def many_needed(extra: str, refused: list[tuple[str, ...]]) -> tuple[Judge, Callable[[Iterable[str]], bool]]:
    """A judge that needs 20 nodes, and one more as soon as unseen samples have shown that they need it."""
    needed = {f"n{place}" for place in range(0, 200, 10)}

    def counterexamples(kept: Iterable[str]) -> bool:
        refused.append(tuple(kept))
        needed.add(extra)
        return extra not in kept

    return judged_by(lambda kept: needed <= kept), counterexamples


def test_a_prefix_of_the_measured_order_is_tried_on_unseen_samples_before_anything_is_taken_away() -> None:
    refused: list[tuple[str, ...]] = []
    judge, counterexamples = many_needed("n7", refused)
    measured = sorted(names(200), key=lambda node: int(node[1:]) % 10)  # the needed ones first, n7 after 140
    found = smallest_set(
        names(200), judge, budget=AMPLE, reorder=lambda _: measured, counterexamples=counterexamples
    )
    assert found is not None and found.minimal and len(found.kept) == 21 and "n7" in found.kept
    sizes = [len(kept) for kept in refused]
    assert sizes[0] == 20 and "n7" in refused[-1] and len(refused) == 2
    assert sizes[-1] == 26, "a few more, as errors add up, and the one that unseen samples fail for"


def test_with_a_spent_budget_what_is_held_has_passed_unseen_samples_too() -> None:
    refused: list[tuple[str, ...]] = []
    judge, counterexamples = many_needed("n7", refused)
    measured = sorted(names(200), key=lambda node: int(node[1:]) % 10)
    found = smallest_set(
        names(200),
        judge,
        budget=Budget(0, 0),
        reorder=lambda _: measured,
        counterexamples=counterexamples,
    )
    assert found is not None and found.exhausted and found.kept == refused[-1]


def test_few_suspects_are_minimised_before_any_unseen_sample_is_asked() -> None:
    def fails(_: Iterable[str]) -> bool:
        raise AssertionError("not asked")

    found = smallest_set(
        names(200), judged_by(needs(["n9"])), budget=AMPLE, reorder=list, counterexamples=fails
    )
    assert found is not None and found.kept == ("n9",)


def test_needed_nodes_far_behind_in_the_measured_order_do_not_keep_what_stands_before_them() -> None:
    """A logarithm is such a node: it costs nothing by itself."""
    needed = {"n0", "n3", "n170", "n195"}
    sizes = list[int]()

    def judge(kept: frozenset[str]) -> Score:
        sizes.append(len(kept))
        return PASS if needed <= kept else FAIL

    found = smallest_set(names(200), judge, budget=Budget(60, 1 << 60), reorder=list)
    assert found is not None and set(found.kept) == needed and found.minimal
    assert sum(size > 100 for size in sizes) < 20
