"""Engines that take the next batch while one is computing."""

import asyncio
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from halfeven.models.errors import EngineFailed
from halfeven.serve.batching.batcher import Batcher
from halfeven.serve.batching.device import BACKGROUND_EVERY_NS, DeviceThread

from tests.patience import PATIENCE_S
from tests.serve.batching.stage import (
    POISON,
    CountingBell,
    Fake,
    async_test,
    looked,
    prepared,
    rows_of,
    serving,
    spec,
    together,
)
from tests.serve.clock import Clock


@dataclass(eq=False)
class _Launched:
    engine: "Ahead"
    parts: Any

    def wait(self) -> list[np.ndarray]:
        self.engine.events.append(f"wait {len(self.parts[0])}")
        self.engine.waiting.set()
        assert self.engine.done.wait(PATIENCE_S)
        self.engine.computing -= 1
        return Fake.run(self.engine, self.parts)


@dataclass(eq=False)
class Ahead(Fake):
    """An engine that launches at once; nothing ends before ``done``. Batches are listed by their number of requests."""

    in_flight: int = 2
    computing: int = 0
    events: list[str] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)
    waiting: threading.Event = field(default_factory=threading.Event)

    def launch(self, parts: Any) -> _Launched:
        self.events.append(f"launch {len(parts[0])}")
        self.computing += 1
        assert self.computing <= self.in_flight
        return _Launched(self, parts)

    def run(self, parts: Any) -> list[np.ndarray]:
        self.events.append(f"run {len(parts[0])}")
        return super().run(parts)


@dataclass(eq=False)
class _LaunchedInBackground(_Launched):
    def synchronize(self) -> None:
        self.engine.waiting.set()
        assert self.engine.done.wait(PATIENCE_S)

    def wait(self) -> list[np.ndarray]:
        if not self.engine.done.is_set():
            self.engine.events.append("the device thread blocks")
        return super().wait()


class InBackground(Ahead):
    """An engine whose batches can be waited for on another thread."""

    def launch(self, parts: Any) -> _Launched:
        return _LaunchedInBackground(self, super().launch(parts).parts)


class Slotted(InBackground):
    """An engine that refuses a batch above those that it takes ahead."""

    def launch(self, parts: Any) -> _Launched:
        if self.computing == self.in_flight:
            self.events.append("no slot")
            raise RuntimeError("2 batches are on their way")
        return super().launch(parts)


@async_test
async def test_the_next_full_batch_is_launched_before_the_first_is_waited_for() -> None:
    engine = Ahead()
    engine.done.set()
    async with serving(engine, spec(rows=2)) as (batcher, device):
        answers = await together(batcher, device, *(rows_of(i) for i in range(7)))
    assert [answer.outputs[0].item() for answer in answers] == list(range(7))
    assert engine.events == [
        "launch 2", "launch 2", "wait 2", "launch 2", "wait 2", "wait 2", "launch 1", "wait 1",
    ]  # fmt: skip


@async_test
async def test_a_batch_that_could_still_fill_is_not_launched_ahead() -> None:
    engine = Ahead()
    async with serving(engine, spec(rows=4)) as (batcher, _):
        first = batcher.submit(rows_of(0), 1)
        await asyncio.to_thread(engine.waiting.wait, 30)
        others = [batcher.submit(rows_of(i), 1) for i in (1, 2)]
        engine.done.set()
        await asyncio.gather(first, *others)
    assert engine.events == ["launch 1", "wait 1", "launch 2", "wait 2"]


@async_test
async def test_a_launched_batch_that_fails_is_tried_in_halves_and_the_one_behind_it_is_not_touched() -> None:
    engine = Ahead()
    engine.done.set()
    async with serving(engine, spec(rows=4)) as (batcher, device):
        inputs = [rows_of(value) for value in (0, POISON, 2, 3, 4, 5, 6, 7)]
        got = await together(batcher, device, *inputs, return_exceptions=True)
    assert isinstance(got[1], EngineFailed)
    assert [a.outputs[0].item() for a in got if not isinstance(a, BaseException)] == [0, 2, 3, 4, 5, 6, 7]
    assert engine.events[:3] == ["launch 4", "launch 4", "wait 4"] and engine.events[-1] == "wait 4"


@async_test
async def test_an_engine_that_cannot_even_launch_fails_its_callers_and_nobody_else() -> None:
    class Refusing(Ahead):
        def launch(self, parts: Any) -> _Launched:
            if any((part == POISON).any() for part in parts[0]):
                raise RuntimeError("no stream left")
            return super().launch(parts)

        def run(self, parts: Any) -> list[np.ndarray]:
            if any((part == POISON).any() for part in parts[0]):
                raise RuntimeError("no stream left")
            return super().run(parts)

    engine = Refusing()
    engine.done.set()
    async with serving(engine, spec(rows=2)) as (batcher, device):
        inputs = [rows_of(value) for value in (0, 1, POISON, 3, 4)]
        got = await together(batcher, device, *inputs, return_exceptions=True)
    assert isinstance(got[2], EngineFailed) and "no stream left" in str(got[2])
    assert [a.outputs[0].item() for a in got if not isinstance(a, BaseException)] == [0, 1, 3, 4]


@async_test
async def test_a_batch_that_fills_while_another_computes_is_launched_beside_it() -> None:
    engine = InBackground()
    async with serving(engine, spec(rows=2)) as (batcher, device):
        futures = [batcher.submit(rows_of(i), 1) for i in range(2)]
        assert await asyncio.to_thread(engine.waiting.wait, 30)
        futures += [batcher.submit(rows_of(i), 1) for i in range(2, 4)]
        await _rung(device)
        assert engine.events == ["launch 2", "launch 2"]
        futures += [batcher.submit(rows_of(i), 1) for i in range(4, 6)]
        await _rung(device)  # no slot is free
        assert engine.events == ["launch 2", "launch 2"]
        engine.done.set()
        answers = await asyncio.gather(*futures)
    assert [answer.outputs[0].item() for answer in answers] == list(range(6))
    assert "the device thread blocks" not in engine.events


@async_test
async def test_another_models_batch_is_begun_while_one_computes_in_the_background_and_a_shadows_is_not() -> (
    None
):
    engine, ran = InBackground(), []
    async with serving(engine, spec(rows=2), Clock(0)) as (batcher, device):
        future = batcher.submit(rows_of(0), 1)
        assert await asyncio.to_thread(engine.waiting.wait, 30)
        device.attach(_Other(lambda: ran.append("shadow")), background=True)
        await _rung(device)
        assert ran == []
        device.attach(_Other(lambda: ran.append("other")))
        await _rung(device)
        assert ran == ["other"] and engine.events == ["launch 1"]
        engine.done.set()
        await future
        await looked(device)
    assert ran == ["other", "shadow"]


@pytest.mark.parametrize("first", ["a shadow's", "its own"])
def test_a_shadow_takes_no_slot_that_the_engines_own_queue_needs(first: str) -> None:
    async def scene() -> None:
        engine, clock = Slotted(), Clock(0)
        async with serving(engine, spec(rows=1), clock) as (batcher, device):
            shadow = Batcher(spec(rows=1), device, prepared(engine), background=True)
            device.hold()
            futures = [shadow.submit(rows_of(9), 1)] if first == "a shadow's" else []
            await looked(device)
            clock.now += 2 * BACKGROUND_EVERY_NS
            futures += [batcher.submit(rows_of(i), 1) for i in range(2)]
            await looked(device)
            device.release()
            if first == "its own":
                while engine.computing < 2:
                    await asyncio.sleep(0)
                futures.append(shadow.submit(rows_of(9), 1))
                clock.now += 2 * BACKGROUND_EVERY_NS
                await asyncio.sleep(0)
                device.ring()
            while not {"no slot", "the device thread blocks"} & {*engine.events}:
                await asyncio.sleep(0)
            engine.done.set()
            answers = await asyncio.gather(*futures)
            await shadow.drain()
        assert sorted(answer.outputs[0].item() for answer in answers) == [0, 1, 9]

    asyncio.run(scene())


@async_test
async def test_an_error_that_the_waiting_thread_meets_is_answered_and_the_next_batch_is_waited_for() -> None:
    class Failing(InBackground):
        def launch(self, parts: Any) -> _Launched:
            launched = super().launch(parts)
            if any((part == POISON).any() for part in parts[0]):
                launched.synchronize = lambda: 1 // 0  # type: ignore[attr-defined]
            return launched

    engine = Failing()
    engine.done.set()
    async with serving(engine, spec(rows=1)) as (batcher, _):
        with pytest.raises(EngineFailed):
            await batcher.submit(rows_of(POISON), 1)
        assert (await batcher.submit(rows_of(3), 1)).outputs[0].item() == 3


async def _rung(device: DeviceThread) -> None:
    """Hand everything over, ring, and return when the device thread sleeps again; nothing under way is waited for."""
    bell = device._bell
    assert isinstance(bell, CountingBell)
    for _ in range(3):
        await asyncio.sleep(0)
    device.ring()
    while not bell.nobody_is_up:
        await asyncio.sleep(0)


@pytest.mark.parametrize("engine_type", [Ahead, InBackground])
@pytest.mark.parametrize("how", ["swap", "call", "drain"])
def test_whatever_else_uses_the_device_waits_for_what_is_in_flight(
    how: str, engine_type: type[Ahead]
) -> None:
    async def scene() -> None:
        engine, computing = engine_type(), []
        async with serving(engine, spec(rows=2)) as (batcher, device):
            device.hold()
            futures = [batcher.submit(rows_of(i), 1) for i in range(4)]
            await looked(device)
            device.release()
            await asyncio.to_thread(engine.waiting.wait, 30)  # two are in flight
            assert engine.computing == 2
            if how == "swap":
                device.call(lambda: (batcher.swap(prepared(Fake(), "2")), computing.append(engine.computing)))
            elif how == "call":
                device.call(lambda: computing.append(engine.computing))
            engine.done.set()
            answers = await asyncio.gather(*futures)
            if how == "drain":
                await batcher.drain()
                computing.append(engine.computing)
            await looked(device)
            assert computing == [0]
            assert [(a.outputs[0].item(), a.prepared.version) for a in answers] == [
                (i, "1") for i in range(4)
            ]

    asyncio.run(scene())


@async_test
async def test_another_models_batch_waits_for_one_that_nobody_else_can_wait_for() -> None:
    engine, computing = Ahead(), []
    async with serving(engine, spec(rows=2)) as (batcher, device):
        futures = [batcher.submit(rows_of(i), 1) for i in range(2)]
        assert await asyncio.to_thread(engine.waiting.wait, 30)
        device.attach(_Other(lambda: computing.append(engine.computing)))
        device.ring()
        engine.done.set()
        await asyncio.gather(*futures)
        await looked(device)
    assert computing == [0]


class _Other:
    """Another model with one batch that is older than all of the first's."""

    def __init__(self, run: Any) -> None:
        self.run, self.queued, self.computing = run, 1, False

    def due_ns(self) -> int | None:
        return 0 if self.queued else None

    def step(self) -> None:
        self.queued = 0
        self.run()

    def land(self) -> bool:
        return False

    def refuse(self) -> None: ...


@async_test
async def test_held_the_device_begins_nothing_and_still_ends_what_is_in_flight() -> None:
    engine = Ahead()
    async with serving(engine, spec(rows=2)) as (batcher, device):
        device.hold()
        futures = [batcher.submit(rows_of(i), 1) for i in range(4)]
        await looked(device)
        device.release()
        await asyncio.to_thread(engine.waiting.wait, 30)
        device.hold()
        last = batcher.submit(rows_of(4), 1)
        engine.done.set()
        await asyncio.gather(*futures)
        await looked(device)
        assert not last.done()
        device.release()
        await last
