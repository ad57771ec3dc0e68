"""The rows of a job join the samples of its version: held-out ones judge, those that were trained on plan."""

from dataclasses import replace

import numpy as np
import pytest
from halfeven.exporters.inputs.samples import Samples
from halfeven.models.spec.spec import Dim, ModelSpec, TensorSpec
from halfeven.serve.finetune.judging.judging_sets import MOST_JOINED, MOST_JUDGING, evenly, with_joined

SPEC = ModelSpec(
    "net",
    (TensorSpec("x", "FP32", (Dim(), Dim())),),
    (
        TensorSpec("word", "FP32", (Dim(), Dim(4, 4)), kind="logits"),
        TensorSpec("value", "FP32", (Dim(), Dim(2, 2)), kind="tensor"),
    ),
    max_batch_size=4,
)


def samples(first: int, count: int, width: int = 1, **targets: np.ndarray) -> Samples:
    """Rows that carry their numbers."""
    x = np.arange(first, first + count, dtype=np.float32)[:, None].repeat(width, 1)
    return Samples({"x": x}, targets or {"word": np.arange(count) % 4})


def numbers(found: Samples) -> list[int]:
    return found.arrays["x"][:, 0].astype(int).tolist()


@pytest.mark.parametrize("old", [1, 2, 7, 30])
@pytest.mark.parametrize("held", [1, 5, 12])
def test_held_out_rows_judge_and_trained_ones_plan(old: int, held: int) -> None:
    before = replace(samples(0, old), drifted=1)
    found = with_joined(SPEC, before, samples(1000, 40), samples(5000, held))
    assert found is not None
    assert found.drifted == 1, "callers' data stay private"
    planning, judging = found.split()
    assert numbers(judging) == [*numbers(before.split()[1]), *range(5000, 5000 + held)]
    assert numbers(planning)[: old // 2] == numbers(before.split()[0])
    assert all(1000 <= row < 1040 for row in numbers(planning)[old // 2 :])
    for row, word in zip(numbers(judging), judging.targets["word"].tolist(), strict=True):
        assert word == (row % 1000) % 4


def test_the_set_stays_within_its_bound_and_keeps_rows_of_every_job() -> None:
    found = samples(0, 400)
    for job in range(1, 31):
        joined = with_joined(SPEC, found, samples(10_000 * job, 900), samples(10_000 * job + 5000, 900))
        assert joined is not None
        found = joined
        newest = [row for row in numbers(found.split()[1]) if row >= 10_000 * job]
        assert len(newest) == MOST_JOINED
    assert found.split()[1].count == found.split()[0].count == MOST_JUDGING
    jobs = {row // 10_000 for row in numbers(found.split()[1])}
    assert {0, 25, 26, 27, 28, 29, 30} <= jobs


def test_a_larger_set_of_the_operator_does_not_shrink() -> None:
    found = with_joined(SPEC, samples(0, 9000), samples(10_000, 50), samples(20_000, 50))
    assert found is not None and found.split()[1].count == 4500


def test_an_output_without_targets_on_one_side_is_not_graded_there() -> None:
    values = np.random.default_rng().random((10, 2), np.float32)
    new = samples(100, 10, value=values)
    found = with_joined(SPEC, samples(0, 6), new, new)
    assert found is not None
    judging = found.split()[1]
    assert judging.targets["word"].tolist()[3:] == [-1] * 10
    assert np.isnan(judging.targets["value"][:3]).all() and judging.targets["value"].dtype == np.float32
    assert np.array_equal(judging.targets["value"][3:], values)


def test_rows_of_another_length_do_not_join() -> None:
    assert with_joined(SPEC, samples(0, 6, width=2), samples(0, 6, width=3), samples(0, 6, width=3)) is None


def test_a_spread_choice_keeps_the_ends() -> None:
    assert numbers(evenly(samples(0, 100), 5)) == [0, 25, 50, 74, 99]
    assert evenly(samples(0, 4), 5).count == 4
