"""Admission to the queue: by number, by bytes, and by the wait that was measured."""

import asyncio

import pytest
from halfeven.models.errors import Overloaded
from halfeven.models.spec.spec import ModelSpec
from halfeven.serve.batching.admission import Pace
from halfeven.serve.batching.batcher import Batcher
from halfeven.serve.batching.device import DeviceThread

from tests.serve.batching.stage import Fake, Future, async_test, gated, rows_of, serving, slow, spec, together
from tests.serve.clock import Clock

MS = 1_000_000


# Bytes


@async_test
async def test_the_inputs_that_wait_have_a_limit_in_bytes_with_fixed_and_with_free_shapes() -> None:
    for width in (4, -1):
        async with serving(Fake(), spec(width=width, max_queue_bytes=100)) as (batcher, device):
            device.hold()
            futures = [batcher.submit(rows_of(1, 2), 2) for _ in range(3)]  # 32 bytes each
            with pytest.raises(Overloaded, match=r"96 bytes of inputs waiting and this request has 16"):
                batcher.submit(rows_of(1), 1)
            device.release()
            await asyncio.gather(*futures)
            await batcher.submit(rows_of(1), 1)
            assert (batcher.all_counters()[0].rejected, batcher.waiting) == (1, 0)


@async_test
async def test_one_that_is_larger_than_the_limit_is_let_in_when_nothing_waits() -> None:
    async with serving(Fake(), spec(max_queue_bytes=10)) as (batcher, device):
        device.hold()
        alone = batcher.submit(rows_of(1, 2), 2)
        with pytest.raises(Overloaded):
            batcher.submit(rows_of(1), 1)
        device.release()
        assert (await alone).outputs[0].shape == (2, 1)


@async_test
async def test_a_batch_has_a_limit_in_bytes_by_the_size_of_its_rows() -> None:
    engine, clock, futures = Fake(), Clock(0), []
    async with serving(engine, spec(width=-1, max_batch_bytes=64), clock) as (batcher, device):
        device.hold()
        for width in (4, 4, 8, 4, 8, 4, 4, 8, 32):
            clock.now += 1
            futures.append(batcher.submit(rows_of(1, width=width), 1))
        device.release()
        await asyncio.gather(*futures)
    assert engine.batches == [[(1, 4)] * 4, [(1, 8)] * 2, [(1, 4)], [(1, 8)], [(1, 32)]]


@async_test
async def test_a_large_request_is_cut_by_bytes_as_well() -> None:
    engine = Fake()
    async with serving(engine, spec(rows=8, max_batch_bytes=64)) as (batcher, _):
        await batcher.submit(rows_of(*range(10)), 10)
    assert [[shape[0] for shape in batch] for batch in engine.batches] == [[4], [4], [2]]


# Time


@async_test
async def test_a_request_that_would_wait_too_long_is_refused_with_when_to_come_back() -> None:
    clock = Clock(0)
    async with serving(slow(clock, 100 * MS), spec(rows=4, max_queue_ms=250), clock) as (batcher, device):
        await batcher.submit(rows_of(*range(4)), 4)
        device.hold()
        futures = [batcher.submit(rows_of(1), 1) for _ in range(12)]  # three batches: waits of 0 to 200 ms
        with pytest.raises(
            Overloaded, match=r"would wait about 300 ms \(batching.max_queue_ms is 250\)"
        ) as refused:
            batcher.submit(rows_of(1), 1)
        assert refused.value.retry_after_s == pytest.approx(0.3)
        device.release()
        await asyncio.gather(*futures)


@async_test
async def test_the_rest_of_the_batch_under_way_counts() -> None:
    clock = Clock(0)
    engine, inside = gated()
    async with serving(engine, spec(rows=4, max_queue_ms=50), clock) as (batcher, _):
        batcher._scheduler.pace.ended(4, 1, 0, 100 * MS, 4)  # it knows: 100 ms for four rows
        clock.now = 1000 * MS
        first = batcher.submit(rows_of(*range(4)), 4)
        await inside.wait()
        clock.now += 30 * MS
        with pytest.raises(Overloaded, match="about 70 ms"):
            batcher.submit(rows_of(1), 1)
        clock.now += 30 * MS
        second = batcher.submit(rows_of(1), 1)
        clock.now += 300 * MS  # it takes longer than it ever did: nobody is refused for that
        third = batcher.submit(rows_of(1), 1)
        engine.gate.set()
        await asyncio.gather(first, second, third)


@async_test
async def test_nothing_is_refused_on_a_guess_before_anything_was_measured() -> None:
    async with serving(Fake(), spec(rows=1, max_queue_ms=1), Clock(0)) as (batcher, device):
        await together(batcher, device, *(rows_of(1) for _ in range(50)))


@async_test
async def test_shapes_that_differ_wait_for_each_others_batches() -> None:
    clock = Clock(0)
    async with serving(slow(clock, 100 * MS), spec(width=-1, max_queue_ms=150), clock) as (batcher, device):
        await batcher.submit(rows_of(*range(64)), 64)
        device.hold()
        futures = [batcher.submit(rows_of(1, width=w), 1) for w in (1, 2, 3)]
        await asyncio.wrap_future(device.call(lambda: None))
        await asyncio.wrap_future(device.call(lambda: None))
        with pytest.raises(Overloaded, match="about 200 ms"):
            batcher.submit(rows_of(1, width=4), 1)
        device.release()
        await asyncio.gather(*futures)


def test_without_limits_of_its_own_a_model_waits_at_most_ten_seconds_and_256_mebibytes() -> None:
    batching = ModelSpec("m", (), ()).batching
    assert (batching.max_queue_ms, batching.max_queue_bytes, batching.timeout_ms) == (10_000, 2**28, 0)


# The pace


def test_a_size_that_was_never_run_is_taken_to_cost_what_the_largest_smaller_one_did() -> None:
    pace = Pace()
    assert pace.cost_ns(8) == 0
    pace.ended(1, 1, 0, 5, 8)
    assert pace.cost_ns(8) == pace.full_ns == 5
    pace.ended(8, 100, 100, 116, 8)
    assert (pace.cost_ns(8), pace.cost_ns(1), pace.cost_ns(12)) == (16, 5, 24)


def test_the_pace_follows_what_is_measured_and_one_long_pause_does_not_spoil_it() -> None:
    pace = Pace()
    now = 1000
    for took in (10, 10, 10_000):
        pace.ended(4, now + 1, now + 1, now + 1 + took, 4)
        now += 1 + took
    assert pace.full_ns > 10
    pace = Pace()
    pace.ended(4, 1, 0, 10, 4)
    pace.ended(4, 5, 10_000, 10_010, 4)  # it had waited while the device did other things for ten seconds
    assert pace.full_ns == pytest.approx(10 + 0.25 * 30)
    for i in range(40):
        pace.ended(4, 20_000 + i * 100, 20_000 + i * 100, 20_020 + i * 100, 4)
    assert pace.full_ns == pytest.approx(20, rel=0.01)


def test_the_batches_of_other_models_count_as_what_it_costs() -> None:
    pace = Pace()
    pace.ended(1, 1, 0, 10, 1)
    for i in range(1, 60):  # ten of its own and thirty of others', one after the other
        pace.ended(1, 40 * (i - 1), 40 * i, 40 * i + 10, 1)
    assert pace.full_ns == pytest.approx(40, rel=0.01)


@async_test
async def test_after_an_overload_everybody_is_let_in_at_once() -> None:
    clock = Clock(0)
    async with serving(slow(clock, 100 * MS), spec(rows=2, max_queue_ms=300), clock) as (batcher, device):
        await batcher.submit(rows_of(1, 2), 2)
        admitted, refused = await overload(batcher, device, 50)
        assert (len(admitted), refused) == (8, 42)  # waits of 0, 100, 200 and 300 ms, two each
        answers = await asyncio.gather(*admitted)
        assert max(answer.queue_ns for answer in answers) == 300 * MS
        admitted, refused = await overload(batcher, device, 8)
        assert refused == 0
        await asyncio.gather(*admitted)
        assert batcher.all_counters()[0].rejected == 42


async def overload(batcher: Batcher, device: DeviceThread, requests: int) -> tuple[list[Future], int]:
    device.hold()
    admitted, refused = [], 0
    for _ in range(requests):
        try:
            admitted.append(batcher.submit(rows_of(1), 1))
        except Overloaded:
            refused += 1
    device.release()
    return admitted, refused
