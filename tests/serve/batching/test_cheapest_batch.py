"""Lengths are joined as cheaply as possible, and never at the cost of the request that has waited longest."""

from itertools import combinations, pairwise
from typing import Any

import numpy as np
from halfeven.models.spec.filled_lengths import Lengths, longest_of
from halfeven.models.spec.spec import Batching, ModelSpec
from halfeven.serve.batching.cheapest_batch import BATCH_PLACES, cheapest_batch
from halfeven.serve.batching.request_queue import Request, RequestQueue

from tests.specs import tensor


class Stays:
    """A caller that waits."""

    def done(self) -> bool:
        return False


def cost_of(bounds: list[int], rows: list[int], sizes: list[int], most: int) -> float:
    """The cost of the batches between these bounds; infinite where one of several groups has too many rows."""
    cost = 0.0
    for start, end in pairwise(bounds):
        together = sum(rows[start:end])
        if end - start > 1 and together > most:
            return float("inf")
        cost += BATCH_PLACES + together * sizes[end - 1]
    return cost


def test_the_batches_are_the_cheapest_of_all_divisions() -> None:
    random = np.random.default_rng()
    for _ in range(50):
        groups = int(random.integers(1, 8))
        rows = random.integers(1, 6, groups).tolist()
        sizes = sorted(random.choice(np.arange(1, 200), groups, replace=False).tolist())
        most = int(random.integers(4, 20))
        found = [
            cheapest_batch(index, rows, [(size,) for size in sizes], [most] * groups)
            for index in range(groups)
        ]
        assert all(index in one for index, one in enumerate(found))
        ours = sorted({one.start for one in found} | {groups})
        all_bounds = [
            [0, *inner, groups]
            for number in range(groups)
            for inner in combinations(range(1, groups), number)
        ]
        cheapest = min(cost_of(bounds, rows, sizes, most) for bounds in all_bounds)
        assert cost_of(ours, rows, sizes, most) == cheapest


def two_axes(*lengths: int, **batching: Any) -> ModelSpec:
    inputs = (
        tensor("text", "INT64", -1, "words=1..200"),
        tensor("text_mask", "INT64", -1, "words=1..200"),
        tensor("sound", "INT64", -1, "steps=1..400", -1),
        tensor("sound_mask", "INT64", -1, "steps=1..400"),
    )
    return ModelSpec("m", inputs, (), 8, batching=Batching(lengths=lengths, **batching))


def request(since_ns: int, words: int, steps: int, width: int, rows: int = 1) -> Request:
    shapes = ((words,), (words,), (steps, width), (steps,))
    arrays = [np.zeros((rows, *shape), np.int64) for shape in shapes]
    stays: Any = Stays()
    return Request(arrays, rows, stays, since_ns, shapes, sum(array.nbytes for array in arrays))


def test_whatever_else_waits_the_oldest_request_is_in_the_next_batch_and_each_is_in_one() -> None:
    random = np.random.default_rng()
    lengths = Lengths.of(two_axes(16, 32, 64, 128))
    assert lengths is not None
    bytes_allowed = 8 * 8 * 4000
    queue = RequestQueue(8, 0, bytes_allowed)
    queue.join_lengths(lengths)
    waiting, batches, shared = list[Request](), 0, 0
    for turn in range(300):
        fresh = [
            request(
                turn * 100 + place,
                int(random.integers(1, 200)),
                int(random.integers(1, 400)),
                int(random.integers(1, 3)),
                int(random.integers(1, 4)),
            )
            for place in range(random.integers(6) if turn < 200 else 0)
        ]
        waiting += fresh
        queue.add(fresh)
        if queue.due_ns() is None:
            continue
        oldest = min(waiting, key=lambda one: one.since_ns)
        batch = queue.form()
        assert oldest is batch.requests[0]
        waiting = [one for one in waiting if one not in batch.requests]
        shapes = longest_of([one.shapes for one in batch.requests if one.shapes])
        assert len({one.arrays[2].shape[2] for one in batch.requests}) == 1  # no axis of this name has a mask
        assert batch.rows == sum(one.rows for one in batch.requests) <= 8
        elements = sum(int(np.prod(shape)) for shape in shapes)
        assert len(batch.requests) == 1 or 8 * batch.rows * elements <= bytes_allowed
        batches += 1
        shared += len(batch.requests) > 1
    while queue.due_ns() is not None:
        waiting = [one for one in waiting if one not in queue.form().requests]
    assert not waiting and queue.groups == 0
    assert shared > 20
