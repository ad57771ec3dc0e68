"""The parts of the batcher's tests: a fake engine, a batcher on a device of its own.

Every interleaving is made by hooks (hold, release, gates), none by sleeping.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import numpy as np
from halfeven.models.engines.engine import Engine
from halfeven.models.spec.spec import Batching, ModelSpec, TensorSpec
from halfeven.serve.batching.batcher import Batcher
from halfeven.serve.batching.device import Bell, DeviceThread
from halfeven.serve.batching.interface import Answer, PreparedVersion

from tests.patience import PATIENCE_S
from tests.serve.clock import Clock
from tests.specs import tensor as tensor_of

POISON = -1.0
Future = asyncio.Future[Answer]


def _opened() -> threading.Event:
    gate = threading.Event()
    gate.set()
    return gate


@dataclass(eq=False)
class Fake(Engine):
    """y = factor · x, first column; raises on poison; remembers its batches; may wait for a gate."""

    factor: float = 1.0
    form: str = "torch"
    precision: str = "fp16"
    device: str = "cpu"
    batches: list[list[tuple[int, ...]]] = field(default_factory=list)
    closed: bool = False
    gate: threading.Event = field(default_factory=_opened)
    entered: Callable[[], object] = lambda: None

    def run(self, parts: Any) -> list[np.ndarray]:
        assert not self.closed, "run after close"
        self.batches.append([part.shape for part in parts[0]])
        self.entered()
        assert self.gate.wait(PATIENCE_S)
        joined = np.concatenate(parts[0])
        if (joined == POISON).any():
            raise ValueError("poison")
        return [joined[:, :1] * np.float32(self.factor)]

    def close(self) -> None:
        self.closed = True


@contextmanager
def timers_by_hand() -> Iterator[Callable[[], None]]:
    """Timers that the running loop is asked for inside ring when what is yielded is called, not by the clock."""
    loop, timers = asyncio.get_running_loop(), []

    def by_hand(_: float, call: Callable[..., object], *given: object) -> asyncio.Handle:
        timers.append(lambda: call(*given))
        return loop.call_soon(lambda: None)

    def ring() -> None:
        for timer in timers:
            timer()

    setattr(loop, "call_later", by_hand)  # noqa: B010
    try:
        yield ring
    finally:
        del loop.call_later


def tensor(name: str, *shape: int) -> TensorSpec:
    return tensor_of(name, "FP32", *shape)


def spec(rows: int = 64, width: int = 4, queue: int = 1024, delay_us: int = 0, **batching: Any) -> ModelSpec:
    """``batching``: further keys of ``[batching]``."""
    return ModelSpec(
        "toy",
        (tensor("x", -1, width),),
        (tensor("y", -1, 1),),
        rows,
        batching=Batching(delay_us, queue, **batching),
    )


TOY = spec()


def prepared(engine: Any, version: str = "1") -> PreparedVersion:
    return PreparedVersion(version, f"sha-{version}", "fp16", engine)


def rows_of(*values: float, width: int = 4) -> list[np.ndarray]:
    return [np.repeat(np.array(values, np.float32)[:, None], width, axis=1)]


def async_test(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    @wraps(test)
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 60))

    return run


@asynccontextmanager
async def serving(
    engine: Any, spec: ModelSpec = TOY, clock: Callable[[], int] = time.monotonic_ns
) -> AsyncIterator[tuple[Batcher, DeviceThread]]:
    device = DeviceThread(clock=clock)
    device._bell = CountingBell()
    device.start()
    batcher = Batcher(spec, device, prepared(engine))
    try:
        yield batcher, device
    finally:
        device.release()
        await batcher.drain()
        assert await asyncio.to_thread(device.stop, 30)


async def together(
    batcher: Batcher, device: DeviceThread, *inputs: list[np.ndarray], return_exceptions: bool = False
) -> list[Any]:
    """The answers to requests that wait together before the device takes the first."""
    device.hold()
    futures = [batcher.submit(arrays, len(arrays[0])) for arrays in inputs]
    device.release()
    return await asyncio.gather(*futures, return_exceptions=return_exceptions)


async def looked(device: DeviceThread) -> None:
    """Return after the device thread has looked at its queues at least once."""
    for _ in range(2):  # the first call's round ends with a look, before the second call is run
        await asyncio.wrap_future(device.call(lambda: None))


class CountingBell(Bell):
    """A bell that tells a sleeping thread from a rung one that has not got up yet. The test's own thread rings it."""

    def __init__(self) -> None:
        super().__init__()
        self.rung = self.heard = self.slept = self.got_up = 0

    def ring(self) -> None:
        try:
            self._silent.release()
        except RuntimeError:  # not heard yet: it is heard once
            return
        self.rung += 1

    def wait(self, timeout_ns: int | None = None) -> bool:
        self.slept += 1
        rung = super().wait(timeout_ns)
        self.heard += rung
        self.got_up += 1
        return rung

    @property
    def nobody_is_up(self) -> bool:
        return self.rung == self.heard and self.slept == self.got_up + 1


async def asleep(device: DeviceThread) -> None:
    """Return when the device thread has nothing to do and sleeps, to be woken by nothing that was done before."""
    assert isinstance(device._bell, CountingBell)
    await looked(device)
    while not device._bell.nobody_is_up:
        await asyncio.sleep(0)


def slow(clock: Clock[int], ns: int) -> Fake:
    """An engine whose every batch takes so long by the clock."""
    return Fake(entered=lambda: setattr(clock, "now", clock.now + ns))


def gated() -> tuple[Fake, asyncio.Event]:
    """An engine that waits inside its run, and the event that says it is there."""
    loop, inside = asyncio.get_running_loop(), asyncio.Event()
    return Fake(gate=threading.Event(), entered=lambda: loop.call_soon_threadsafe(inside.set)), inside
