"""Samples that FP32 itself decides otherwise, when it adds up in another order, choose no plan."""

import numpy as np
from halfeven.exporters.plan.batched import Batch
from halfeven.exporters.plan.rehearsal import without_near_ties
from halfeven.exporters.question import Answers, Arrays, Question


def question(number: int, value: float, chosen: int | None) -> Question:
    reference: dict[str, np.ndarray] = {"y": np.full((1, 2), value, np.float32)}
    if chosen is not None:
        reference["best"] = np.full((1, 1), chosen, np.int64)
    return Question((number,), {"x": np.full((1, 2), value, np.float32)}, reference)


def other_order(inputs: Arrays) -> dict[str, np.ndarray]:
    """Every number differs in its last bits, and 0.5 is a tie: another choice."""
    x = inputs["x"]
    return {"y": x * np.float32(1 + 2**-23), "best": np.where(x[:, :1] == 0.5, 7, 1).astype(np.int64)}


def test_a_sample_with_other_integers_is_dropped_and_its_neighbours_stay() -> None:
    batch = Batch((question(0, 0.25, 1), question(1, 0.5, 1), question(2, 0.75, 1)))
    alone = Batch((question(3, 0.5, 1),))
    (left,) = without_near_ties([batch, alone], lambda: other_order)
    assert [one.samples for one in left.questions] == [(0,), (2,)]


def test_a_model_without_integers_is_not_asked() -> None:
    def never() -> Answers:
        raise AssertionError("nothing to ask")

    batches = [Batch((question(0, 0.5, None),))]
    assert list(without_near_ties(batches, never)) == batches
