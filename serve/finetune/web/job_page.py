"""The pages of fine-tuning jobs, made from the jobs' own JSON: of one job, and of the newest ones."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment

from ....exporters.report.page import pages_of
from ..jobs.records.job_types import FINAL, not_active, was_refused
from ..judging.judging_metrics import SHARES

REFRESH_S = 2
_ROOT = "../../../../"  # of the job's page, ``/v1/fine_tuning/jobs/ID/page``: a proxy may show the server below a path
MOST_EVENTS = 200

Facts = Mapping[str, Any]


def render_job(job: Facts, steps: Sequence[Facts], events: Sequence[Facts]) -> str:
    """The page of one job (OpenAI's shape with our ``halfeven`` object), its step records and its events.

    ``halfeven.gate`` is the gate's own JSON; ``halfeven.version`` the version that the job made, refused or
    not. Absent values are not drawn; every text is escaped. While the job runs the page puts in what is new every
    ``REFRESH_S`` seconds, and reloads itself where no script runs.
    """
    ours = job.get("halfeven") or {}
    return (
        _environment()
        .get_template("job.html")
        .render(
            root=_ROOT,
            job=job,
            ours=ours,
            ended=job.get("status") in FINAL,
            state=_state(job),
            reason=reason_of(job),
            plots=_plots(job, steps),
            skipped=_causes(steps),
            links=_links(job),
            checks=gate_checks(ours.get("gate") or {}),
            events=list(reversed(events))[:MOST_EVENTS],
            older=max(0, len(events) - MOST_EVENTS),
        )
    )


def render_jobs(jobs: Sequence[Facts]) -> str:
    """The page of the newest jobs, each with its state and how far it is."""
    rows = [(job, _state(job), reason_of(job), _progress(job)) for job in jobs]
    running = any(job.get("status") not in FINAL for job in jobs)
    return _environment().get_template("jobs.html").render(root="./", rows=rows, running=running)


def _state(job: Facts) -> str:
    return "refused" if was_refused(job) else not_active(job) or str(job["status"])


def reason_of(job: Facts) -> str:
    """The reason why the job is in its state, in one sentence; empty for a paused job."""
    ours, error = job.get("halfeven") or {}, job.get("error") or {}
    if error.get("message"):
        return str(error["message"])
    if state := not_active(job):
        return str(ours["promotion"].get("message") or f"It is {state}.")
    match job.get("status"):
        case "succeeded":
            return f"{job.get('fine_tuned_model')} passed every check and is active."
        case "running":
            return f"{str(ours.get('stage') or 'starting').capitalize()}."
        case "cancelled":
            return "Cancelled as asked; the active version was not touched."
        case "queued":
            return "Waiting for its turn: no more jobs run at once than the server was started with (--jobs)."
        case _:
            return ""


def _plots(job: Facts, steps: Sequence[Facts]) -> dict[str, Any]:
    chosen = job.get("hyperparameters") or {}
    known = [int(number) for step in steps if (number := finite(step.get("step"))) is not None]
    planned = 0 if job.get("status") in FINAL else _progress(job).get("total_steps")
    last = max([*known, int(finite(planned) or 0), 1])
    floor, clip = finite(chosen.get("scale_floor")), finite(chosen.get("clip_norm"))
    curves: dict[str, JobCurve | None] = {
        "loss": loss_curve(steps, last),
        "scale": scale_curve(steps, last, floor),
        "norm": norm_curve(steps, last, clip),
    }
    return {
        **curves,
        "x_ticks": x_ticks(last),
        "floor": floor,
        "clip": clip,
        "thinned": max(known, default=0) > len(known) > 0,
    }


def _progress(job: Facts) -> Facts:
    return (job.get("halfeven") or {}).get("progress") or {}


def gate_checks(gate: Facts) -> list[dict[str, Any]]:
    """The gate's numbers as rows: form, samples, the metrics before and after, and the verdict of the judging one."""
    rows = []
    for form, sets in (gate.get("forms") or {}).items():
        for name, outputs in sets.items():
            for output, new in outputs.items():
                old = ((gate.get("active") or {}).get(name) or {}).get(output) or {}
                compared = new.get("comparison") or {}
                facts = {"form": form, "set": name, "output": output, "rows": new.get("rows")}
                for metric, after in (new.get("metrics") or {}).items():
                    judging = metric == new.get("metric")
                    rows.append(
                        {
                            **facts,
                            "metric": metric,
                            "before": (old.get("metrics") or {}).get(metric),
                            "after": after,
                            "at_most": compared.get("at_most") if judging else None,
                            "allowed": compared.get("allowed") if judging else None,
                            "passed": bool(compared.get("holds")) if judging else None,
                        }
                    )
    return rows


def _causes(steps: Sequence[Facts]) -> dict[str, int]:
    """The number of skipped steps, by cause."""
    counts: dict[str, int] = {}
    for step in steps:
        if step.get("skipped"):
            cause = str(step.get("cause") or "cause not recorded")
            counts[cause] = counts.get(cause, 0) + 1
    return counts


def _links(job: Facts) -> dict[str, str]:
    """Links to the version that was made and to the one that it was made from."""
    ours = job.get("halfeven") or {}
    name, _, made = str(job.get("fine_tuned_model") or job.get("model") or "").partition("@")
    version = ours.get("version") or (made if job.get("fine_tuned_model") else None)
    links: dict[str, str] = {}
    if name and version:
        here = _version_path(name, version)
        links[f"{name}@{version}"] = here
        links["its parity report"] = f"{here}/report"
        links["its lineage"] = f"{here}/lineage"
    if name and ours.get("parent_version"):
        links[f"its parent {name}@{ours['parent_version']}"] = _version_path(name, ours["parent_version"])
    return links


def _version_path(name: str, version: object) -> str:
    return f"{_ROOT}v1/models/{quote(name, safe='')}/versions/{quote(str(version), safe='')}"


def _environment() -> Environment:
    environment = pages_of(Path(__file__).parent)
    environment.globals.update(WIDTH=WIDTH, HEIGHT=HEIGHT, REFRESH_S=REFRESH_S)
    environment.filters.update(number=number_text, measure=measure_text, moment=moment_text)
    return environment


def number_text(value: object) -> str:
    """Four significant digits; a dash for what is not a finite number."""
    known = finite(value)
    if known is None:
        return "–"
    return f"{known:,.0f}" if abs(known) >= 10_000 else f"{known:.4g}"


def measure_text(value: object, metric: object) -> str:
    """A share as percent where the metric is one."""
    known = finite(value)
    return f"{100 * known:.2f} %" if known is not None and metric in SHARES else number_text(value)


def moment_text(seconds: object) -> str:
    """Seconds since 1970 as UTC."""
    known = finite(seconds)
    try:
        return datetime.fromtimestamp(known, UTC).strftime("%Y-%m-%d %H:%M:%S") if known is not None else "–"
    except (OverflowError, OSError, ValueError):
        return "–"


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
