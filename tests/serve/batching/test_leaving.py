"""Callers that left and requests whose time is up give their places back at once, not when their batch is formed."""

import asyncio

import pytest
from halfeven.models.errors import Overloaded, TimedOut
from halfeven.serve.batching.batcher import Batcher
from halfeven.serve.batching.interface import Terms
from halfeven.serve.batching.leaving import WaitingFuture

from tests.serve.batching.stage import Fake, async_test, rows_of, serving, spec, timers_by_hand


def held(batcher: Batcher) -> tuple[int, int, int, int]:
    """The counts of what waits: requests, rows, urgent rows, bytes."""
    admission, queue = batcher._admission, batcher._queue
    return (
        admission.requests - queue.taken,
        admission.rows - queue.taken_rows,
        admission.urgent_rows - queue.taken_urgent_rows,
        admission.bytes - queue.taken_bytes,
    )


@async_test
async def test_four_callers_that_left_refuse_nobody_while_a_batch_runs() -> None:
    engine = Fake()
    async with serving(engine, spec(queue=4)) as (batcher, device):
        device.hold()
        gone = [batcher.submit(rows_of(1), 1) for _ in range(4)]
        with pytest.raises(Overloaded):
            batcher.submit(rows_of(1), 1)
        for future in gone:
            future.cancel()
        assert batcher.waiting == 0, "which the autoscaler reads"
        stays = [batcher.submit(rows_of(1), 1) for _ in range(4)]
        with pytest.raises(Overloaded, match="4 requests waiting"):
            batcher.submit(rows_of(1), 1)
        device.release()
        await asyncio.gather(*stays)
        counters = batcher.all_counters()[0]
        assert (counters.vanished, counters.requests, held(batcher)) == (4, 4, (0, 0, 0, 0))
    assert engine.batches == [[(1, 4)] * 4], "who left is not run"


@async_test
async def test_a_request_whose_time_is_up_is_out_at_once() -> None:
    async with serving(Fake(), spec(queue=2)) as (batcher, device):
        with timers_by_hand() as ring:
            device.hold()
            late = [batcher.submit(rows_of(1), 1, Terms(timeout_ns=1)) for _ in range(2)]
            with pytest.raises(Overloaded):
                batcher.submit(rows_of(1), 1)
            ring()
            stays = batcher.submit(rows_of(1), 1)
            device.release()
            for future in late:
                with pytest.raises(TimedOut):
                    await future
            await stays
            assert (batcher.all_counters()[0].timed_out, held(batcher)) == (2, (0, 0, 0, 0))


@pytest.mark.parametrize(
    ("rows", "terms"),
    [
        (1, Terms()),
        (8, Terms()),
        (20, Terms()),
        (2, Terms(priority=1)),
        (20, Terms(priority=1)),
        (3, Terms(deterministic=True)),
    ],
)
@pytest.mark.parametrize("width", [4, -1])
def test_every_number_is_right_after_a_caller_left_before_or_during_its_batch(
    rows: int, terms: Terms, width: int
) -> None:
    @async_test
    async def run() -> None:
        async with serving(Fake(), spec(rows=8, width=width, queue=50)) as (batcher, device):
            for before in (True, False):
                device.hold()
                others = [batcher.submit(rows_of(1), 1) for _ in range(2)]
                gone = batcher.submit(rows_of(*[1.0] * rows), rows, terms)
                assert held(batcher)[:2] == (3, 2 + rows)
                if before:
                    gone.cancel()
                    assert held(batcher)[:3] == (2, 2, 0)
                device.release()
                await asyncio.gather(*others)
                gone.cancel()
                await asyncio.sleep(0)
                await batcher.submit(rows_of(1), 1)
                assert held(batcher) == (0, 0, 0, 0)

    run()


@async_test
async def test_an_answered_future_keeps_no_request() -> None:
    """Future and request name each other while they wait; afterwards nothing but the collector would free them."""
    async with serving(Fake(), spec()) as (batcher, device):
        device.hold()
        futures = [batcher.submit(rows_of(1), 1), batcher.submit(rows_of(1), 1, Terms(priority=1))]
        device.release()
        await asyncio.gather(*futures)
        assert all(isinstance(one, WaitingFuture) and one.places is None for one in futures)


@async_test
async def test_a_caller_that_leaves_before_its_refusal_arrives_is_counted_once() -> None:
    """The device thread refuses a request that was checked against another signature; its caller leaves meanwhile."""
    async with serving(Fake(), spec()) as (batcher, _):
        future = batcher.submit(rows_of(1), 1)
        assert isinstance(future, WaitingFuture) and future.places is not None
        admission, (request,) = future.places
        batcher._pending.clear()  # as if the device thread had got it, and refused it
        batcher._queue.pass_by([request])
        future.cancel()
        assert held(batcher) == (0, 0, 0, 0) and admission.waiting == 0
