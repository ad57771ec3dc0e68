"""The largest batch that is worth forming: found from few measurements, within its time, or not at all."""

from collections.abc import Callable

import pytest
from halfeven.serve.versions.loading.useful_rows import (
    AHEAD,
    ONE_BY_ONE,
    RowsWorth,
    batch_sizes,
    measure_useful_rows,
    shortest_seconds,
    useful_rows,
)  # fmt: skip

from tests.serve.clock import Clock


def measured(
    cost: Callable[[int], float],
    most: int,
    runs: int = 2,
    budget_s: float = 0.8,
    worth: RowsWorth = ONE_BY_ONE,
) -> tuple[int, float]:
    """The useful rows, and the seconds after which they were found; each measurement takes ``runs`` runs."""
    clock = Clock(0.0)

    def run_seconds(rows: int) -> float:
        clock.now += runs * cost(rows)
        return cost(rows)

    return measure_useful_rows(run_seconds, most, budget_s, clock, worth), clock.now


@pytest.mark.parametrize(("most", "sizes"), [(1, [1]), (8, [1, 2, 4, 8]), (20, [1, 2, 4, 8, 16, 20])])
def test_sizes_are_powers_of_two_and_the_largest(most: int, sizes: list[int]) -> None:
    assert batch_sizes(most) == sizes


def test_the_smallest_long_batch_within_five_percent_of_the_best_is_enough() -> None:
    assert useful_rows({1: 1.0, 2: 1.2, 4: 2.0, 8: 3.9, 16: 8.0}) == 4  # 2.00, 2.05 and 2.00 rows/s
    assert useful_rows({1: 1.0, 2: 1.2, 4: 2.0, 8: 3.7}) == 8
    assert useful_rows({1: 1.0, 2: 1.2, 4: 2.0, 8: 3.7}, RowsWorth(within=0.2)) == 4


def test_where_cores_go_on_with_the_next_batch_none_is_smaller_than_what_they_share() -> None:
    """No batch is smaller even where two servers that load at once make a single row look as good as many."""
    assert measured(lambda rows: 0.02 * rows, 32, runs=1)[0] == 4
    assert measured(lambda rows: 0.02 * rows, 32, runs=1, worth=AHEAD)[0] == 8
    assert measured(lambda rows: 0.02 * rows, 4, runs=1, worth=AHEAD)[0] == 4
    assert measured(lambda rows: 2e-3 + 2.4e-3 * rows, 32, worth=AHEAD)[0] == 16  # 8 last 21 ms, 16 last 40


@pytest.mark.parametrize(
    ("cost", "expected"),
    [
        (lambda rows: 1e-4 + 1e-6 * rows, 64),  # a fixed cost above all: every row more is nearly free
        (lambda rows: 1e-3 * rows, 64),  # no gain from batching: long enough not to be interrupted
        (lambda rows: 0.06 * rows, 1),  # none, and one row is long enough
        (lambda rows: 1e-5 * rows, 64),  # none, and all are short
        (lambda rows: 1e-3 * rows * (0.4 if rows == 8 else 1.0), 8),  # a cache's size
    ],
)
def test_what_the_costs_say_is_found(cost: Callable[[int], float], expected: int) -> None:
    assert measured(cost, 64)[0] == expected


@pytest.mark.parametrize("each", [1e-4, 1e-3, 1e-2, 5e-2, 0.3])
def test_it_stays_within_its_time_or_ends_after_the_first(each: float) -> None:
    found, took_s = measured(lambda rows: each * rows**0.9, 64)
    assert took_s <= max(0.8 * 1.01, 2 * each)
    assert found in (0, 64)


def test_no_opinion_while_throughput_still_rises_when_the_time_is_over() -> None:
    assert measured(lambda rows: 0.02 + 0.01 * rows, 64)[0] == 0
    assert measured(lambda rows: 0.03 * rows, 64)[0] == 2  # it does not rise: what was seen is enough


def test_a_disturbed_measurement_is_made_again() -> None:
    disturbed = {64}
    clock = Clock(0.0)

    def run_seconds(rows: int) -> float:
        taken = 1e-3 + 1e-6 * rows
        if rows in disturbed:
            disturbed.remove(rows)
            taken *= 20
        clock.now += taken
        return taken

    assert measure_useful_rows(run_seconds, 64, 0.8, clock) == 64


def test_the_first_run_is_not_counted() -> None:
    runs: list[int] = []

    def run() -> None:
        runs.append(1)
        if len(runs) == 1:
            sum(range(2_000_000))

    assert shortest_seconds(run) < 0.01
    assert len(runs) == 4
