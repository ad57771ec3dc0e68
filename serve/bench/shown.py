"""The figures as two tables for a terminal (what callers saw, and where the time went), and as a page with plots."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ...exporters.report.page import number_text, pages_of, size_text
from ...exporters.report.plots import HEIGHT, WIDTH

PERCENTS = ("p50", "p90", "p99", "p99.9", "max")
INKS = ("#17756c", "#b9770e", "#6b4fa3", "#b3372b", "#2f6db5", "#5c7a1f", "#a34f82", "#6a6f75")


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


@dataclass(frozen=True, slots=True)
class Line:
    """One stage's line: an SVG path, its dots, its colour and name."""

    name: str
    path: str
    dots: tuple[tuple[float, float], ...]
    ink: str


@dataclass(frozen=True, slots=True)
class Plot:
    """Lines over ticks; ``across`` are the marks of the x axis, ``up`` those of the y axis."""

    lines: tuple[Line, ...]
    across: tuple[tuple[float, str], ...]
    up: tuple[tuple[float, str], ...]


def render_page(facts: Mapping[str, Any]) -> str:
    """The report as HTML without any outside asset. Every text in ``facts`` is escaped."""
    page = pages_of(Path(__file__).parent)
    page.filters.update(number=number_text, size=size_text)
    return page.get_template("bench.html").render(
        facts=facts,
        sentences=list(sentences(facts)),
        percents=PERCENTS,
        name_of=name_of,
        by_percentile=percentile_plot(facts["stages"]),
        by_time=time_plot(facts["stages"]),
        WIDTH=WIDTH,
        HEIGHT=HEIGHT,
    )


def percentile_plot(stages: Sequence[Mapping[str, Any]]) -> Plot:
    """Latency (logarithmic) at each percentile, a line for each stage."""
    step = WIDTH / (len(PERCENTS) - 1)
    across = tuple((step * index, percent) for index, percent in enumerate(PERCENTS))
    drawn = [
        (index, stage, [(x, stage["latency_ms"][percent]) for x, percent in across])
        for index, stage in enumerate(stages)
        if stage["latency_ms"]
    ]
    return _plot(drawn, across)


def time_plot(stages: Sequence[Mapping[str, Any]]) -> Plot:
    """The p99 (logarithmic) of each stretch of the window, by when requests were due."""
    longest = max((stage["seconds"] for stage in stages), default=1.0)
    across = tuple((WIDTH * share, f"{longest * share:.3g} s") for share in (0.0, 0.25, 0.5, 0.75, 1.0))
    drawn = [
        (index, stage, [(WIDTH * at["at_s"] / longest, at["p99"]) for at in stage["timeline"]])
        for index, stage in enumerate(stages)
        if stage["timeline"]
    ]
    return _plot(drawn, across)


def _plot(
    drawn: Sequence[tuple[int, Mapping[str, Any], list[tuple[float, float]]]],
    across: tuple[tuple[float, str], ...],
) -> Plot:
    values = [value for _, _, points in drawn for _, value in points]
    if not values:
        return Plot((), across, ())
    least, most = _decade_below(min(values)), max(*values, 1e-6) * 1.1
    span = math.log(most / least)

    def y_of(value: float) -> float:
        return HEIGHT * (1 - math.log(max(value, least) / least) / span)

    decades = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    parts = (1, 2, 5) if len(decades) < 4 else (1,)
    marks = [part * 10.0**power for power in decades for part in parts]
    marks = [mark for mark in marks if least * 0.999 <= mark <= most]
    lines = []
    for index, stage, points in drawn:
        dots = tuple((x, y_of(value)) for x, value in points)
        path = "".join(f"{'L' if i else 'M'}{x:.1f} {y:.1f}" for i, (x, y) in enumerate(dots))
        lines.append(Line(name_of(stage), path, dots, INKS[index % len(INKS)]))
    return Plot(tuple(lines), across, tuple((y_of(mark), f"{mark:g} ms") for mark in marks))


def _decade_below(value: float) -> float:
    """1, 2 or 5 times a power of ten, not above the value."""
    power = 10.0 ** math.floor(math.log10(max(value, 1e-6)))
    return next(part * power for part in (5, 2, 1) if part * power <= max(value, 1e-6) * (1 + 1e-9))
