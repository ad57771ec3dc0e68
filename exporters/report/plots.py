"""The positions of the marks of the report's plots, in the units of their viewBox; `report.html` draws them.

A null in the data is a number that is not finite: an unbounded error, or a slice without any noise.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WIDTH, HEIGHT = 640.0, 150.0
SLICE_HEIGHT = 92.0
MAX_COLUMN = 12.0
BINS = 24
CURVE_LEAST_U, CURVE_TOP_U = 0.1, 100.0
CEILING_DB = 90.0  # FP32 against itself in another order; a better slice is drawn as high


@dataclass(frozen=True, slots=True)
class Bar:
    """A value against its limit and its floor, where one is known, as percent of the bar's width."""

    value: float
    limit: float
    over: bool
    floor: float | None = None


@dataclass(frozen=True, slots=True)
class Dot:
    x: float
    y: float
    over: bool
    endless: bool


@dataclass(frozen=True, slots=True)
class ErrorPlot:
    """One dot per sample (or stretch of samples), the limit, and how the dots pile up at each height."""

    dots: tuple[Dot, ...]
    limit_y: float
    ticks: tuple[tuple[float, str], ...]
    pile: tuple[tuple[float, float, float], ...]  # y, height, width
    logarithmic: bool


@dataclass(frozen=True, slots=True)
class SlicePlot:
    """One column per slice (or stretch): x, y, width, and whether it falls short; None where nothing is."""

    columns: tuple[tuple[float, float, float, bool], ...]
    limit_y: float
    ceiling: float


@dataclass(frozen=True, slots=True)
class CurvePlot:
    """A dot per node and the line through them (an SVG path); ``first`` is the first node astray."""

    dots: tuple[Dot, ...]
    line: str
    astray_y: float
    ticks: tuple[tuple[float, str], ...]
    first: Dot | None


def error_bar(error_u: float | None, limit_u: float, floor_u: float | None = None) -> Bar:
    full = max(1.25 * limit_u, error_u or 0.0) or 1.0
    floor = None if floor_u is None else min(100 * floor_u / full, 100.0)
    if error_u is None:
        return Bar(100.0, 80.0, True, None if floor is None else min(floor, 80.0))
    return Bar(100 * error_u / full, 100 * limit_u / full, not error_u <= limit_u, floor)


def error_plot(errors_u: Sequence[float | None], limit_u: float) -> ErrorPlot:
    """Linear while the worst is near the limit, logarithmic once it is more than three times as large."""
    known = [error for error in errors_u if error is not None]
    most = max([*known, 1.25 * limit_u, 1e-9])
    logarithmic = most > 3 * limit_u > 0
    least = limit_u / 10

    def y_of(error: float) -> float:
        share = math.log(max(error, least) / least) / math.log(most / least) if logarithmic else error / most
        return HEIGHT * (1 - 0.96 * share)

    step = WIDTH / max(len(errors_u), 1)
    dots = tuple(
        Dot(step * (i + 0.5), 3.0 if e is None else y_of(e), e is None or not e <= limit_u, e is None)
        for i, e in enumerate(errors_u)
    )
    fine = (1.0, 2.0, 5.0) if most < 200 * least else (1.0,)
    decades = [limit_u * part * 10.0**power for power in range(-1, 6) for part in fine]
    marks = decades if logarithmic else _round_steps(most)
    ticks = tuple((y_of(mark), f"{mark:g}u") for mark in marks if mark <= most)
    return ErrorPlot(dots, y_of(limit_u), ticks, _pile([dot.y for dot in dots]), logarithmic)


def slice_plot(db: Sequence[float | None], limit_db: float) -> SlicePlot:
    ceiling = max([CEILING_DB, limit_db * 1.1])
    step = WIDTH / max(len(db), 1)
    width = min(max(step * 0.8, step - 2), MAX_COLUMN)

    def y_of(value: float) -> float:
        return SLICE_HEIGHT * (1 - min(max(value / ceiling, 0.02), 1.0))

    columns = tuple(
        (step * (i + 0.5) - width / 2, y_of(value), width, not value >= limit_db)
        for i, value in enumerate(db)
        if value is not None
    )
    return SlicePlot(columns, y_of(limit_db), ceiling)


def curve_plot(curve: Mapping[str, Any]) -> CurvePlot:
    """Logarithmic from a tenth of a u; values that were lost are at the top."""
    points, nodes = curve["points"], max(curve["nodes"], 1)
    known = [point["error_u"] for point in points if point["error_u"] is not None]
    most = max([*known, CURVE_TOP_U])
    span = math.log(most / CURVE_LEAST_U)

    def place(point: Mapping[str, Any]) -> Dot:
        error, x = point["error_u"], WIDTH * (point["at"] + 0.5) / nodes
        endless = error is None
        share = 1.0 if endless else math.log(max(error, CURVE_LEAST_U) / CURVE_LEAST_U) / span
        over = endless or not error <= curve["astray_u"]
        return Dot(x, HEIGHT * (1 - 0.94 * share), over, endless)

    def y_of(error: float) -> float:
        return HEIGHT * (1 - 0.94 * math.log(error / CURVE_LEAST_U) / span)

    dots = tuple(place(point) for point in points)
    line = "".join(f"{'L' if i else 'M'}{dot.x:.1f} {dot.y:.1f}" for i, dot in enumerate(dots))
    marks = [10.0**power for power in range(-1, 9) if 10.0**power <= most]
    marks = marks[:: 1 + len(marks) // 6]
    first = curve.get("first")
    ticks = tuple((y_of(mark), f"{mark:g}u") for mark in marks)
    return CurvePlot(dots, line, y_of(curve["astray_u"]), ticks, place(first) if first else None)


def _round_steps(most: float) -> list[float]:
    step = 10.0 ** math.floor(math.log10(most))
    step = next(part * step for part in (0.2, 0.5, 1.0, 2.0) if most / (part * step) <= 6)
    return [step * count for count in range(int(most / step) + 1)]


def _pile(heights: Sequence[float]) -> tuple[tuple[float, float, float], ...]:
    counts = [0] * BINS
    for height in heights:
        counts[min(int(height / HEIGHT * BINS), BINS - 1)] += 1
    tall = HEIGHT / BINS
    most = max([*counts, 1])
    return tuple((index * tall, tall - 1, 64 * count / most) for index, count in enumerate(counts) if count)
