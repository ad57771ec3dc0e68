"""The nodes that cost most in half come first, and finding them takes few measurements."""

import math
import random
from collections.abc import Callable, Sequence

from halfeven.exporters.search.delta_debugging import Budget, Found, Score, smallest_set
from halfeven.exporters.search.measured_order import BLOCKS, MEASUREMENTS, by_measured_error

NODES = [f"n{place}" for place in range(300)]


def adds_up(errors: dict[str, float], asked: list[int] | None = None) -> Callable[[Sequence[str]], float]:
    """Errors of independent roundings."""

    def error_of(nodes: Sequence[str]) -> float:
        if asked is not None:
            asked.append(len(nodes))
        return math.sqrt(sum(errors.get(node, 0.0) ** 2 for node in nodes))

    return error_of


def test_all_nodes_come_back_once_and_the_costly_ones_first() -> None:
    costly = {"n17": 9.0, "n204": 30.0, "n205": 5.0}
    found = by_measured_error(NODES, adds_up(dict.fromkeys(NODES, 0.01) | costly))
    assert sorted(found) == sorted(NODES)
    assert set(costly) <= set(found[:8]) and found[0] == "n204"


def test_what_is_not_finite_comes_first_and_hides_nothing_else() -> None:
    errors = adds_up({"n5": 2.0, "n250": 8.0})
    found = by_measured_error(NODES, lambda nodes: math.inf if "n100" in nodes else errors(nodes))
    assert found[0] == "n100" and {"n5", "n250"} <= set(found[:40])


def test_few_measurements_are_enough_and_the_costly_nodes_are_found_one_by_one() -> None:
    asked: list[int] = []
    costly = {f"n{place}": 5.0 + place / 100 for place in range(3, 300, 30)}
    found = by_measured_error(NODES, adds_up(dict.fromkeys(NODES, 0.01) | costly, asked))
    assert found[: len(costly)] == sorted(costly, key=lambda node: -costly[node])
    assert len(asked) < 150 and min(asked) == 1


def test_measurements_end_where_they_are_spent_and_where_no_more_can_be_afforded() -> None:
    asked: list[int] = []
    by_measured_error(NODES, adds_up(dict.fromkeys(NODES, 1.0), asked))
    assert len(asked) == MEASUREMENTS
    asked.clear()
    by_measured_error(NODES, adds_up(dict.fromkeys(NODES, 1.0), asked), lambda: len(asked) < 60)
    assert len(asked) == 60 and 2 * BLOCKS < 60


def test_few_nodes_and_none_are_ordered_too() -> None:
    assert by_measured_error([], adds_up({})) == []
    assert by_measured_error(["a", "b"], adds_up({"b": 1.0})) == ["b", "a"]


def search(errors: dict[str, float], limit: float, evaluations: int, measured: bool) -> Found:
    """The order given is that of the graph; what is in half adds its error."""

    def judge(kept: frozenset[str]) -> Score:
        error = adds_up(errors)([node for node in NODES if node not in kept])
        return Score(error <= limit, error, "")

    reorder = (lambda names: by_measured_error(names, adds_up(errors))) if measured else None
    found = smallest_set(NODES, judge, budget=Budget(evaluations, 1 << 60), reorder=reorder)
    assert found is not None and judge(frozenset(found.kept)).passed
    return found


def test_where_errors_of_a_whole_region_add_up_a_short_search_keeps_that_region_and_not_the_graph() -> None:
    random.seed(0)
    errors = {
        node: random.uniform(0.5, 1.5) * (8.0 if 200 <= place < 240 else 0.3)
        for place, node in enumerate(NODES)
    }
    limit = 1.2 * adds_up(errors)([node for place, node in enumerate(NODES) if not 200 <= place < 240])
    given, measured = (search(errors, limit, 40, how) for how in (False, True))
    assert len(given.kept) > 200 and len(measured.kept) < 70


def test_a_node_that_is_half_only_behind_a_half_one_is_measured_behind_it() -> None:
    def error_of(nodes: Sequence[str]) -> float:
        return math.inf if {"n40", "n200"} <= set(nodes) else 0.1 * math.sqrt(len(nodes))

    assert "n200" in by_measured_error(NODES, error_of)[:2]
