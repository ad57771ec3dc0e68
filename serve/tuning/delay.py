"""Measures if waiting for a batch to fill pays here, with callers in a closed loop, through the real batcher."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import uvloop

from ...models.engines.engine import Engine
from ...models.spec.spec import ModelSpec
from ..batching.batcher import Batcher
from ..batching.device import DeviceThread
from ..batching.interface import PreparedVersion
from ..bench.figures import percentile

DELAYS_US = (0, 200, 1000, 4000)
ROUNDS = 2  # of all delays; the better one counts, so that one disturbance decides nothing
MOST_CALLERS = 128
# A delay makes a lone caller wait, so it must bring callers that come together a tenth more answers.
DELAY_MUST_GAIN = 1.1


@dataclass(frozen=True, slots=True)
class Simulated:
    """A number of callers, each asking again when answered: answers per second, and their latency."""

    delay_us: int
    callers: int
    per_second: float
    p50_ms: float
    p99_ms: float


def simulate(
    spec: ModelSpec,
    engine: Engine,
    device: DeviceThread,
    row: Sequence[np.ndarray],
    seconds: float,
    notify: Callable[[str], None],
) -> list[Simulated]:
    """Every delay with one caller, with a full batch of them and with two, for about ``seconds`` in all."""
    full = min(spec.max_batch_size, MOST_CALLERS // 2)
    crowds = sorted({1, full, 2 * full})
    each_s = seconds / len(crowds) / len(DELAYS_US) / ROUNDS
    best: dict[tuple[int, int], Simulated] = {}
    for delay_us in DELAYS_US * ROUNDS:
        delayed = replace(
            spec, batching=replace(spec.batching, max_queue_delay_us=delay_us, max_queue_size=1024)
        )
        for callers in crowds:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                times, took_s = runner.run(_loop(delayed, engine, device, row, callers, each_s))
            rising = np.sort(times) * 1e3
            p50, p99 = percentile(rising, 50), percentile(rising, 99)
            one = Simulated(delay_us, callers, len(times) / took_s, p50, p99)
            known = best.setdefault((delay_us, callers), one)
            best[delay_us, callers] = max(known, one, key=lambda seen: seen.per_second)
        rates = (f"{best[delay_us, callers].per_second:,.0f}/s" for callers in crowds)
        notify(f"delay {delay_us} µs: {', '.join(rates)}")
    return list(best.values())


def best_delay(simulated: Sequence[Simulated]) -> int:
    """The best delay: 0 unless another one gains a tenth, in the mean over the runs with more than one caller."""
    plain = {one.callers: one.per_second for one in simulated if one.delay_us == 0 and one.callers > 1}
    gains: dict[int, list[float]] = {}
    for one in simulated:
        if one.callers in plain:
            gains.setdefault(one.delay_us, []).append(math.log(one.per_second / plain[one.callers]))
    means = {delay_us: math.exp(sum(logs) / len(logs)) for delay_us, logs in gains.items()}
    best = max(means, key=lambda delay_us: means[delay_us], default=0)
    return best if means.get(best, 1.0) >= DELAY_MUST_GAIN else 0


async def _loop(
    spec: ModelSpec,
    engine: Engine,
    device: DeviceThread,
    row: Sequence[np.ndarray],
    callers: int,
    seconds: float,
) -> tuple[list[float], float]:
    """The latency of every answer, and the seconds in which they came."""
    batcher = Batcher(spec, device, PreparedVersion("tuning", "", engine.precision, engine))
    times: list[float] = []
    began = time.perf_counter()
    end = began + seconds

    async def caller() -> None:
        while True:
            asked = time.perf_counter()
            await batcher.submit(row, 1)
            answered = time.perf_counter()
            times.append(answered - asked)
            if answered >= end:
                return

    try:
        await asyncio.gather(*(caller() for _ in range(callers)))
        return times, time.perf_counter() - began
    finally:
        await batcher.drain()
        device.detach(batcher)
