"""A batch that takes less time than to wake a thread runs where it was handed over, and never beside another."""

import asyncio
import threading
from typing import Any

from halfeven.models.errors import EngineFailed
from halfeven.serve.batching.batcher import Batcher
from halfeven.serve.batching.device import DeviceThread

from tests.patience import PATIENCE_S
from tests.serve.batching.brief import Brief, here
from tests.serve.batching.stage import (
    POISON,
    Fake,
    asleep,
    async_test,
    looked,
    prepared,
    rows_of,
    serving,
    spec,
)
from tests.serve.clock import Clock


@async_test
async def test_a_brief_batch_runs_on_the_event_loop_while_the_device_sleeps() -> None:
    engine = Brief(factor=3.0)
    async with serving(engine, clock=Clock(0)) as (batcher, device):
        await asleep(device)
        answers = await asyncio.gather(*[batcher.submit(rows_of(value), 1) for value in (1.0, 2.0)])
        assert [float(answer.outputs[0][0, 0]) for answer in answers] == [3.0, 6.0]
        assert engine.batches == [[(1, 4), (1, 4)]], "what one round of the loop brought is one batch"
        assert engine.threads == [here()]
        assert batcher.waiting == 0 and batcher.all_counters()[0].requests == 2


@async_test
async def test_who_asks_alone_again_has_his_answer_at_once_and_company_is_batched_again() -> None:
    engine = Brief(factor=3.0)
    async with serving(engine, clock=Clock(0)) as (batcher, device):
        await asleep(device)
        first = batcher.submit(rows_of(1.0), 1)
        assert not first.done(), "others of this round of the loop may come"
        await first
        await asyncio.sleep(0)
        second = batcher.submit(rows_of(2.0), 1)
        assert second.done() and float(second.result().outputs[0][0, 0]) == 6.0
        others = [batcher.submit(rows_of(value), 1) for value in (3.0, 4.0, 5.0)]
        assert not any(future.done() for future in others), "in the same round: a batch"
        await asyncio.gather(*others)
        again = [batcher.submit(rows_of(value), 1) for value in (6.0, 7.0)]
        assert not any(future.done() for future in again)
        await asyncio.gather(*again)
        one, four = (1, 4), [(1, 4)]
        assert engine.batches == [four, four, [one] * 3, [one] * 2]
        assert set(engine.threads) == {here()}


class Calls:
    """A stand-in for `BriefPolling` that records the calls of the batcher."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def asked(self, now_ns: int) -> None:
        self.made.append("asked")

    def answered(self, loop: asyncio.AbstractEventLoop) -> None:
        self.made.append("answered")


@async_test
async def test_the_loop_lingers_after_a_lone_answer_and_after_no_other() -> None:
    async with serving(Brief(), clock=Clock(0)) as (batcher, device):
        batcher._brief_polling = calls = Calls()  # type: ignore[assignment]
        await asleep(device)
        await asyncio.gather(*[batcher.submit(rows_of(value), 1) for value in (1.0, 2.0)])
        await batcher.submit(rows_of(3.0), 1)
        assert calls.made == []
        await asyncio.sleep(0)
        assert batcher.submit(rows_of(4.0), 1).done()
        assert calls.made == ["asked", "answered"]


@async_test
async def test_an_engine_that_is_not_brief_runs_on_the_device_thread() -> None:
    engine = Brief(brief=False)
    async with serving(engine) as (batcher, device):
        await looked(device)
        await batcher.submit(rows_of(1.0), 1)
        assert here() not in engine.threads


@async_test
async def test_while_the_device_computes_a_brief_batch_waits_for_it() -> None:
    slow, brief = Fake(gate=threading.Event()), Brief()
    entered = threading.Event()
    slow.entered = entered.set
    async with serving(slow) as (batcher, device):
        other = Batcher(spec(), device, prepared(brief))
        first = batcher.submit(rows_of(1.0), 1)
        assert await asyncio.to_thread(entered.wait, 30)
        second = other.submit(rows_of(2.0), 1)
        await asyncio.sleep(0)  # handed over
        assert not second.done() and brief.threads == []
        slow.gate.set()
        await asyncio.gather(first, second)
        assert here() not in brief.threads
        await other.drain()


@async_test
async def test_a_call_that_waits_for_the_device_goes_before_a_brief_batch() -> None:
    engine = Brief()
    device = DeviceThread()  # not started: nobody takes the call
    batcher = Batcher(spec(), device, prepared(engine))
    device.call(lambda: None)
    future = batcher.submit(rows_of(1.0), 1)
    await asyncio.sleep(0)
    assert not future.done() and engine.threads == []
    device.start()
    await future
    assert here() not in engine.threads
    await batcher.drain()
    assert await asyncio.to_thread(device.stop, 30)


@async_test
async def test_a_held_device_holds_brief_batches_too() -> None:
    engine = Brief()
    async with serving(engine) as (batcher, device):
        await looked(device)
        device.hold()
        future = batcher.submit(rows_of(1.0), 1)
        await looked(device)
        assert not future.done()
        device.release()
        await future


@async_test
async def test_after_a_batch_that_took_long_the_next_go_to_the_device_thread() -> None:
    clock = Clock(0)
    engine = Brief(clock=clock, costs_ns=3_000_000)
    async with serving(engine, clock=clock) as (batcher, device):
        await asleep(device)
        for _ in range(3):
            await batcher.submit(rows_of(1.0), 1)
        assert [thread == here() for thread in engine.threads] == [True, False, False]


@async_test
async def test_what_runs_in_the_background_never_runs_on_the_event_loop() -> None:
    engine = Brief()
    async with serving(Fake()) as (_, device):
        background = Batcher(spec(), device, prepared(engine), background=True)
        await looked(device)
        await background.submit(rows_of(1.0), 1)
        assert here() not in engine.threads
        await background.drain()


@async_test
async def test_a_poisonous_request_fails_alone_here_too() -> None:
    engine = Brief()
    async with serving(engine, clock=Clock(0)) as (batcher, device):
        await asleep(device)
        found = await asyncio.gather(
            *[batcher.submit(rows_of(value), 1) for value in (1.0, POISON, 2.0)], return_exceptions=True
        )
        assert isinstance(found[1], EngineFailed)
        assert [float(found[i].outputs[0][0, 0]) for i in (0, 2)] == [1.0, 2.0]  # pyright: ignore
        assert set(engine.threads) == {here()}


@async_test
async def test_draining_answers_what_was_just_accepted() -> None:
    engine = Brief()
    async with serving(engine) as (batcher, device):
        await looked(device)
        futures = [batcher.submit(rows_of(float(value)), 1) for value in range(3)]
        await batcher.drain()
        assert [float(future.result().outputs[0][0, 0]) for future in futures] == [0.0, 1.0, 2.0]


@async_test
async def test_what_the_device_thread_ends_just_then_is_answered_on_the_event_loop() -> None:
    inside, answered = threading.Event(), threading.Event()
    engine = Brief(gate=threading.Event(), entered=inside.set)
    async with serving(engine, clock=Clock(0)) as (batcher, device):
        await asleep(device)
        batcher._long_ago = 1  # the first goes to the device thread
        first = batcher.submit(rows_of(1.0), 1)
        await asyncio.sleep(0)
        assert await asyncio.to_thread(inside.wait, 30)
        answer, run_here = batcher._scheduler._answer, device.run_here
        found: list[bool] = []

        def answering(outcomes: Any) -> None:
            answer(outcomes)
            answered.set()

        def running_here(one: Any) -> bool:
            """The first batch ends between the decision to run here and the device's refusal."""
            engine.gate.set()
            assert answered.wait(PATIENCE_S)
            found.append(first.done())
            return run_here(one)

        batcher._scheduler._answer = answering
        device.run_here = running_here  # type: ignore[method-assign]
        second = batcher.submit(rows_of(2.0), 1)
        await asyncio.gather(first, second)
        assert found[0] is False, "a future is set on its event loop alone"
