"""The places of the marks of a job's plots, in the units of their viewBox; ``job.html`` draws them.

Steps are the trainer's records as the job store keeps them. A null is a number that is not finite; it is never
drawn as if it were one, and the line breaks there.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WIDTH, HEIGHT = 640.0, 130.0
MOST_TICKS = 6
WIDE = 20.0  # a largest value this many times the smallest is drawn on a logarithmic axis
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_CAUSES = {"gradient overflow": "overflow", "non-finite loss": "nonfinite"}

Steps = Sequence[Mapping[str, Any]]
Points = Sequence[tuple[float, float | None]]


@dataclass(frozen=True, slots=True)
class Skip:
    """A skipped step: where, the class of its colour, and the words of its cause."""

    x: float
    y: float
    kind: str
    cause: str


@dataclass(frozen=True, slots=True)
class JobCurve:
    """An SVG path, its ticks (y, label), a limit's height, the steps without a finite value and the skipped."""

    path: str
    ticks: tuple[tuple[float, str], ...]
    limit_y: float | None = None
    missing: tuple[float, ...] = ()
    skips: tuple[Skip, ...] = ()


@dataclass(frozen=True, slots=True)
class Axis:
    """Values between ``low`` and ``high`` as heights; ``base`` 0 is linear, else the logarithm's base."""

    low: float
    high: float
    base: int

    def y_of(self, value: float) -> float:
        if self.base:
            value = math.log(value, self.base) if value > 0 else self.low
        return self._height(value)

    def ticks(self) -> tuple[tuple[float, str], ...]:
        marks = _marks(self.low, self.high, 1.0 if self.base else 0.0)
        return tuple((self._height(mark), self._label(mark)) for mark in marks)

    def _height(self, place: float) -> float:
        return HEIGHT * (1 - (min(max(place, self.low), self.high) - self.low) / (self.high - self.low))

    def _label(self, mark: float) -> str:
        if not self.base:
            return f"{mark:.4g}"
        return f"{self.base}{str(round(mark)).translate(_SUPERSCRIPT)}"


def finite(value: object) -> float | None:
    """The number, or None for whatever is not a finite one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def loss_curve(steps: Steps, last: int) -> JobCurve | None:
    return _curve(_points(steps, "loss"), last)


def norm_curve(steps: Steps, last: int, clip: float | None) -> JobCurve | None:
    return _curve(_points(steps, "grad_norm"), last, clip)


def scale_curve(steps: Steps, last: int, floor: float | None) -> JobCurve | None:
    """The loss scale on a log2 axis, as stairs; each skipped step stands on it in the colour of its cause."""
    points = _points(steps, "scale")
    known = [value for _, value in points if value is not None and value > 0]
    if not known:
        return None
    limits = [floor] if floor is not None and floor > 0 else []
    powers = [math.log2(value) for value in (*known, *limits)]
    axis = Axis(math.floor(min(powers)) - 1, math.ceil(max(powers)) + 1, 2)
    skips = tuple(_skip(step, last, axis) for step in steps if step.get("skipped"))
    return JobCurve(
        _path(points, last, axis, stairs=True), axis.ticks(), axis.y_of(floor) if limits and floor else None,
        skips=skips,
    )  # fmt: skip


def x_ticks(last: int) -> tuple[tuple[float, str], ...]:
    return tuple((_x(mark, last), f"{mark:.0f}") for mark in _marks(0.0, float(max(last, 1)), 1.0))


def _curve(points: Points, last: int, limit: float | None = None) -> JobCurve | None:
    known = [value for _, value in points if value is not None]
    if not known:
        return None
    drawn = [*known, limit] if limit is not None and limit <= 4 * max(known) else known
    axis = _axis(drawn)
    limit_y = None if limit is None or len(drawn) == len(known) else axis.y_of(limit)
    missing = tuple(_x(step, last) for step, value in points if value is None)
    return JobCurve(_path(points, last, axis), axis.ticks(), limit_y, missing)


def _axis(values: Sequence[float]) -> Axis:
    low, high = min(values), max(values)
    positive = [value for value in values if value > 0]
    if low >= 0 and positive and high > WIDE * min(positive):
        return Axis(math.floor(math.log10(min(positive))), math.ceil(math.log10(high) + 1e-9), 10)
    low = min(low, 0.0)
    return Axis(low, high + 0.06 * (high - low) if high > low else low + 1.0, 0)


def _points(steps: Steps, key: str) -> Points:
    return [
        (number, finite(step.get(key))) for step in steps if (number := finite(step.get("step"))) is not None
    ]


def _path(points: Points, last: int, axis: Axis, stairs: bool = False) -> str:
    words: list[str] = []
    pen_down, before = False, 0.0
    for number, value in points:
        if value is None:
            pen_down = False
            continue
        x, y = _x(number, last), axis.y_of(value)
        if pen_down and stairs and y != before:
            words.append(f"L{x:.1f} {before:.1f}")
        words.append(f"{'L' if pen_down else 'M'}{x:.1f} {y:.1f}")
        pen_down, before = True, y
    return "".join(words)


def _skip(step: Mapping[str, Any], last: int, axis: Axis) -> Skip:
    cause = str(step.get("cause") or "cause not recorded")
    scale = finite(step.get("scale"))
    y = axis.y_of(scale) if scale is not None else HEIGHT
    return Skip(_x(finite(step.get("step")) or 0.0, last), y, _CAUSES.get(cause, "other"), cause)


def _x(number: float, last: int) -> float:
    return WIDTH * min(max(number / max(last, 1), 0.0), 1.0)


def _marks(low: float, high: float, least: float) -> list[float]:
    """Round places between the two, at most ``MOST_TICKS`` steps of at least ``least`` apart."""
    apart = max((high - low) / MOST_TICKS, least, 1e-300)
    unit = 10.0 ** math.floor(math.log10(apart))
    step = next(part * unit for part in (1.0, 2.0, 5.0, 10.0) if part * unit >= apart * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [
        step * count
        for count in range(first, first + 2 * MOST_TICKS)
        if step * count <= high * (1 + 1e-9) + 1e-300
    ]
