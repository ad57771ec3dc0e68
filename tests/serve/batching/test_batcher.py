"""The promises of the batcher to its callers. Every interleaving here is made by hooks, none by sleeping."""

import asyncio
from typing import Any

import numpy as np
import pytest
from halfeven.models.errors import BadRequest, EngineFailed, NotReady, Overloaded
from halfeven.models.spec.spec import ModelSpec
from halfeven.serve.batching.batcher import Batcher
from halfeven.serve.batching.device import DeviceThread
from halfeven.serve.batching.interface import Answer

from tests.patience import PATIENCE_S
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
    together,
)
from tests.serve.clock import Clock

# Answers


@async_test
async def test_what_waits_becomes_one_batch_and_the_answer_says_so() -> None:
    engine = slow(clock := Clock(0), 500)
    async with serving(engine, clock=clock) as (batcher, device):
        device.hold()
        futures = [batcher.submit(rows_of(i), 1) for i in range(5)]
        await looked(device)
        clock.now = 2000
        device.release()
        answers = await asyncio.gather(*futures)
        assert engine.batches == [[(1, 4)] * 5]
        assert {(a.batch_rows, a.queue_ns, a.compute_ns) for a in answers} == {(5, 2000, 500)}


@async_test
async def test_the_hand_over_happens_once_per_loop_iteration_and_the_way_back_once_per_batch() -> None:
    engine, rings, returns = Fake(), [], []
    async with serving(engine) as (batcher, device):
        loop = asyncio.get_running_loop()
        ring, back = device.ring, loop.call_soon_threadsafe
        device.ring = lambda: (rings.append(1), ring())[1]
        setattr(loop, "call_soon_threadsafe", lambda *a, **kw: (returns.append(1), back(*a, **kw))[1])  # noqa: B010
        await asyncio.gather(*(batcher.submit(rows_of(i), 1) for i in range(40)))
        del device.ring, loop.call_soon_threadsafe
    assert (len(rings), len(returns), len(engine.batches)) == (1, 1, 1)


@async_test
async def test_a_request_alone_in_its_batch_gets_the_outputs_as_the_engine_made_them() -> None:
    made: list[np.ndarray] = []

    class Keeping(Fake):
        def run(self, parts: Any) -> list[np.ndarray]:
            outputs = super().run(parts)
            made.extend(outputs)
            return outputs

    async with serving(Keeping()) as (batcher, _):
        answer = await batcher.submit(rows_of(1, 2), 2)
        assert answer.outputs[0] is made[0]


# Batches


@async_test
async def test_rows_are_counted_not_requests() -> None:
    engine = Fake()
    async with serving(engine, spec(rows=4)) as (batcher, device):
        await together(batcher, device, *(rows_of(*[1.0] * n) for n in (3, 1, 2, 3, 4, 1, 1)))
    assert [[shape[0] for shape in batch] for batch in engine.batches] == [[3, 1], [2], [3], [4], [1, 1]]


@async_test
async def test_requests_of_different_lengths_are_never_mixed_and_the_oldest_goes_first() -> None:
    engine = Fake()
    async with serving(engine, spec(width=-1)) as (batcher, device):
        await together(batcher, device, *(rows_of(1, width=w) for w in (7, 3, 7, 3, 5, 7)))
    assert [[shape[1] for shape in batch] for batch in engine.batches] == [[7, 7, 7], [3, 3], [5]]


@async_test
async def test_a_model_that_is_not_batched_runs_one_request_per_execution() -> None:
    original = ModelSpec("toy", (tensor("x", 2, 4),), (tensor("y", -1, 1),), max_batch_size=0)
    engine = Fake()
    async with serving(engine, original) as (batcher, _):
        answers = await asyncio.gather(*(batcher.submit(rows_of(i, i), 1) for i in range(3)))
    assert engine.batches == [[(2, 4)]] * 3
    assert [a.outputs[0].shape for a in answers] == [(2, 1)] * 3


@async_test
async def test_a_request_with_more_rows_than_one_may_have_is_refused_with_the_limit() -> None:
    async with serving(Fake(), spec(rows=4)) as (batcher, _):
        with pytest.raises(BadRequest, match="<= 64 for 'toy', got 65"):
            batcher.submit(rows_of(*[1.0] * 65), 65)
    async with serving(Fake(), spec(rows=4, max_request_rows=6)) as (batcher, _):
        assert (await batcher.submit(rows_of(*[1.0] * 6), 6)).outputs[0].shape == (6, 1)
        with pytest.raises(BadRequest, match="<= 6 for 'toy', got 7"):
            batcher.submit(rows_of(*[1.0] * 7), 7)


@async_test
async def test_with_a_delay_the_oldest_waits_so_long_and_no_longer() -> None:
    hour_us = 3_600_000_000
    clock, engine = Clock(0), Fake()
    async with serving(engine, spec(delay_us=hour_us), clock) as (batcher, device):
        first = batcher.submit(rows_of(1), 1)
        await looked(device)
        clock.now = hour_us * 1000 - 1
        second = batcher.submit(rows_of(2), 1)
        await looked(device)
        assert not first.done() and not engine.batches
        clock.now += 1
        device.ring()
        await asyncio.gather(first, second)
    assert engine.batches == [[(1, 4), (1, 4)]]


@async_test
async def test_with_a_delay_a_full_batch_does_not_wait() -> None:
    engine = Fake()
    async with serving(engine, spec(rows=3, delay_us=3_600_000_000)) as (batcher, _):
        await asyncio.gather(batcher.submit(rows_of(1, 2), 2), batcher.submit(rows_of(3), 1))
    assert engine.batches == [[(2, 4), (1, 4)]]


# Admission


@async_test
async def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    engine = slow(clock := Clock(0), 500_000_000)
    async with serving(engine, spec(queue=3), clock) as (batcher, device):
        await batcher.submit(rows_of(0), 1)  # from this it knows: half a second per batch
        device.hold()
        futures = [batcher.submit(rows_of(i), 1) for i in range(3)]
        with pytest.raises(Overloaded, match="already has 3 requests waiting") as refused:
            batcher.submit(rows_of(9), 1)
        assert refused.value.retry_after_s == pytest.approx(0.5)
        device.release()
        await asyncio.gather(*futures)
        again = batcher.submit(rows_of(4), 1)  # there is room again
        clock.now += 2_000_000  # the wait after a batch of several
        await again
        assert (batcher.waiting, batcher.all_counters()[0].rejected) == (0, 1)


@async_test
async def test_callers_who_were_answered_together_are_waited_for_briefly_and_a_lone_one_never() -> None:
    engine = slow(clock := Clock(0), 10_000_000)
    async with serving(engine, spec(), clock) as (batcher, device):
        await batcher.submit(rows_of(0), 1)
        # Nothing is waited for after a batch of one: the clock stands still.
        await batcher.submit(rows_of(0), 1)
        await together(batcher, device, *(rows_of(i) for i in range(3)))
        first = batcher.submit(rows_of(3), 1)
        await looked(device)
        assert not first.done(), "a batch of its own would make the others wait for it"
        await asyncio.gather(first, *(batcher.submit(rows_of(i), 1) for i in (4, 5)))
        assert engine.batches[-1] == [(1, 4)] * 3
        late = batcher.submit(rows_of(6), 1)
        clock.now += 400_000  # a twenty-fifth of what the batch took
        await late


@async_test
async def test_a_batcher_used_from_a_second_event_loop_says_so() -> None:
    async with serving(Fake()) as (batcher, _):
        await batcher.submit(rows_of(1), 1)

        async def elsewhere() -> None:
            batcher.submit(rows_of(1), 1)

        with pytest.raises(RuntimeError, match="two event loops"):
            await asyncio.to_thread(asyncio.run, elsewhere())


# Failures


@async_test
async def test_an_engine_that_exits_the_interpreter_fails_its_batch_and_nothing_else() -> None:
    class Leaving(Fake):
        def run(self, parts: Any) -> list[np.ndarray]:
            if any((part == POISON).any() for part in parts[0]):
                raise SystemExit(1)
            return super().run(parts)

    async with serving(Leaving()) as (batcher, device):
        mates = [batcher.submit(rows_of(value), 1) for value in (1, POISON, 3)]
        with pytest.raises(EngineFailed, match="SystemExit"):
            await mates[1]
        assert [(await mates[i]).outputs[0].item() for i in (0, 2)] == [1, 3]
        assert device.alive


@async_test
async def test_a_batch_that_could_not_even_be_joined_is_answered() -> None:
    async with serving(Fake()) as (batcher, device):
        good, bad = await together(batcher, device, rows_of(1), rows_of(2, width=9))
        assert good.outputs[0].item() == 1
        assert bad.outputs[0].item() == 2  # a mismatch inside a batch ends in runs of one


# Versions


@async_test
async def test_no_batch_mixes_versions_and_the_old_one_may_be_closed_at_once() -> None:
    old, inside = gated()
    new = Fake(factor=2.0)
    async with serving(old) as (batcher, device):
        before = [batcher.submit(rows_of(i), 1) for i in range(3)]
        await inside.wait()
        during = [batcher.submit(rows_of(i), 1) for i in range(3)]
        swap = device.call(lambda: batcher.swap(prepared(new, "2")))
        assert not swap.done()  # a batch of the old one is under way
        old.gate.set()
        (await asyncio.wrap_future(swap)).engine.close()
        after = [batcher.submit(rows_of(i), 1) for i in range(3)]
        answers = await asyncio.gather(*before, *during, *after)
    assert [a.prepared.version for a in answers] == ["1"] * 3 + ["2"] * 6
    assert [a.outputs[0].item() for a in answers] == [0, 1, 2, 0, 2, 4, 0, 2, 4]


@async_test
async def test_a_swap_off_the_device_thread_is_refused_with_the_way_to_do_it() -> None:
    async with serving(Fake()) as (batcher, _):
        with pytest.raises(RuntimeError, match=r"device\.call"):
            batcher.swap(prepared(Fake(), "2"))


@async_test
async def test_a_swap_that_lowers_the_limit_still_answers_the_large_request_that_waits() -> None:
    engine = Fake()
    async with serving(engine, spec(rows=8)) as (batcher, device):
        device.hold()
        futures = [batcher.submit(rows_of(*[1.0] * n), n) for n in (6, 2, 2)]
        await asyncio.wrap_future(device.call(lambda: batcher.swap(prepared(engine, "2"), spec(rows=4))))
        device.release()
        await asyncio.gather(*futures)
        with pytest.raises(BadRequest, match="<= 64"):
            batcher.submit(rows_of(*[1.0] * 65), 65)
    assert [[shape[0] for shape in batch] for batch in engine.batches] == [[6], [2, 2]]


@async_test
async def test_statistics_are_kept_by_version_and_go_on_after_a_rollback() -> None:
    async with serving(Fake()) as (batcher, device):
        await asyncio.gather(*(batcher.submit(rows_of(1, 2), 2) for _ in range(3)))
        first = await asyncio.wrap_future(device.call(lambda: batcher.swap(prepared(Fake(), "2"))))
        await batcher.submit(rows_of(1), 1)
        with pytest.raises(EngineFailed):
            await batcher.submit(rows_of(POISON), 1)
        await asyncio.wrap_future(device.call(lambda: batcher.swap(first)))
        await batcher.submit(rows_of(1), 1)
        one, two = batcher.all_counters()
    assert [(s.version, s.rows, s.executions) for s in (one, two)] == [("1", 7, 2), ("2", 1, 1)]
    assert [(s.requests, s.failures) for s in (one, two)] == [(4, 0), (1, 1)]
    assert {rows: n for rows, (n, _) in one.batches.items()} == {6: 1, 1: 1}
    assert one.last_inference_ms > 1_700_000_000_000


# Shutdown


@async_test
async def test_draining_refuses_new_work_and_finishes_what_waits() -> None:
    async with serving(Fake()) as (batcher, device):
        device.hold()
        futures = [batcher.submit(rows_of(i), 1) for i in range(5)]
        draining = asyncio.ensure_future(batcher.drain())
        await looked(device)
        assert not draining.done()
        with pytest.raises(NotReady, match="shutting down"):
            batcher.submit(rows_of(9), 1)
        device.release()
        await draining
        assert all(future.done() for future in futures)
        assert [future.result().outputs[0].item() for future in futures] == [0, 1, 2, 3, 4]


@async_test
async def test_draining_does_not_wait_for_callers_who_have_gone() -> None:
    async with serving(Fake()) as (batcher, device):
        device.hold()
        future = batcher.submit(rows_of(1), 1)
        future.cancel()
        await batcher.drain()
        assert batcher.waiting == 0


@async_test
async def test_stopping_the_device_finishes_what_waits() -> None:
    device = DeviceThread()
    device.start()
    device.hold()
    batcher = Batcher(spec(rows=2), device, prepared(Fake()))
    futures = [batcher.submit(rows_of(i), 1) for i in range(5)]
    await looked(device)
    assert await asyncio.to_thread(device.stop, 30)
    assert [(await future).outputs[0].item() for future in futures] == [0, 1, 2, 3, 4]
    with pytest.raises(NotReady):
        batcher.submit(rows_of(1), 1)
    await batcher.drain()


@async_test
async def test_a_request_accepted_but_not_handed_over_when_the_device_stops_is_answered() -> None:
    device = DeviceThread()
    device.start()
    batcher = Batcher(spec(), device, prepared(Fake()))
    future = batcher.submit(rows_of(1), 1)
    assert device.stop(30)  # on the loop, so the flush has had no chance
    with pytest.raises(NotReady):
        await future


def test_answers_to_a_closed_loop_do_not_hurt_the_device(caplog: pytest.LogCaptureFixture) -> None:
    device = DeviceThread()
    device.start()
    device.hold()
    batcher = Batcher(spec(), device, prepared(Fake()))

    async def leave() -> None:
        batcher.submit(rows_of(1), 1)
        await looked(device)

    async def come() -> Answer:
        return await batcher.submit(rows_of(5), 1)

    asyncio.run(leave())
    device.release()
    device.call(lambda: None).result(PATIENCE_S)
    device.call(lambda: None).result(PATIENCE_S)
    assert asyncio.run(come()).outputs[0].item() == 5
    assert device.stop(30)
    assert "mistake of ours" not in caplog.text
