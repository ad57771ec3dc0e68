"""`halfeven tune` prints each way at its useful batch, the delays, the winner, and why it won."""

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ...models.engines.cpu.setup import CpuSetup
from ..versions.loading.candidate_forms import HALF_MUST_GAIN
from ..versions.loading.cpu_choice import MORE_THREADS_MUST_GAIN
from ..versions.loading.tuned import Way, Winner
from .search import MeasuredWay, choose


def described(facts: Mapping[str, Any]) -> Group:
    """Every way for a terminal, a line each, the fastest first; then the delays, the winner, and why it won."""
    title = escape(f"{facts['model']}@{facts['version']}: every way at its useful batch")
    table = Table("way", title=title, box=SIMPLE_HEAD)
    for heading in ("rows/s", "at batch", "ms alone"):
        table.add_column(heading, justify="right", no_wrap=True)
    measured = sorted(_measured_in(facts), key=_rate, reverse=True)
    for one in measured:
        numbers = (
            f"{one.rows_per_second:,.0f}",
            str(one.useful_rows),
            f"{min(one.seconds.items())[1] * 1e3:.3g}",
        )
        table.add_row(str(one.way), *numbers)
    winner = Winner(**facts["winner"])
    lines = [f"winner: {winner}", f"why: {_why(measured)}", _advice(winner)]
    return Group(table, *_delays(facts["simulations"]), *map(Text, lines))


def _measured_in(facts: Mapping[str, Any]) -> list[MeasuredWay]:
    seconds: dict[Way, dict[int, float]] = {}
    for row in facts["measurements"]:
        way = Way(row["form"], row["precision"], CpuSetup(row["threads"], frozenset(row["passes"])))
        seconds.setdefault(way, {})[row["rows"]] = row["seconds"]
    return [MeasuredWay(way, by_rows) for way, by_rows in seconds.items()]


def _why(measured: list[MeasuredWay]) -> str:
    """The winner against the fastest way of the other precision, and against a faster one that gains too little."""
    best = choose(measured)
    won = best.way.precision
    others = [one for one in measured if (one.way.precision == "fp32") != (won == "fp32")]
    rule = f"a half must have {HALF_MUST_GAIN:g} times the rows per second of the fastest FP32"
    if not others:
        sentence = "no half is proven here" if won == "fp32" else "no FP32 way runs here"
    else:
        rival = max(others, key=_rate)
        half, original = (rival, best) if won == "fp32" else (best, rival)
        times = half.rows_per_second / original.rows_per_second
        sentence = f"{rule}, and {half.way} has {times:.2f} times those of {original.way}"
    more = max((one for one in measured if _only_threads_differ(one, best)), key=_rate, default=best)
    if more.rows_per_second > best.rows_per_second:
        gain = more.rows_per_second / best.rows_per_second
        sentence += (
            f"; {more.way.threads} threads gain {gain:.2f} times, and must gain {MORE_THREADS_MUST_GAIN:g}"
        )
    return sentence


def _rate(one: MeasuredWay) -> float:
    return one.rows_per_second


def _only_threads_differ(one: MeasuredWay, best: MeasuredWay) -> bool:
    return (one.way.form, one.way.precision) == (best.way.form, best.way.precision)


def _delays(simulations: list[dict[str, Any]]) -> list[Table]:
    if not simulations:
        return []
    table = Table("delay µs", "callers", "per second", "p50 ms", "p99 ms", box=SIMPLE_HEAD)
    for one in simulations:
        times = (f"{one[name]:,.4g}" for name in ("p50_ms", "p99_ms"))
        table.add_row(str(one["delay_us"]), str(one["callers"]), f"{one['per_second']:,.0f}", *times)
    return [table]


def _advice(winner: Winner) -> str:
    if not winner.queue_delay_us:
        return "no queue delay gains anything here"
    return f"batching.max_queue_delay_us = {winner.queue_delay_us} in model.toml would gain throughput here"
