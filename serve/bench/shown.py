"""The figures as two tables for a terminal: what callers saw, and where the time went."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ...exporters.report.page import number_text

PERCENTS = ("p50", "p90", "p99", "p99.9", "max")


def render(facts: Mapping[str, Any]) -> Group:
    """The tables of latencies and of times, then every refusal, error and doubt as a sentence."""
    asked = (
        f"{facts['model']}, {facts['wire']}, rows {facts['rows']}, {facts['request_bytes']} bytes a request"
    )
    seen = _table(f"{asked}: latency in ms", ("load", "per second", *PERCENTS))
    spent = _table(
        "where the time went", ("load", "queue ms", "compute ms", "rows/batch", "gen. core", "CPU s/1000")
    )
    for stage in facts["stages"]:
        seen.add_row(*_seen(stage))
        spent.add_row(*_spent(stage))
    return Group(seen, spent, *(Text(f"! {sentence}", style="yellow") for sentence in sentences(facts)))


def name_of(stage: Mapping[str, Any]) -> str:
    """``closed 8`` (callers) or ``open 400/s`` (arrivals)."""
    return f"closed {stage['concurrency']}" if stage["load"] == "closed" else f"open {stage['rate']:g}/s"


def sentences(facts: Mapping[str, Any]) -> Iterable[str]:
    """Warnings about the measurement, and which versions answered."""
    for stage in facts["stages"]:
        name = name_of(stage)
        if refused := stage["refused"]:
            took = refused["from_sent_ms"]
            yield (
                f"{name}: {refused['count']} of {stage['sent']} refused, {number_text(took['p50'])} ms (p50), "
                f"{number_text(took['p99'])} ms (p99) after they were sent"
            )
        for status, count in stage["statuses"].items():
            if status not in ("200", "429", "503"):
                yield f"{name}: {count} × {status}: {stage['messages'].get(status, 'no answer')[:200]}"
        yield from (f"{name}: {doubt}" for doubt in stage["generator"]["doubts"])
    answered = {
        (one["version"], one["precision"]) for stage in facts["stages"] for one in stage["answered_by"]
    }
    if len(answered) > 1:
        text = ", ".join(f"{version or '?'} ({precision or '?'})" for version, precision in sorted(answered))
        yield f"more than one version answered: {text}"


def _table(title: str, headings: tuple[str, ...]) -> Table:
    table = Table(title=escape(title), box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    return table


def _seen(stage: Mapping[str, Any]) -> list[str]:
    spread, rate = stage["latency_ms"], stage["per_second"]
    times = [number_text(spread[percent]) for percent in PERCENTS] if spread else ["–"] * len(PERCENTS)
    return [name_of(stage), f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}", *times]


def _spent(stage: Mapping[str, Any]) -> list[str]:
    counted, generator = stage["statistics"], stage["generator"]
    phases = stage["server_timing_ms"]
    batch = f"{counted['rows_per_batch']:.1f}" if counted else "–"
    return [
        name_of(stage),
        number_text(phases["queue"]["mean"]) if phases.get("queue") else "–",
        number_text(phases["compute"]["mean"]) if phases.get("compute") else "–",
        batch,
        f"{generator['cpu_share']:.0%}",
        f"{generator['cpu_s_per_1000']:.3g}",
    ]
