"""A request with more rows than a batch: parts on the device, one answer, one version, one count."""

import asyncio
from typing import Any

import numpy as np
import pytest
from halfeven.models.errors import EngineFailed, Overloaded, TimedOut
from halfeven.models.spec.spec import ModelSpec
from halfeven.serve.batching.interface import Terms

from tests.serve.batching.stage import (
    POISON,
    Fake,
    async_test,
    gated,
    looked,
    prepared,
    rows_of,
    serving,
    slow,
    spec,
    tensor,
    timers_by_hand,
    together,
)
from tests.serve.clock import Clock


@async_test
async def test_a_large_request_is_run_in_full_batches_and_its_rest_shares_one_with_others() -> None:
    engine = Fake(factor=2.0)
    async with serving(engine, spec(rows=4)) as (batcher, device):
        large, mate = await together(batcher, device, rows_of(*range(10)), rows_of(50))
        np.testing.assert_array_equal(large.outputs[0][:, 0], np.arange(10) * 2)
        assert mate.outputs[0].item() == 100
    assert [[shape[0] for shape in batch] for batch in engine.batches] == [[4], [4], [2, 1]]


@async_test
async def test_the_answer_has_the_longest_wait_and_the_sum_of_what_was_computed() -> None:
    engine = slow(clock := Clock(0), 1000)
    async with serving(engine, spec(rows=4), clock) as (batcher, _):
        answer = await batcher.submit(rows_of(*range(10)), 10)
        assert (answer.queue_ns, answer.compute_ns, answer.batch_rows) == (2000, 3000, 4)
        counters = batcher.all_counters()[0]
        assert (counters.requests, counters.rows, counters.executions) == (1, 10, 3)
        assert (counters.queue_ns, counters.compute_ns, sum(counters.queue_buckets)) == (2000, 3000, 1)


@async_test
async def test_it_is_cut_by_the_rows_that_are_useful_here_but_one_that_fits_a_batch_is_not() -> None:
    engine = Fake()
    async with serving(engine, spec(rows=8)) as (batcher, device):
        frugal = prepared(engine, "2")
        frugal.useful_rows = 3
        await asyncio.wrap_future(device.call(lambda: batcher.swap(frugal)))
        await batcher.submit(rows_of(*range(8)), 8)
        await batcher.submit(rows_of(*range(9)), 9)
        await together(batcher, device, *(rows_of(i) for i in range(4)))
    assert [[shape[0] for shape in batch] for batch in engine.batches] == [[8], [3], [3], [3], [1] * 3, [1]]


@async_test
async def test_every_output_is_joined_in_order() -> None:
    class Two(Fake):
        def run(self, parts: Any) -> list[np.ndarray]:
            x = np.concatenate(parts[0])
            return [x.sum(1), x * 2]

    both = ModelSpec("toy", (tensor("x", -1, 4),), (tensor("s", -1), tensor("d", -1, 4)), 3)
    x = np.random.default_rng(0).random((8, 4), np.float32)
    async with serving(Two(), both) as (batcher, _):
        answer = await batcher.submit([x], 8)
    np.testing.assert_array_equal(answer.outputs[0], x.sum(1))
    np.testing.assert_array_equal(answer.outputs[1], x * 2)


@async_test
async def test_one_poisoned_part_fails_the_request_once_and_nobody_else() -> None:
    async with serving(Fake(), spec(rows=2)) as (batcher, device):
        device.hold()
        large = batcher.submit(rows_of(0, 1, POISON, 3, POISON, 5, 6), 7)
        mate = batcher.submit(rows_of(7), 1)
        device.release()
        with pytest.raises(EngineFailed, match="poison"):
            await large
        assert (await mate).outputs[0].item() == 7
        await looked(device)
        counters = batcher.all_counters()[0]
        assert (counters.failures, counters.requests, counters.vanished, batcher.waiting) == (1, 1, 0, 0)


@async_test
async def test_a_caller_who_leaves_between_two_parts_costs_no_more_and_is_counted_once() -> None:
    engine, inside = gated()
    async with serving(engine, spec(rows=2)) as (batcher, device):
        large = batcher.submit(rows_of(*range(8)), 8)
        await inside.wait()
        assert batcher.waiting == 1
        large.cancel()
        engine.gate.set()
        await batcher.submit(rows_of(1), 1)
        await looked(device)
        counters = batcher.all_counters()[0]
        assert (counters.vanished, counters.requests, batcher.waiting) == (1, 1, 0)
    assert [[shape[0] for shape in batch] for batch in engine.batches] == [[2], [1]]


@async_test
async def test_its_timeout_holds_until_its_first_part_begins() -> None:
    engine, inside = gated()
    soon = Terms(timeout_ns=1_000_000)
    async with serving(engine, spec(rows=2), Clock(0)) as (batcher, device):
        with timers_by_hand() as ring:
            begun = batcher.submit(rows_of(*range(5)), 5, soon)
        await inside.wait()
        ring()
        with pytest.raises(TimedOut):
            await batcher.submit(rows_of(*range(5)), 5, soon)
        engine.gate.set()
        assert (await begun).outputs[0].shape == (5, 1)
        await looked(device)
        assert (batcher.all_counters()[0].timed_out, batcher.all_counters()[0].requests, batcher.waiting) == (
            1,
            1,
            0,
        )


@pytest.mark.parametrize("moment", ["waiting", "begun"])
def test_a_swap_in_between_never_mixes_versions_in_one_answer(moment: str) -> None:
    async def scene() -> None:
        old, inside = gated()
        new = Fake(factor=10.0)
        async with serving(old, spec(rows=2)) as (batcher, device):
            if moment == "waiting":
                device.hold()
            large = batcher.submit(rows_of(*range(7)), 7)
            if moment == "begun":
                await inside.wait()
            swapped = device.call(lambda: batcher.swap(prepared(new, "2")))
            old.gate.set()
            (await asyncio.wrap_future(swapped)).engine.close()
            device.release()
            answer = await large
            factor = 10.0 if moment == "waiting" else 1.0
            np.testing.assert_array_equal(answer.outputs[0][:, 0], np.arange(7) * factor)
            assert answer.prepared.version == ("2" if moment == "waiting" else "1")

    asyncio.run(scene())


@async_test
async def test_urgent_requests_pass_between_the_parts_of_a_large_one_and_a_swap_still_ends_it_first() -> None:
    old, inside = gated()
    async with serving(old, spec(rows=2)) as (batcher, device):
        large = batcher.submit(rows_of(*range(6)), 6)
        await inside.wait()
        urgent = batcher.submit(rows_of(50), 1, Terms(priority=1))
        swapped = device.call(lambda: batcher.swap(prepared(Fake(factor=10.0), "2")))
        old.gate.set()
        await asyncio.wrap_future(swapped)
        assert (await urgent).outputs[0].item() == 500
        assert (await large).prepared.version == "1"


@async_test
async def test_a_large_request_is_one_to_the_limit_of_the_queue_and_its_bytes_count() -> None:
    async with serving(Fake(), spec(rows=2, width=-1, queue=2)) as (batcher, device):
        device.hold()
        futures = [batcher.submit(rows_of(*range(9)), 9) for _ in range(2)]
        assert batcher.waiting == 2
        with pytest.raises(Overloaded, match="already has 2 requests"):
            batcher.submit(rows_of(1), 1)
        device.release()
        await asyncio.gather(*futures)
        assert batcher._queue.taken_bytes == batcher._admission.bytes == 2 * 9 * 16


@async_test
async def test_a_deterministic_large_request_has_parts_of_the_largest_batch() -> None:
    engine = Fake()
    async with serving(engine, spec(rows=4)) as (batcher, device):
        frugal = prepared(engine, "2")
        frugal.useful_rows = 3
        await asyncio.wrap_future(device.call(lambda: batcher.swap(frugal)))
        await batcher.submit(rows_of(*range(9)), 9, Terms(deterministic=True))
    assert len(engine.batches) == 3 and {batch[0][0] for batch in engine.batches} <= {4, 1}
