"""The terms of a caller beside the answer: a timeout, a place in front, a batch of one's own."""

import asyncio
import gc
from random import Random

import pytest
from halfeven.models.errors import Overloaded, TimedOut
from halfeven.serve.batching.interface import Terms
from halfeven.serve.batching.request_queue import HEAD_START_NS
from halfeven.serve.http.error_mapping import status_of

from tests.conftest import SEED
from tests.serve.batching.stage import (
    Fake,
    async_test,
    gated,
    looked,
    rows_of,
    serving,
    slow,
    spec,
    timers_by_hand,
)
from tests.serve.clock import Clock

SOON = Terms(timeout_ns=1_000_000)
URGENT = Terms(priority=1)

# Timeouts


@async_test
async def test_a_timeout_fires_while_a_batch_of_others_is_on_the_device_and_the_request_is_never_run() -> (
    None
):
    engine, inside = gated()
    async with serving(engine) as (batcher, device):
        first = batcher.submit(rows_of(1), 1)
        await inside.wait()
        late, patient = batcher.submit(rows_of(2), 1, SOON), batcher.submit(rows_of(3), 1)
        with pytest.raises(
            TimedOut, match=r"^Request timeout expired: model 'toy' .* within 1 ms"
        ) as expired:
            await late
        assert status_of(expired.value) == 503
        assert not first.done(), "the device was busy all the while"
        engine.gate.set()
        assert [(await f).outputs[0].item() for f in (first, patient)] == [1, 3]
        await looked(device)
        counters = batcher.all_counters()[0]
        assert (counters.timed_out, counters.vanished, counters.requests, batcher.waiting) == (1, 0, 2, 0)
    assert engine.batches == [[(1, 4)], [(1, 4)]]


@async_test
async def test_a_request_whose_batch_has_begun_is_answered_however_long_that_takes() -> None:
    (engine, inside), clock = gated(), Clock(0)
    async with serving(engine, clock=clock) as (batcher, _):
        with timers_by_hand() as ring:
            future = batcher.submit(rows_of(1), 1, SOON)
        await inside.wait()
        clock.now = 2 * SOON.timeout_ns
        ring()
        engine.gate.set()
        assert (await future).outputs[0].item() == 1


@async_test
async def test_who_asks_for_no_timeout_costs_no_timer_and_an_answered_one_leaves_none_behind() -> None:
    async with serving(Fake()) as (batcher, _):
        loop = asyncio.get_running_loop()
        timers: list[asyncio.TimerHandle] = []
        later = loop.call_later
        setattr(loop, "call_later", lambda *a, **kw: (timers.append(later(*a, **kw)), timers[-1])[1])  # noqa: B010
        await batcher.submit(rows_of(1), 1)
        assert not timers
        await batcher.submit(rows_of(1), 1, Terms(timeout_ns=3_600_000_000_000))
        await asyncio.sleep(0)  # the done callback
        del loop.call_later
    assert [timer.cancelled() for timer in timers] == [True]


@async_test
async def test_the_models_timeout_holds_for_those_who_name_none() -> None:
    async with serving(Fake(), spec(timeout_ms=1)) as (batcher, device):
        device.hold()
        default = batcher.submit(rows_of(1), 1)
        own = batcher.submit(rows_of(2), 1, Terms(timeout_ns=3_600_000_000_000))
        with pytest.raises(TimedOut):
            await default
        device.release()
        assert (await own).outputs[0].item() == 2


@async_test
async def test_a_request_that_cannot_be_served_in_its_time_is_refused_at_once() -> None:
    engine = slow(clock := Clock(0), 50_000_000)
    async with serving(engine, spec(rows=2), clock) as (batcher, device):
        await batcher.submit(rows_of(0, 0), 2)  # from this it knows: 50 ms for a full batch
        device.hold()
        waiting = [batcher.submit(rows_of(i, i), 2) for i in range(3)]  # 150 ms of work
        with pytest.raises(Overloaded, match=r"about 150 ms \(the request's timeout is 100 ms\)") as refused:
            batcher.submit(rows_of(9), 1, Terms(timeout_ns=100_000_000))
        assert refused.value.retry_after_s == pytest.approx(0.15)
        in_time = batcher.submit(rows_of(9), 1, Terms(timeout_ns=200_000_000))
        device.release()
        await asyncio.gather(*waiting, in_time)
        assert batcher.all_counters()[0].rejected == 1


@pytest.mark.slow
@async_test
async def test_a_timed_out_caller_who_has_gone_leaves_no_complaint_behind() -> None:
    loop, complaints = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    async with serving(Fake()) as (batcher, device):
        device.hold()
        gone = batcher.submit(rows_of(1), 1, SOON)
        gone.cancel()
        with pytest.raises(TimedOut):
            await batcher.submit(rows_of(2), 1, SOON)
        device.release()
        await batcher.submit(rows_of(3), 1)
        await looked(device)
        assert (batcher.all_counters()[0].vanished, batcher.all_counters()[0].timed_out) == (1, 1)
    del gone
    gc.collect()
    assert complaints == []


# Priority


@async_test
async def test_the_first_level_goes_before_the_second_and_both_keep_their_order() -> None:
    engine, order = Fake(), []
    async with serving(engine, spec(rows=2)) as (batcher, device):
        device.hold()
        levels = (0, 2, 0, 1, 1, 0, 1)
        for i, level in enumerate(levels):
            future = batcher.submit(rows_of(i), 1, Terms(priority=level))
            future.add_done_callback(lambda done: order.append(done.result().outputs[0].item()))
        device.release()
        await batcher.drain()
    await asyncio.sleep(0)
    assert order == [3, 4, 6, 0, 1, 2, 5]
    assert [len(batch) for batch in engine.batches] == [2, 2, 2, 1]


@async_test
async def test_who_waits_longer_than_the_head_start_goes_before_urgent_ones_that_come_then() -> None:
    clock, engine, order = Clock(0), Fake(), []
    async with serving(engine, spec(rows=1), clock) as (batcher, device):
        device.hold()

        def send(value: float, terms: Terms) -> None:
            future = batcher.submit(rows_of(value), 1, terms)
            future.add_done_callback(lambda done: order.append(done.result().outputs[0].item()))

        send(1, Terms())
        clock.now = HEAD_START_NS
        send(2, Terms())
        send(3, URGENT)
        clock.now = HEAD_START_NS + 1
        send(4, URGENT)
        device.release()
        await batcher.drain()
    await asyncio.sleep(0)
    assert order == [3, 1, 4, 2]


@async_test
async def test_an_urgent_request_does_not_wait_for_a_batch_to_fill() -> None:
    hour_us = 3_600_000_000
    async with serving(Fake(), spec(delay_us=hour_us), Clock(0)) as (batcher, device):
        slow = batcher.submit(rows_of(1), 1)
        await looked(device)
        assert not slow.done()
        assert (await batcher.submit(rows_of(2), 1, URGENT)).outputs[0].item() == 2
        assert (await slow).outputs[0].item() == 1  # there was room for it in the same batch


@async_test
async def test_urgent_shapes_go_before_other_shapes() -> None:
    engine = Fake()
    async with serving(engine, spec(width=-1)) as (batcher, device):
        device.hold()
        futures = [
            batcher.submit(rows_of(1, width=w), 1, Terms(priority=p)) for w, p in ((3, 0), (5, 1), (3, 0))
        ]
        device.release()
        await asyncio.gather(*futures)
    assert engine.batches == [[(1, 5)], [(1, 3), (1, 3)]]


@async_test
async def test_of_a_full_queue_of_mixed_shapes_urgent_requests_are_let_in_and_go_first() -> None:
    engine, order, random = Fake(), [], Random(SEED)
    async with serving(engine, spec(rows=2, width=-1, queue=24), Clock(0)) as (batcher, device):
        device.hold()

        def send(width: int, terms: Terms) -> None:
            future = batcher.submit(rows_of(0, width=width), 1, terms)
            future.add_done_callback(lambda _: order.append(terms.priority))

        for _ in range(24):
            send(random.randint(1, 6), Terms(priority=random.choice((0, 2))))
        with pytest.raises(Overloaded):
            send(1, Terms())
        for _ in range(24):
            send(random.randint(1, 9), URGENT)
        with pytest.raises(Overloaded):
            send(1, URGENT)
        device.release()
        await batcher.drain()
    await asyncio.sleep(0)
    last = max(place for place, level in enumerate(order) if level == 1)
    beside = sum(level != 1 for level in order[:last])
    assert len(order) == 48 and beside <= 9, "one ordinary request fills up the last batch of each shape"


@async_test
async def test_of_urgent_requests_with_many_rows_as_many_wait_as_of_ordinary_ones() -> None:
    async with serving(Fake(), spec(rows=4, queue=3), Clock(0)) as (batcher, device):
        device.hold()
        for _ in range(3):
            batcher.submit(rows_of(*range(4)), 4, URGENT)
        with pytest.raises(Overloaded, match="3 requests waiting"):
            batcher.submit(rows_of(0), 1, URGENT)
        device.release()
        await batcher.drain()


@async_test
async def test_an_urgent_request_is_let_in_by_the_wait_of_urgent_ones() -> None:
    engine = slow(clock := Clock(0), 50_000_000)
    async with serving(engine, spec(rows=1, max_queue_ms=100), clock) as (batcher, device):
        await batcher.submit(rows_of(0), 1)
        device.hold()
        ordinary = [batcher.submit(rows_of(i), 1) for i in range(3)]
        with pytest.raises(Overloaded, match="max_queue_ms is 100"):
            batcher.submit(rows_of(9), 1)
        urgent = [batcher.submit(rows_of(i), 1, URGENT) for i in range(3)]
        with pytest.raises(Overloaded):
            batcher.submit(rows_of(9), 1, URGENT)
        device.release()
        await asyncio.gather(*ordinary, *urgent)


# Deterministic


@async_test
async def test_a_deterministic_request_has_a_batch_of_its_own() -> None:
    engine = Fake()
    async with serving(engine, spec(buckets=())) as (batcher, device):
        device.hold()
        alone = Terms(deterministic=True)
        futures = [
            batcher.submit(rows_of(*[1.0] * n), n, terms)
            for n, terms in ((1, Terms()), (2, alone), (3, Terms()), (4, Terms()), (5, alone), (6, alone))
        ]
        device.release()
        answers = await asyncio.gather(*futures)
    assert [answer.outputs[0].shape[0] for answer in answers] == [1, 2, 3, 4, 5, 6]
    assert [answer.batch_rows for answer in answers] == [1, 2, 7, 7, 5, 6]
    assert len(engine.batches) == 5


@async_test
async def test_a_deterministic_request_waits_for_nobody() -> None:
    async with serving(Fake(), spec(delay_us=3_600_000_000), Clock(0)) as (batcher, _):
        assert (await batcher.submit(rows_of(1), 1, Terms(deterministic=True))).outputs[0].item() == 1
