"""Requests of different lengths share a batch where the version's lengths may be filled up, and nowhere else."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from halfeven.models.engines.engine import Engine
from halfeven.models.spec.filled_lengths import Lengths
from halfeven.models.spec.spec import Batching, ModelSpec
from halfeven.serve.batching.batcher import Batcher
from halfeven.serve.batching.interface import Answer, PreparedVersion, Terms

from tests.serve.batching.stage import async_test, prepared, serving, together
from tests.specs import tensor

LENGTHS = (80, 160)


def spec(*lengths: int, rows: int = 16, **batching: Any) -> ModelSpec:
    return ModelSpec(
        "m",
        (tensor("ids", "INT64", -1, "length=1..240"), tensor("mask", "INT64", -1, "length=1..240")),
        (tensor("each", "FP32", -1, "length"), tensor("all", "FP32", -1, 1)),
        rows,
        batching=Batching(lengths=lengths, **batching),
    )


@dataclass(eq=False)
class Sums(Engine):
    """Each id times ``factor``, and the sum of those that the mask keeps; an id of -1 is answered with NaN, and one of
    -2 fails."""

    factor: float = 1.0
    device: str = "cpu"
    form: str = "torch"
    precision: str = "fp16"
    batches: list[tuple[int, ...]] = field(default_factory=list)

    def run(self, parts: Any) -> list[np.ndarray]:
        ids, mask = (np.concatenate(part) for part in parts)
        self.batches.append(ids.shape)
        if (ids == -2).any():
            raise ValueError("poison")
        each = np.where(ids == -1, np.nan if self.precision == "fp16" else -1.0, ids).astype(np.float32)
        each *= np.float32(self.factor)
        return [each, np.where(mask > 0, each, 0).sum(1, keepdims=True)]

    def close(self) -> None:
        pass


def arrays(length: int, rows: int = 1, first: int = 1) -> list[np.ndarray]:
    ids = np.tile(np.arange(1, length + 1), (rows, 1))
    ids[:, 0] = first
    return [ids, np.ones((rows, length), np.int64)]


def right(answer: Answer, length: int, factor: float = 1.0, first: int = 1, rows: int = 1) -> bool:
    ids = arrays(length, rows, first)[0].astype(np.float32) * np.float32(factor)
    each, total = answer.outputs
    return np.array_equal(each, ids) and np.array_equal(total, ids.sum(1, keepdims=True))


async def held(batcher: Batcher, device: Any, lengths: list[int], **terms: Any) -> list[Any]:
    """Requests of these lengths that wait together."""
    device.hold()
    futures = [batcher.submit(arrays(length), 1, **terms) for length in lengths]
    await asyncio.sleep(0)
    return futures


@async_test
async def test_requests_of_different_lengths_are_one_batch_and_each_gets_its_own_places() -> None:
    engine = Sums()
    async with serving(engine, spec(*LENGTHS)) as (batcher, device):
        lengths = [30, 80, 50, 90, 150, 120, 170, 210, 200]
        answers = await together(batcher, device, *map(arrays, lengths))
        assert all(map(right, answers, lengths))
    assert sorted(engine.batches) == [(3, 80), (3, 150), (3, 210)]  # as long as its longest row


@async_test
async def test_of_one_length_and_alone_nothing_is_filled_up_and_without_lengths_nothing_is_joined() -> None:
    engine, plain = Sums(), Sums()
    async with serving(engine, spec(80, 110)) as (batcher, device):
        futures = await held(batcher, device, [50, 50])
        alone = batcher.submit(arrays(60), 1, Terms(deterministic=True))
        later = batcher.submit(arrays(90), 1)
        device.release()
        assert all([right(await future, 50) for future in futures])
        assert right(await alone, 60) and right(await later, 90)
    assert engine.batches == [(2, 50), (16, 60), (1, 90)]  # the same rows and place, whatever waits
    async with serving(plain, spec()) as (batcher, device):
        await together(batcher, device, arrays(50), arrays(60))
    assert sorted(plain.batches) == [(1, 50), (1, 60)]


@async_test
async def test_neighbouring_lengths_share_a_batch_where_it_costs_less_than_another_one() -> None:
    engine = Sums()
    async with serving(engine, spec(80, 110)) as (batcher, device):
        near = await together(batcher, device, arrays(70), arrays(90))
        assert right(near[0], 70) and right(near[1], 90)
        # Two rows take 30 places more each, and a batch costs 50.
        await together(batcher, device, *map(arrays, (70, 70, 90)))
    assert engine.batches[0] == (2, 90) and sorted(engine.batches[1:]) == [(1, 90), (2, 70)]


@async_test
async def test_on_a_cuda_device_every_batch_has_one_of_the_lengths() -> None:
    engine = Sums(device="cuda:0")
    async with serving(engine, spec(*LENGTHS, buckets=())) as (batcher, _):
        assert right(await batcher.submit(arrays(50), 1), 50)
    assert engine.batches == [(1, 80)]


@async_test
async def test_a_swap_joins_what_waits_as_the_new_version_allows() -> None:
    old, none, again = Sums(), Sums(2.0), Sums(3.0)
    async with serving(old, spec(*LENGTHS)) as (batcher, device):
        first = await held(batcher, device, [30, 50])
        swapped = device.call(lambda: batcher.swap(prepared(none, "2"), spec()))
        device.release()
        await asyncio.wrap_future(swapped)
        assert right(await first[0], 30, 2.0) and right(await first[1], 50, 2.0)
        assert old.batches == [] and sorted(none.batches) == [(1, 30), (1, 50)]
        second = await held(batcher, device, [30, 50, 90])
        swapped = device.call(lambda: batcher.swap(prepared(again, "3"), spec(*LENGTHS)))
        device.release()
        await asyncio.wrap_future(swapped)
        assert all([right(await one, length, 3.0) for one, length in zip(second, (30, 50, 90), strict=True)])
    assert sorted(again.batches) == [(1, 90), (2, 50)]


@async_test
async def test_a_request_in_parts_and_one_that_fails_share_batches_with_other_lengths() -> None:
    engine = Sums()
    async with serving(engine, spec(*LENGTHS, rows=2)) as (batcher, device):
        device.hold()
        large = batcher.submit(arrays(7, rows=3), 3)
        poison = batcher.submit(arrays(4, first=-2), 1)
        other = batcher.submit(arrays(5), 1)
        await asyncio.sleep(0)
        device.release()
        assert right(await large, 7, rows=3) and right(await other, 5)
        assert "(input shapes [1, 4], [1, 4]): " in str(await asyncio.gather(poison, return_exceptions=True))


def test_an_empty_axis_has_no_place_to_repeat_and_is_left_empty() -> None:
    lengths, nothing = Lengths.of(spec(*LENGTHS)), [np.zeros((2, 0), np.int64)] * 2
    assert lengths is not None and lengths.shared(((0,), (0,))) == ((0,), (0,))
    assert [one.shape for one in lengths.filled(nothing, ((0,), (0,)))] == [(2, 0), (2, 0)]


@async_test
async def test_a_row_that_is_rescued_is_answered_at_its_own_length() -> None:
    original = Sums(precision="fp32")
    version = PreparedVersion("1", "sha", "fp16", Sums(), original=original)
    async with serving(Sums(), spec(*LENGTHS)) as (batcher, device):
        await asyncio.wrap_future(device.call(lambda: batcher.swap(version)))
        torn, fine = await together(batcher, device, arrays(3, first=-1), arrays(6))
        assert right(torn, 3, first=-1) and torn.rescued == 1
        assert right(fine, 6)
    assert original.batches == [(1, 6)]


@async_test
async def test_a_batch_has_no_more_bytes_than_allowed_once_it_is_filled_up() -> None:
    engine = Sums()
    allowed = 4 * 2 * 8 * 80  # four rows of two inputs of 80 INT64
    async with serving(engine, spec(*LENGTHS, max_batch_bytes=allowed)) as (batcher, device):
        await together(batcher, device, *map(arrays, (10, 20, 30, 40, 50, 60)))
    assert engine.batches == [(4, 40), (2, 60)]
