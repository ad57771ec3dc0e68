"""A paired test refuses a real loss, lets noise pass, and finds a gain only where there is one."""

import itertools
import math

import numpy as np
import pytest
from halfeven.serve.finetune.judging.paired import (
    MOST_WORK,
    compare_resampled,
    compare_right,
    limit_of_share,
    loss_limit,
    mcnemar,
)

MARGIN = 0.02
DRAWS = 400


def drawn(random: np.random.Generator, rows: int, before: float, lost: float, gained: float):  # type: ignore[no-untyped-def]
    """The rows that are right before and those that are now: a share ``lost`` and ``gained`` of all rows changes."""
    old = random.random(rows) < before
    change = random.random(rows)
    new = np.where(old, change >= lost / before, change < (gained / (1 - before) if before < 1 else 0))
    return old, new


@pytest.mark.parametrize("before", [0.99, 0.9, 0.7, 0.5])
@pytest.mark.parametrize("churn", [0.0, 0.002, 0.3])
def test_a_true_loss_of_five_points_on_500_rows_is_refused_in_95_of_100_draws(
    before: float, churn: float
) -> None:
    """``churn``: the share of the other rows that change both ways, as two versions do that err independently."""
    random, gained = np.random.default_rng(), churn * (1 - before)
    refused = [
        not compare_right(*drawn(random, 500, before, 0.05 + gained, gained), MARGIN).holds
        for _ in range(DRAWS)
    ]
    assert np.mean(refused) >= 0.95


@pytest.mark.parametrize("rows", [50, 95, 100, 180, 200, 299])
def test_two_rows_of_100_never_refuse(rows: int) -> None:
    """Whatever else changes: only what is lost in sum counts on so few rows."""
    for gained in range(0, rows // 2, 7):
        lost = gained + max(2, rows // 50)
        old = np.arange(rows) < lost
        new = (np.arange(rows) >= lost) & (np.arange(rows) < lost + gained)
        assert compare_right(old, new, MARGIN).holds


def test_two_points_pass_on_any_number_of_rows_and_three_lost_rows_of_20_do_not() -> None:
    for rows in (100, 150, 500, 5000, 100_000):
        old = np.ones(rows, bool)
        assert compare_right(old, np.arange(rows) >= rows // 50, MARGIN).holds
    assert not compare_right(np.ones(20, bool), np.arange(20) >= 3, MARGIN).holds


@pytest.mark.parametrize("rows", [100, 180, 500, 3000])
def test_a_version_that_changes_a_few_rows_both_ways_is_not_refused(rows: int) -> None:
    random = np.random.default_rng()
    held = [compare_right(*drawn(random, rows, 0.97, 0.005, 0.005), MARGIN).holds for _ in range(DRAWS)]
    assert np.mean(held) >= 0.97


@pytest.mark.parametrize("rows", [10, 100, 1000])
def test_a_version_without_change_is_no_worse_and_no_better(rows: int) -> None:
    right = np.random.default_rng().random(rows) < 0.8
    found = compare_right(right, right, MARGIN)
    assert (found.holds, found.better, found.loss) == (True, False, 0.0)
    errors = np.random.default_rng().random(rows)
    loss = lambda weights: (errors @ weights) / (errors @ weights) - 1  # noqa: E731
    resampled = compare_resampled(loss, rows, MARGIN, shares=False)
    assert (resampled.holds, resampled.better) == (True, False)


def test_noise_is_seldom_taken_for_a_gain_and_a_gain_of_40_points_always_is() -> None:
    random = np.random.default_rng()
    noise = [compare_right(*drawn(random, 200, 0.8, 0.05, 0.05), MARGIN).better for _ in range(DRAWS)]
    gain = [compare_right(*drawn(random, 100, 0.5, 0.02, 0.45), MARGIN) for _ in range(DRAWS)]
    assert np.mean(noise) <= 0.09
    assert all(found.better and found.holds for found in gain)


@pytest.mark.parametrize("differ", range(1, 11))
def test_mcnemar_is_the_share_of_all_coin_throws(differ: int) -> None:
    throws = [sum(coins) for coins in itertools.product((0, 1), repeat=differ)]
    for gained in range(differ + 1):
        expected = sum(heads >= gained for heads in throws) / len(throws)
        assert mcnemar(gained, differ - gained) == pytest.approx(expected)


def test_mcnemar_of_many_rows_does_not_overflow() -> None:
    assert mcnemar(30_000, 30_000) == pytest.approx(0.5, abs=0.01)
    assert mcnemar(60_000, 0) == 0.0


def test_without_gained_rows_the_limit_is_wilson_s_and_without_margin_the_test_is_mcnemar_s() -> None:
    """Tango's interval has both as special cases."""
    for lost, rows in ((1, 60), (2, 100), (25, 500)):
        assert loss_limit(lost, 0, rows) == pytest.approx(limit_of_share(lost / rows, rows), abs=1e-6)
    assert (84 - 64) / math.sqrt(84 + 64) == pytest.approx(1.645, abs=2e-3)
    assert loss_limit(64, 84, 10_000) == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("rows", [100, 500])
def test_a_grown_error_is_refused_and_a_fallen_one_is_better(rows: int) -> None:
    random = np.random.default_rng()
    old = random.chisquare(1, rows)
    for factor, holds, better in ((0.5, True, True), (1.01, True, False), (1.3, False, False)):
        new = old * factor * random.uniform(0.98, 1.02, rows)
        found = compare_resampled(
            lambda weights, n=new: n @ weights / (old @ weights) - 1, rows, MARGIN, shares=False
        )
        assert (found.holds, found.better) == (holds, better), factor


def test_an_answer_that_is_not_finite_never_passes() -> None:
    found = compare_resampled(lambda weights: np.full(weights.shape[1], np.nan), 100, 1.0, shares=False)
    assert (found.holds, found.better) == (False, False)


@pytest.mark.slow
def test_a_draw_has_as_many_rows_as_there_are_and_costly_draws_are_fewer_and_counted() -> None:
    seen: list[np.ndarray] = []

    def loss(weights: np.ndarray) -> np.ndarray:
        seen.append(weights)
        return np.zeros(weights.shape[1])

    for work, draws in ((1, 1000), (MOST_WORK // 500, 500), (MOST_WORK, 200)):
        seen.clear()
        assert compare_resampled(loss, 30_000, MARGIN, shares=True, work=work).draws == draws
        assert sum(weights.shape[1] for weights in seen[1:]) == draws
        assert all((weights.sum(0) == 30_000).all() for weights in seen)
