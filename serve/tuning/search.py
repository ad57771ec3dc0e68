"""``halfeven tune``: which form, with how many threads, in which batches, is fastest on this device, and how long a
request waits for others there.

Everything runs as it will when serving: on the device thread, and for the delay through the real batcher.
A half that is not proven equal here is no candidate.
"""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import numpy as np
import torch
import uvloop

from ...exporters.on_device.selftest_record import obey_selftest
from ...models.engines.cpu.setup import PLAIN, CpuSetup
from ...models.engines.device_choice import resolve_device
from ...models.engines.engine import HALF_MUST_GAIN, Engine
from ...models.engines.true_fp32 import use_true_fp32
from ...models.errors import BadSetting, EngineFailed, HalfevenError
from ...models.machine.core_wait import seconds_on_core, waited_for_core_s
from ...models.machine.usable_cores import usable_cores
from ...models.spec.spec import ModelSpec
from ...models.store.store import Store, Version
from ..batching.batcher import Batcher
from ..batching.device import DeviceThread
from ..batching.interface import PreparedVersion
from ..batching.place import Place
from ..bench.figures import percentile
from ..versions.loading.candidate_forms import VersionHere
from ..versions.loading.cpu_choice import CROWDED, MORE_THREADS_MUST_GAIN
from ..versions.loading.kept_setups import measured_setup
from ..versions.loading.ready import ORIGINALS, proven_halves
from ..versions.loading.tuned import Way, Winner, save_tuned
from ..versions.loading.useful_rows import batch_sizes, useful_rows
from ..versions.versions_in_store import version_called

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
        # A queue without bounds: how long requests wait is what is measured.
        unbounded = {"max_queue_size": 1024, "max_queue_bytes": 2**40, "max_queue_ms": 0, "timeout_ms": 0}
        delayed = replace(spec, batching=replace(spec.batching, max_queue_delay_us=delay_us, **unbounded))
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


Notify = Callable[[str], None]
_ENGINES_SHARE = 0.7  # of the time; the rest is the delay's
_MOST_RUNS = 1000


@dataclass(frozen=True, slots=True)
class MeasuredWay:
    """A way's seconds of one batch (`quartile_seconds`), by its rows."""

    way: Way
    seconds: Mapping[int, float]
    waited_share: float = 0.0  # of the time, for a core

    @property
    def useful_rows(self) -> int:
        return useful_rows(self.seconds)

    @property
    def rows_per_second(self) -> float:
        """The rows of a batch of the useful size, for each second that it takes."""
        return self.useful_rows / self.seconds[self.useful_rows]


def tune(name: str, store: Store, device_word: str, seconds: float, notify: Notify) -> dict[str, Any]:
    """Measure every way for about ``seconds`` in all, and keep the winner beside the version.

    ``name`` is NAME (the active version) or NAME@VERSION. Raises UnknownName, BadSetting, EngineFailed where
    nothing of the version runs here.
    """
    if not seconds > 0:
        raise BadSetting(f"--seconds {seconds:g}: expected a number above 0")
    use_true_fp32()
    store.known(name.partition("@")[0])  # no folder is tuned, which `version_called` speaks of
    version = version_called(name, store)
    device = resolve_device(device_word)
    obey_selftest(version, device)
    place = Place(device, DeviceThread(str(device)))
    place.thread.start()
    try:
        return _tuned(version, place, seconds, notify)
    finally:
        place.thread.stop(30)


def choose(measured: list[MeasuredWay]) -> MeasuredWay:
    """The fastest in rows per second: fewer threads unless more gain a tenth, an original unless a half does."""
    by_kind: dict[tuple[str, str], MeasuredWay] = {}
    for one in sorted(measured, key=lambda m: m.way.threads):
        kind = (one.way.form, one.way.precision)
        if kind not in by_kind or one.rows_per_second >= (
            MORE_THREADS_MUST_GAIN * by_kind[kind].rows_per_second
        ):
            by_kind[kind] = one
    return max(by_kind.values(), key=_handicapped)


def _handicapped(one: MeasuredWay) -> float:
    return one.rows_per_second / (1.0 if one.way.precision == "fp32" else HALF_MUST_GAIN)


def _tuned(version: Version, place: Place, seconds: float, notify: Notify) -> dict[str, Any]:
    here = VersionHere.of(version, place)
    spec = here.spec
    kinds, refusals = _kinds(here, notify)
    measured = _all_measured(here, kinds, seconds * _ENGINES_SHARE, notify)
    waited = max((one.waited_share for one in measured), default=0.0)
    if waited > CROWDED:
        notify(
            f"the device's thread waited for a core up to {waited:.0%} of the time: something else had it, and the "
            "winner may be another one on an idle machine"
        )
    best = choose(measured)
    simulated = _simulated(here, best, seconds * (1 - _ENGINES_SHARE), notify)
    rows = best.useful_rows if spec.batched else 0
    winner = Winner.of(best.way, rows, best_delay(simulated), best.rows_per_second)
    evidence = {
        "measurements": [_row(one, rows) for one in measured for rows in one.seconds],
        "simulations": [asdict(one) for one in simulated],
        "refused": refusals,
        "waited_share": waited,
        "rules": {"half_must_gain": HALF_MUST_GAIN, "more_threads_must_gain": MORE_THREADS_MUST_GAIN},
    }
    date = datetime.now(UTC).isoformat(timespec="seconds")
    path = save_tuned(version, place.device, winner, date, evidence)
    use = "the next load uses it" if spec.form == "auto" else f"not used while form = {spec.form!r}"
    notify(f"{version}: {winner}; {use}")
    return {
        "model": version.name,
        "version": version.number,
        "digest": version.digest,
        "date": date,
        "winner": asdict(winner),
        **evidence,
        "path": str(path),
        "used": spec.form == "auto",
    }


def _all_measured(
    here: VersionHere, kinds: Sequence[tuple[str, str]], seconds: float, notify: Notify
) -> list[MeasuredWay]:
    """Every way of each kind that runs, in ``seconds`` together. Raises EngineFailed where none runs."""
    ways = [
        Way(form, precision, setup) for form, precision in kinds for setup in _setups(here, form, precision)
    ]
    each_s = seconds / len(ways)
    measured = [one for way in ways if (one := _measure(here, way, each_s, notify))]
    if not measured:
        raise EngineFailed(f"{here.version} runs in no form on {here.place.device}; the log above says why")
    return measured


def thread_counts(device: torch.device) -> list[int]:
    """1, 2, 4, … and every core that this process may use; on a GPU the host's threads do not matter."""
    if device.type != "cpu":
        return [0]
    return batch_sizes(usable_cores())


def _setups(here: VersionHere, form: str, precision: str) -> list[CpuSetup]:
    """The passes that were measured best on this processor, with every number of threads."""
    if here.place.device.type != "cpu":
        return [PLAIN]
    best = measured_setup(here, form, precision)
    return [replace(best, threads=threads) for threads in thread_counts(here.place.device)]


def _kinds(here: VersionHere, notify: Notify) -> tuple[list[tuple[str, str]], list[str]]:
    """The forms that may serve here, (form, precision) each: originals, and halves that are proven here."""
    live = here.version.has(ORIGINALS["live"])
    halves, refusals, _ = proven_halves(here if live else replace(here, spec=replace(here.spec, form="auto")))
    for half in halves:
        here.close(half)
    for refusal in refusals:
        notify(f"no candidate: {refusal}")
    originals = [(form, "fp32") for form, file in ORIGINALS.items() if here.version.has(file)]
    return [*originals, *((half.engine.form, half.engine.precision) for half in halves)], refusals


def _measure(here: VersionHere, way: Way, budget_s: float, notify: Notify) -> MeasuredWay | None:
    """None where this way does not run here."""
    sizes, place = batch_sizes(max(here.spec.max_batch_size, 1)), here.place
    try:
        engine = load_way(here, way)
    except HalfevenError as error:
        notify(f"no candidate: {way}: {error}")
        return None
    try:
        seconds: dict[int, float] = {}
        place.call(partial(engine.warm_up, here.batch(1)))
        began_s, waited_s = time.perf_counter(), place.call(waited_for_core_s)
        for rows in sizes:
            run = partial(quartile_seconds, partial(engine.run, here.batch(rows)), budget_s / len(sizes))
            seconds[rows] = place.call(run)
        waited_s = place.call(waited_for_core_s) - waited_s
    except Exception as error:  # whatever a runtime raises: the other ways are still measured
        notify(f"no candidate: {way}: {type(error).__name__}: {error}")
        return None
    finally:
        place.call(engine.close)
    one = MeasuredWay(way, seconds, waited_s / (time.perf_counter() - began_s))
    notify(
        f"{way}: {one.rows_per_second:,.0f} rows/s at {one.useful_rows}, {seconds[sizes[0]] * 1e3:.3g} ms alone"
    )
    return one


def quartile_seconds(run: Callable[[], object], budget_s: float) -> float:
    """The first quartile of the runs: other programs can only make runs slower."""
    run()
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while len(times) < 3 or (time.perf_counter() < end and len(times) < _MOST_RUNS):
        times.append(seconds_on_core(run))
    return sorted(times)[len(times) // 4]


def load_way(here: VersionHere, way: Way) -> Engine:
    return here.place.call(partial(here.engine, way.form, way.precision, way.setup))


def _simulated(here: VersionHere, best: MeasuredWay, seconds: float, notify: Notify) -> list[Simulated]:
    if not here.spec.batched:
        return []
    engine, place = load_way(here, best.way), here.place
    try:
        for rows in sorted({1, best.useful_rows}):
            place.call(partial(engine.warm_up, here.batch(rows)))
        row = [part[0] for part in here.batch(1)]
        spec = here.spec.with_max_batch_size(best.useful_rows)
        return simulate(spec, engine, place.thread, row, seconds, notify)
    finally:
        place.call(engine.close)


def _row(one: MeasuredWay, rows: int) -> dict[str, Any]:
    taken, way = one.seconds[rows], one.way
    return {
        "form": way.form,
        "precision": way.precision,
        **way.setup.to_json(),
        "rows": rows,
        "seconds": taken,
        "rows_per_second": rows / taken,
    }
