"""Who is asked together is answered as he is alone, and asked alone where that is not so."""

from collections.abc import Callable

import numpy as np
import pytest
from halfeven.exporters.foreign.oracle import Oracle
from halfeven.exporters.question import Answers, Arrays, Question
from halfeven.exporters.search.company import ELEMENTS, Company

from tests.exporters.foreign.onnx_files import parsed

HALF = """g (float[n,8] x) => (float[n,8] y) {
    a = Cast<to=10>(x) b = MatMul(a, w) c = Relu(b) y = Cast<to=1>(c)
}"""


class Counted:
    """A half or a whole that remembers how many rows each of its runs had."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.rows: list[int] = []

    def __call__(self, inputs: Arrays) -> dict[str, np.ndarray]:
        self.rows.append(len(inputs["x"]))
        return self.answers(inputs)


def doubled(inputs: Arrays) -> dict[str, np.ndarray]:
    return {"y": inputs["x"] * 2}


def executions(whole: Answers, *rows: int, width: int = 8) -> list[Question]:
    random, found = np.random.default_rng(), []
    for count in rows:
        inputs = {"x": random.standard_normal((count, width)).astype(np.float32)}
        found.append(Question(tuple(range(count)), inputs, whole(inputs)))
    return found


def asked(whole: Answers, several: list[Question], half: Answers = doubled) -> list[int]:
    """How many rows each run of the half had, after it answered each execution rightly."""
    company, counted = Company(whole), Counted(half)
    company.gather(several)
    answer = company.answered_by(counted)
    for one in several:
        np.testing.assert_array_equal(answer(one)["y"], half(one.inputs)["y"])
    return counted.rows


def test_they_are_asked_at_once_and_each_gets_its_own_answer() -> None:
    assert asked(doubled, executions(doubled, 8, 3, 8)) == [19]


def test_a_half_answers_rows_in_company_as_it_does_alone() -> None:
    weights = {"w": np.random.default_rng().standard_normal((8, 8)).astype(np.float16)}
    half = Oracle(model := parsed(HALF, weights), weights).run
    assert model.graph.node and asked(doubled, executions(doubled, 8, 8, 5), half) == [21]


def test_who_is_not_finite_in_the_same_places_is_in_company_too() -> None:
    def rooted(inputs: Arrays) -> dict[str, np.ndarray]:
        return {"y": np.where(inputs["x"] < 0, np.nan, np.where(inputs["x"] > 2, np.inf, inputs["x"]))}

    assert asked(rooted, executions(rooted, 8, 8), half=rooted) == [16]


def test_many_are_asked_in_groups_that_stay_small() -> None:
    width = ELEMENTS // 16
    assert asked(doubled, executions(doubled, *[8] * 5, width=width)) == [16, 16, 8]


def test_who_was_gathered_again_is_asked_with_the_new_ones() -> None:
    company, counted = Company(doubled), Counted(doubled)
    several = executions(doubled, 8, 8, 8, 8)
    company.gather(several)
    company.gather(several[1:3])
    answer = company.answered_by(counted)
    assert [answer(one)["y"].shape for one in several[1:3]] == [(8, 8)] * 2
    assert counted.rows == [16]


def test_of_other_shapes_nobody_is_in_company() -> None:
    several = [*executions(doubled, 8, 8), *executions(doubled, 8, width=4), *executions(doubled, 8)]
    assert asked(doubled, several) == [16, 8, 8]


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


@pytest.mark.parametrize("whole", [centred, summed, small, flagged, ranked, numbered])
def test_where_the_whole_answers_otherwise_in_company_each_is_asked_alone(
    whole: Callable[[Arrays], dict[str, np.ndarray]],
) -> None:
    assert asked(whole, executions(whole, 8, 8), half=whole) == [8, 8]


def unanswered(*rows: int) -> list[Question]:
    return [Question(one.samples, one.inputs, {}) for one in executions(doubled, *rows)]


def test_the_whole_answers_many_at_once_and_one_of_each_group_alone() -> None:
    whole = Counted(doubled)
    company, several = Company(whole), unanswered(8, 3, 8)
    answered = list(company.ask(several))
    assert whole.rows == [19, 8]
    for one, other in zip(several, answered, strict=True):
        assert other.inputs is one.inputs
        np.testing.assert_array_equal(other.reference["y"], doubled(one.inputs)["y"])
    half = Counted(doubled)
    answer = company.answered_by(half)
    for one in answered:
        np.testing.assert_array_equal(answer(one)["y"], one.reference["y"])
    assert half.rows == [19]


def of_its_company(inputs: Arrays) -> dict[str, np.ndarray]:
    return {"y": inputs["x"] * len(inputs["x"])}


def refuses_company(inputs: Arrays) -> dict[str, np.ndarray]:
    if len(inputs["x"]) > 8:
        raise ValueError("too many rows")
    return doubled(inputs)


@pytest.mark.parametrize("whole", [of_its_company, refuses_company])
def test_whom_the_whole_answers_otherwise_in_company_it_answers_alone(whole: Answers) -> None:
    half = Counted(whole)
    company = Company(whole)
    answered = list(company.ask(unanswered(8, 3, 8)))
    answer = company.answered_by(half)
    for one in answered:
        np.testing.assert_array_equal(one.reference["y"], whole(one.inputs)["y"])
        np.testing.assert_array_equal(answer(one)["y"], one.reference["y"])
    assert half.rows == [8, 3, 8]
