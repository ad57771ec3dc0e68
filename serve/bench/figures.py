"""The figures of a record: exact percentiles, throughput, and where the time went."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .record import OK, Record

PERCENTILES = (50.0, 90.0, 99.0, 99.9)
REFUSALS = (429, 503)
LIMIT_SHARE = 0.9  # of one core: above it the generator cannot send faster
WAIT_SHARE = 0.1  # of the time waited for a core: above it the machine was too busy
LATE_MS, LATE_SHARE = 1.0, 0.1  # of the p99: below either, what the generator missed does not matter
STRETCHES = 60  # of the window, in the picture of latency over time
_TIMING = re.compile(rb"([A-Za-z0-9_-]+)[^,]*?;\s*dur=([0-9.]+)")


class Cpu(NamedTuple):
    """CPU seconds that a thread used, of how many on the clock; and for how many it waited for a core."""

    seconds: float
    of_seconds: float
    waited_s: float = 0.0


def figures(
    record: Record, cpu: Cpu, before: Mapping[str, Any], after: Mapping[str, Any], rows: int
) -> dict[str, Any]:
    """One stage of load. Milliseconds in every ``*_ms``; rates per second of the window.

    ``cpu`` is what the generator used during the window; ``before`` and ``after`` are the server's V2
    statistics around it, empty where it has none.
    """
    window_s = record.end - record.begin
    good = record.latencies.get(OK, ())
    return {
        "seconds": window_s,
        "sent": record.sent,
        "ok": len(good),
        "per_second": record.in_window / window_s,
        "rows_per_second": record.in_window * rows / window_s,
        "latency_ms": spread_ms(good),
        "statuses": {
            **{str(status): len(times) for status, times in sorted(record.latencies.items())},
            **record.failures,
        },
        "messages": record.messages,
        "refused": _refused(record),
        "server_timing_ms": _timings(record.timings),
        "statistics": _difference(before, after),
        "answered_by": [
            {"version": version, "precision": precision, "count": count}
            for (version, precision), count in sorted(record.answered_by.items())
        ],
        "timeline": _timeline(record, window_s),
        "generator": _generator(record, cpu),
    }


def percentile(rising: Sequence[float] | np.ndarray, percent: float) -> float:
    """The smallest value that at least so many percent of all values do not exceed (nearest rank)."""
    return float(rising[max(math.ceil(len(rising) * percent / 100 - 1e-9), 1) - 1])


def spread_ms(seconds: Sequence[float]) -> dict[str, float] | None:
    """Percentiles, the largest and the mean, in milliseconds; None of nothing."""
    if not len(seconds):
        return None
    rising = np.sort(np.asarray(seconds, np.float64)) * 1e3
    spread = {f"p{percent:g}": percentile(rising, percent) for percent in PERCENTILES}
    return {**spread, "max": float(rising[-1]), "mean": float(rising.mean())}


def _refused(record: Record) -> dict[str, Any] | None:
    """The requests that the server refused (429, 503): how many, how fast, and when to retry."""
    times = [time for status in REFUSALS for time in record.latencies.get(status, ())]
    from_sent = [time for status in REFUSALS for time in record.refusals.get(status, ())]
    if not times:
        return None
    return {
        "count": len(times),
        "latency_ms": spread_ms(times),
        "from_sent_ms": spread_ms(from_sent),
        "retry_after": dict(record.retry_after),
    }


def _timings(headers: Sequence[bytes]) -> dict[str, dict[str, float] | None]:
    """The times of the server's Server-Timing headers, by phase."""
    phases: dict[str, list[float]] = {}
    for header in headers:
        for name, duration in _TIMING.findall(header):
            phases.setdefault(name.decode(), []).append(float(duration) / 1e3)
    return {name: spread_ms(seconds) for name, seconds in phases.items()}


def _difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any] | None:
    """The server's counters over the window, all versions together; None where it has none."""
    if not before or not after:
        return None
    requests, queue_ns = _grown(before, after, "queue")
    computed, compute_ns = _grown(before, after, "compute_infer")
    failures, _ = _grown(before, after, "fail")
    rows = _sum(after, "inference_count") - _sum(before, "inference_count")
    batches = _sum(after, "execution_count") - _sum(before, "execution_count")
    if not requests or not computed or not batches:
        return None
    return {
        "requests": requests,
        "rows": rows,
        "batches": batches,
        "rows_per_batch": rows / batches,
        "queue_ms": queue_ns / requests / 1e6,
        "compute_ms": compute_ns / computed / 1e6,
        "failures": failures,
    }


def _grown(before: Mapping[str, Any], after: Mapping[str, Any], phase: str) -> tuple[int, int]:
    def total(said: Mapping[str, Any], key: str) -> int:
        return sum(model["inference_stats"][phase][key] for model in said.get("model_stats", ()))

    return total(after, "count") - total(before, "count"), total(after, "ns") - total(before, "ns")


def _sum(said: Mapping[str, Any], key: str) -> int:
    return sum(model[key] for model in said.get("model_stats", ()))


def _timeline(record: Record, window_s: float) -> list[dict[str, float]]:
    """The good answers by when they were due: count, median and p99 of each stretch of the window."""
    if OK not in record.latencies:
        return []
    due, taken = np.asarray(record.due[OK]), np.asarray(record.latencies[OK])
    places = ((due - record.begin) / window_s * STRETCHES).astype(int)
    line = []
    for place in range(STRETCHES):
        rising = np.sort(taken[places == place]) * 1e3
        if len(rising):
            at, median, p99 = (
                (place + 0.5) * window_s / STRETCHES,
                percentile(rising, 50),
                percentile(rising, 99),
            )
            line.append({"at_s": at, "count": len(rising), "p50": median, "p99": p99})
    return line


def _generator(record: Record, cpu: Cpu) -> dict[str, Any]:
    """The load generator's own processor time, and whether it limited the load."""
    share, late, seen = (
        cpu.seconds / cpu.of_seconds,
        spread_ms(record.late),
        spread_ms(record.latencies.get(OK, ())),
    )
    doubts = []
    if share > LIMIT_SHARE:
        doubts.append(
            f"the generator used {share:.0%} of its core: it was the limit, and the server may do more; "
            "run several generators, or send more rows in a request"
        )
    waited = cpu.waited_s / cpu.of_seconds
    if waited > WAIT_SHARE:
        doubts.append(
            f"the generator waited for a core {waited:.0%} of the time: something else had it, and latencies include "
            "that; run it on another machine"
        )
    if late is not None and seen is not None and late["p99"] > max(LATE_MS, LATE_SHARE * seen["p99"]):
        doubts.append(
            f"1 % of the arrivals went out {late['p99']:.3g} ms late or more: the generator was not woken in "
            "time, and latencies include that"
        )
    return {
        "cpu_share": share,
        "waited_share": waited,
        "cpu_s_per_1000": cpu.seconds / max(record.sent, 1) * 1e3,
        "late_ms": late,
        "was_limit": share > LIMIT_SHARE,
        "doubts": doubts,
    }
