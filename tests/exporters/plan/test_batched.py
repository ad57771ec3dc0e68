"""Batched evaluation: executions run as one are answered as each is alone, and run alone where that is not so."""

from collections.abc import Callable

import numpy as np
import pytest
from halfeven.exporters.onnx.precision.oracle import Oracle
from halfeven.exporters.plan.batched import ELEMENTS, OPERATIONS, batches, elements_together
from halfeven.exporters.policy.operations import Operations
from halfeven.exporters.question import Answers, Arrays, Question, largest_of, same_among_others

from tests.exporters.onnx.onnx_files import parsed

HALF = """g (float[n,8] x) => (float[n,8] y) {
    a = Cast<to=10>(x) b = MatMul(a, w) c = Relu(b) y = Cast<to=1>(c)
}"""


class Counted:
    """A half or an original that remembers how many rows each of its runs had."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.rows: list[int] = []

    def __call__(self, inputs: Arrays) -> dict[str, np.ndarray]:
        self.rows.append(len(inputs["x"]))
        return self.answers(inputs)


def doubled(inputs: Arrays) -> dict[str, np.ndarray]:
    return {"y": inputs["x"] * 2}


def questions(*rows: int, width: int = 8) -> list[Question]:
    random = np.random.default_rng()
    arrays = [random.standard_normal((count, width)).astype(np.float32) for count in rows]
    return [Question(tuple(range(len(array))), {"x": array}, {}) for array in arrays]


def run(
    original: Answers, several: list[Question], half: Answers = doubled, most: int = ELEMENTS
) -> list[int]:
    """The number of rows of each run of the half, after a check that each execution was answered rightly."""
    counted = Counted(half)
    came = [pair for batch in batches(several, original, most) for pair in batch.answers(counted)]
    for asked, (one, answers) in zip(several, came, strict=True):
        assert one.inputs is asked.inputs and not isinstance(answers, Exception)
        np.testing.assert_array_equal(one.reference["y"], original(asked.inputs)["y"])
        np.testing.assert_array_equal(answers["y"], half(asked.inputs)["y"])
    return counted.rows


def test_they_are_run_as_one_and_each_gets_its_own_answer() -> None:
    assert run(doubled, questions(8, 3, 8)) == [19]
    assert run(doubled, questions(8, 3, 8), most=0) == [8, 3, 8]


def test_a_half_answers_rows_among_others_as_it_does_alone() -> None:
    weights = {"w": np.random.default_rng().standard_normal((8, 8)).astype(np.float16)}
    half = Oracle(parsed(HALF, weights), weights).run
    assert run(doubled, questions(8, 8, 5), half) == [21]


def test_the_original_is_run_once_for_a_batch_and_once_for_its_first_alone() -> None:
    original = Counted(doubled)
    assert len(list(batches(questions(8, 3, 8), original))) == 1 and original.rows == [19, 8]


def test_answers_that_are_not_finite_in_the_same_places_may_be_run_as_one() -> None:
    def rooted(inputs: Arrays) -> dict[str, np.ndarray]:
        return {"y": np.where(inputs["x"] < 0, np.nan, np.where(inputs["x"] > 2, np.inf, inputs["x"]))}

    assert run(rooted, questions(8, 8), half=rooted) == [16]


def test_many_are_run_in_batches_that_stay_small() -> None:
    assert run(doubled, questions(*[8] * 5, width=ELEMENTS // 16)) == [16, 16, 8]


def test_of_a_large_model_fewer_rows_are_run_at_once() -> None:
    most = elements_together(Operations(varying=OPERATIONS // 2, inputs=8))  # one row of eight elements
    assert run(doubled, questions(*[1] * 5), most=most) == [2, 2, 1]
    assert elements_together(Operations(varying=1, inputs=8)) == ELEMENTS


def test_rows_of_other_shapes_are_in_other_batches() -> None:
    assert run(doubled, [*questions(8, 8), *questions(8, width=4), *questions(8)]) == [16, 8, 8]


def centred(inputs: Arrays) -> dict[str, np.ndarray]:
    return {"y": inputs["x"] - inputs["x"].mean()}


def summed(inputs: Arrays) -> dict[str, np.ndarray]:
    return {"y": inputs["x"].sum(axis=0, keepdims=True)}


def small(inputs: Arrays) -> dict[str, np.ndarray]:
    if len(inputs["x"]) > 8:
        raise ValueError("reshaped for at most 8 rows")
    return doubled(inputs)


def flagged(inputs: Arrays) -> dict[str, np.ndarray]:
    return {"y": np.where(inputs["x"] > inputs["x"].max() * 0.99, np.nan, inputs["x"])}


def ranked(inputs: Arrays) -> dict[str, np.ndarray]:
    return {"y": inputs["x"].argsort(axis=0)}


def numbered(inputs: Arrays) -> dict[str, np.ndarray]:
    return {"y": np.full(inputs["x"].shape, 1_000_000 + len(inputs["x"]))}


@pytest.mark.parametrize("original", [centred, summed, small, flagged, ranked, numbered])
def test_where_the_original_answers_otherwise_among_others_each_is_run_alone(
    original: Callable[[Arrays], dict[str, np.ndarray]],
) -> None:
    several = sorted(questions(8, 8), key=lambda one: one.inputs["x"].max())  # the first alone is asked twice
    assert run(original, several, half=original) == [8, 8]


def test_a_row_is_the_same_among_others_within_a_share_of_the_largest_and_integers_are_equal() -> None:
    row = np.array([1.0, -2.0, np.nan, np.inf], np.float32)
    assert same_among_others(row, row + np.float32(1e-4), largest_of(row)) and largest_of(row) == 2.0
    assert not same_among_others(row, row + np.float32(3e-4), largest_of(row))
    assert same_among_others(row, row + np.float32(3e-4), 100.0), "a share of the original output's largest"
    assert not same_among_others(row, -row, 100.0) and not same_among_others(row, row[:2], 1.0)
    ids = np.array([100000, 3])
    assert same_among_others(ids, ids, 1e5) and not same_among_others(ids, ids + 1, 1e9)
