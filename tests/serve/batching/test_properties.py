"""The promises of the batcher, all at once: whatever the mates, whoever leaves, whatever becomes active in between.

Each accepted request gets its own right answer exactly once, or its own error, or its caller has gone.
"""

import asyncio
import os
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from halfeven.models.errors import EngineFailed, NotReady, Overloaded, TimedOut
from halfeven.models.spec.spec import ModelSpec
from halfeven.serve.batching.batcher import Batcher
from halfeven.serve.batching.device import DeviceThread
from halfeven.serve.batching.interface import PreparedVersion, Terms
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serve.batching.stage import POISON, Fake, Future, looked, serving, spec, tensor

# Rows go beyond a batch (the limit is 4 to 9), so that some are split; a timeout of a nanosecond fires in the
# loop's next round where the device has not begun by then.
SUBMIT = st.tuples(
    st.sampled_from(["submit", "submit", "submit", "poison"]),
    st.one_of(st.integers(1, 4), st.integers(1, 30)),
    st.integers(1, 3),
    st.sampled_from([0, 0, 1, 2]),
    st.sampled_from([0, 0, 0, 1, 3_600_000_000_000]),
    st.sampled_from([False, False, False, True]),
)
STEPS = st.lists(
    st.one_of(
        SUBMIT,
        SUBMIT,
        st.tuples(st.just("cancel"), st.integers(0, 99)),
        st.tuples(st.just("swap"), st.booleans(), st.integers(0, 5)),
        st.tuples(st.sampled_from(["hold", "release", "look", "round"])),
    ),
    max_size=40,
)


class Launching(Fake):
    """An engine that computes when it is waited for; never more than two batches at a time."""

    in_flight = 2
    computing = 0

    def launch(self, parts: Any) -> Any:
        self.computing += 1
        assert self.computing <= 2, "three in flight"

        def wait() -> list[np.ndarray]:
            self.computing -= 1
            return self.run(parts)

        return SimpleNamespace(wait=wait)


def toy(limit: int, signature: int, queue: int) -> ModelSpec:
    """``signature`` differs in the output's name alone, so that every input fits all of them."""
    base = spec(rows=limit, width=-1, queue=queue, max_queue_bytes=4000, max_batch_bytes=40)
    return ModelSpec("toy", base.inputs, (tensor(f"y{signature}", -1, 1),), limit, batching=base.batching)


@dataclass
class Play:
    """One run of the steps, with everything that was sent and everybody which version was active."""

    batcher: Batcher
    device: DeviceThread
    kind: type[Fake]
    limit: int
    queue: int
    engines: list[Fake]
    signature: int = 0
    sent: list[tuple[Future, np.ndarray]] = field(default_factory=list)
    answered: Counter[Future] = field(default_factory=Counter)

    def submit(self, poisoned: bool, rows: int, width: int, terms: Terms) -> None:
        values = np.arange(rows, dtype=np.float32) + 100 * (len(self.sent) + 1)
        if poisoned:
            values[rows // 2] = POISON
        x = np.repeat(values[:, None], width, axis=1)
        try:
            future = self.batcher.submit([x], len(x), terms)
        except Overloaded:
            return
        future.add_done_callback(lambda done: self.answered.update([done]))
        self.sent.append((future, x))

    def swap(self, new_signature: bool, useful_rows: int) -> None:
        self.signature += new_signature
        engine = self.kind(factor=len(self.engines) + 1.0)
        self.engines.append(engine)
        version = str(len(self.engines))
        new = PreparedVersion(version, f"sha-{version}", "fp16", engine, useful_rows=useful_rows)
        its_spec = toy(self.limit, self.signature, self.queue) if new_signature else None
        self.device.call(lambda: self.batcher.swap(new, its_spec).engine.close())

    async def step(self, name: str, *details: Any) -> None:
        if name in ("submit", "poison"):
            rows, width, priority, timeout_ns, deterministic = details
            self.submit(name == "poison", rows, width, Terms(priority, timeout_ns, deterministic))
        elif name == "cancel" and self.sent:
            self.sent[details[0] % len(self.sent)][0].cancel()
        elif name == "swap":
            self.swap(*details)
        elif name == "look":
            await looked(self.device)
        elif name == "round":
            await asyncio.sleep(0)
        elif name in ("hold", "release"):
            getattr(self.device, name)()

    def judge(self) -> None:
        assert self.answered == Counter(future for future, _ in self.sent), "each exactly once"
        for future, x in self.sent:
            _judge(future, x, signatures=self.signature + 1)
        assert self.batcher.waiting == 0
        admission, queue = self.batcher._admission, self.batcher._queue
        assert (admission.rows, admission.bytes) == (queue.taken_rows, queue.taken_bytes)
        assert admission.urgent_rows == queue.taken_urgent_rows
        all_counters = self.batcher.all_counters()
        counted = sum(t.requests + t.failures + t.vanished + t.timed_out for t in all_counters)
        assert counted <= len(self.sent)
        assert self.signature or counted == len(self.sent)
        for engine in self.engines:
            for batch in engine.batches:
                assert len({shape[1:] for shape in batch}) == 1, "shapes are never mixed"
                assert sum(shape[0] for shape in batch) <= self.limit


def _judge(future: Future, x: np.ndarray, signatures: int) -> None:
    if future.cancelled():
        return
    error = future.exception()
    if isinstance(error, TimedOut) or (isinstance(error, NotReady) and signatures > 1):
        return
    if (x == POISON).any():
        assert isinstance(error, EngineFailed) and "poison" in str(error)
        return
    answer = future.result()
    np.testing.assert_array_equal(answer.outputs[0], x[:, :1] * np.float32(answer.prepared.version))


async def _play(steps: list[tuple[Any, ...]], limit: int, queue: int, kind: type[Fake]) -> None:
    first = kind(factor=1.0)
    async with serving(first, toy(limit, 0, queue)) as (batcher, device):
        play = Play(batcher, device, kind, limit, queue, [first])
        for step in steps:
            await play.step(*step)
        device.release()
        await batcher.drain()
        await asyncio.sleep(0)  # the done callbacks
        play.judge()


@pytest.mark.slow
@given(
    steps=STEPS,
    limit=st.integers(4, 9),
    queue=st.sampled_from([3, 1024]),
    kind=st.sampled_from([Fake, Launching]),
)
@settings(max_examples=400, deadline=None, derandomize="CI" in os.environ)
def test_every_accepted_request_is_answered_exactly_once_and_rightly(
    steps: list[tuple[Any, ...]], limit: int, queue: int, kind: type[Fake]
) -> None:
    asyncio.run(asyncio.wait_for(_play(steps, limit, queue, kind), 60))
