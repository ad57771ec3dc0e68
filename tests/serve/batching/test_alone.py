"""One brief request that nobody is before is answered past the queue, and nobody can tell but by the time it takes."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from halfeven.models.errors import EngineFailed
from halfeven.models.spec.spec import ModelSpec
from halfeven.serve.batching.batcher import Batcher
from halfeven.serve.batching.device import DeviceThread
from halfeven.serve.batching.request_queue import Request, RequestQueue
from halfeven.serve.http.codecs.metadata import model_statistics

from tests.serve.batching.brief import Brief, here
from tests.serve.batching.stage import POISON, TOY, asleep, async_test, rows_of, serving, spec
from tests.serve.clock import Clock


@asynccontextmanager
async def lonely(
    engine: Brief, spec: ModelSpec = TOY, clock: Callable[[], int] | None = None
) -> AsyncIterator[tuple[Batcher, DeviceThread, list[bool]]]:
    """A batcher whose last request was alone, and whether each since was answered past the queue.

    On a clock that stands still: a machine that is busy makes no batch a long one.
    """
    async with serving(engine, spec, clock or Clock(0)) as (batcher, device):
        await asleep(device)
        await batcher.submit(rows_of(1.0), 1)
        await asleep(device)
        past: list[bool] = []
        short = batcher._answer_here

        def noted(spec: ModelSpec, request: Request) -> bool:
            past.append(short(spec, request))
            return past[-1]

        batcher._answer_here = noted  # type: ignore[method-assign]
        yield batcher, device, past


async def counted(values: np.ndarray, past_the_queue: bool) -> list[Any]:
    """The answers and the counters for requests of one to three rows that are sent one after the other."""
    clock = Clock(0)
    engine = Brief(factor=3.0, clock=clock, costs_ns=40_000)
    async with lonely(engine, clock=clock) as (batcher, _, past):
        if not past_the_queue:
            batcher._answer_here = lambda spec, request: False  # type: ignore[method-assign]
        seen: list[Any] = []
        for index, value in enumerate(values):
            clock.now += 100_000
            rows = index % 3 + 1
            future = batcher.submit(rows_of(*[value] * rows), rows)
            assert future.done() and batcher.waiting == 0
            answer = future.result()
            times = answer.queue_ns, answer.compute_ns, answer.batch_rows, answer.rescued
            seen.append((answer.outputs[0].tolist(), answer.prepared.version, times))
            await asyncio.sleep(0)
        assert past == [True] * len(values) * past_the_queue
        counters = batcher.all_counters()[0]
        scheduler = batcher._scheduler
        seen += [
            model_statistics("m", "1", counters),
            counters.queue_buckets,
            counters.compute_buckets,
            counters.assemble_buckets,
        ]
        seen += [
            scheduler.queue.taken,
            scheduler.queue.taken_rows,
            scheduler.pace.full_ns,
            scheduler.pace.easy_rows,
        ]
        seen += [engine.batches, set(engine.threads) == {here()}]
    for statistics in seen:
        if isinstance(statistics, dict):
            del statistics["last_inference"]
    return seen


@async_test
async def test_past_the_queue_everything_is_answered_and_counted_as_it_is_the_long_way() -> None:
    values = np.random.default_rng().uniform(0, 9, 12)
    assert await counted(values, past_the_queue=True) == await counted(values, past_the_queue=False)


@async_test
async def test_a_request_whose_run_fails_goes_the_long_way_and_fails_alone() -> None:
    async with lonely(Brief()) as (batcher, _, past):
        with pytest.raises(EngineFailed, match=r"run alone.*poison"):
            await batcher.submit(rows_of(POISON), 1)
        await asyncio.sleep(0)
        assert (await batcher.submit(rows_of(5.0), 1)).outputs[0].item() == 5
        assert past == [False, True] and batcher.waiting == 0
        counters = batcher.all_counters()[0]
        assert (counters.failures, counters.requests) == (1, 2)


@async_test
async def test_outputs_that_are_not_what_the_spec_says_are_answered_to_nobody() -> None:
    class Short(Brief):
        def run(self, parts: Any) -> list[np.ndarray]:
            outputs = super().run(parts)
            return [output[: 1 if len(self.batches) == 1 else 0] for output in outputs]

    async with lonely(Short()) as (batcher, _, past):
        with pytest.raises(EngineFailed, match="batch of 1 rows"):
            await batcher.submit(rows_of(5.0), 1)
        assert past == [False]


@async_test
async def test_a_delay_that_was_asked_for_is_kept_for_one_alone_too() -> None:
    async with lonely(Brief(), spec(delay_us=1), time.monotonic_ns) as (batcher, _, past):
        await batcher.submit(rows_of(2.0), 1)
        assert past == [False]


def test_where_the_others_are_given_a_wait_nobody_passes() -> None:
    queue = RequestQueue(limit=8, delay_ns=0)
    assert queue.passable(100)
    queue.wait_for_more(4, until_ns=100)
    assert not queue.passable(99) and queue.passable(100)


@async_test
async def test_who_waits_already_is_not_passed() -> None:
    async with lonely(Brief()) as (batcher, device, past):
        device.hold()
        first = batcher.submit(rows_of(1.0), 1)
        await asyncio.sleep(0)
        second = batcher.submit(rows_of(2.0), 1)
        assert not first.done() and not second.done() and not any(past)
        device.release()
        assert [answer.outputs[0].item() for answer in await asyncio.gather(first, second)] == [1, 2]


@async_test
async def test_where_the_device_ran_out_of_memory_the_ceiling_holds_for_one_alone_too() -> None:
    engine = Brief()
    async with lonely(engine) as (batcher, _, past):
        batcher._scheduler._condition.ceiling.lower(4, 2)
        answer = await batcher.submit(rows_of(1.0, 2.0, 3.0), 3)
        assert past == [False] and answer.outputs[0].ravel().tolist() == [1, 2, 3]
        assert engine.batches[1:] == [[(2, 4)], [(1, 4)]]


@async_test
async def test_what_was_checked_against_another_signature_is_not_run_at_once() -> None:
    async with lonely(Brief()) as (batcher, _, _):
        request = Request(rows_of(1.0), 1, asyncio.Future(), 0, None, 0)
        assert batcher._scheduler.answer_alone(spec(width=6), request) is None


@async_test
async def test_nothing_is_run_on_a_device_that_is_lost() -> None:
    engine = Brief()
    async with lonely(engine) as (batcher, _, past):
        batcher._scheduler._condition.device_lost("it fell")
        with pytest.raises(EngineFailed, match="it fell"):
            await batcher.submit(rows_of(1.0), 1)
        assert past == [False] and len(engine.batches) == 1


@async_test
async def test_after_one_alone_that_took_long_the_next_go_to_the_device_thread() -> None:
    clock = Clock(0)
    engine = Brief(clock=clock)
    async with lonely(engine, clock=clock) as (batcher, _, past):
        engine.costs_ns = 3_000_000
        for _ in range(3):
            await batcher.submit(rows_of(1.0), 1)
            await asyncio.sleep(0)
        assert past == [True, False, False]
        assert [thread == threading.get_ident() for thread in engine.threads] == [True, True, False, False]
