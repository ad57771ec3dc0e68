"""The divergence curve: the error of a half at each node, and the first node whose error is too large.

Both programs answer one batch. Of every node at most 4,096 elements of the original's result are held (fewer
in a long graph: 64 MiB in all), at places drawn once; the half's are compared as they come. An error is in
units of u times the largest magnitude of that node's result, sentinels left out.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...models.files.json_fields import JsonFields
from ..graph.backend import GraphNode, Observe
from ..inputs.draws import raw_draws
from .divergence import SENTINEL

Run = Callable[[Observe], object]

HELD_BYTES = 64 << 20
MAX_HELD = 4096  # elements of one result
MIN_HELD = 64
MAX_TIMES = 8  # of one node: a loop's body runs more often
MAX_POINTS = 512
ASTRAY_U, CALM_U = 64.0, 16.0


@dataclass(frozen=True, slots=True)
class Point(JsonFields):
    """One node: its error in u (infinite where ``lost``: the half is not finite where the original is)."""

    node: str
    op: str
    error_u: float
    lost: bool


@dataclass(frozen=True, slots=True)
class Curve:
    """The points in the graph's order, and the first astray: one above 64u whose inputs are all within 16u,
    or not finite where its inputs are.
    """

    points: tuple[Point, ...]
    first: Point | None

    def to_json(self) -> dict[str, Any]:
        """The curve with at most 512 points, the worst of each stretch."""
        stretches = np.array_split(np.arange(len(self.points)), min(len(self.points), MAX_POINTS) or 1)
        worst = (max(stretch, key=lambda i: self.points[i].error_u) for stretch in stretches if len(stretch))
        return {
            "nodes": len(self.points),
            "astray_u": ASTRAY_U,
            "points": [{"at": int(i), **self.points[i].to_json()} for i in worst],
            "first": self.first and {"at": self.points.index(self.first), **self.first.to_json()},
        }


def divergence_curve(nodes: Sequence[GraphNode], original: Run, half: Run, u: float) -> Curve:
    """Run ``original`` and then ``half``, each with a tap that sees (node name, floating result).

    ``nodes``: in the order in which they run.
    """
    held = max(MIN_HELD, min(MAX_HELD, HELD_BYTES // (4 * max(len(nodes), 1))))
    notes = _Notes(held)
    original(notes.hold)
    notes.times.clear()
    half(notes.compare)
    points = [
        Point(
            node.name,
            node.op,
            math.inf if node.name in notes.lost else notes.errors[node.name] / u,
            node.name in notes.lost,
        )
        for node in nodes
        if node.name in notes.errors
    ]
    return Curve(tuple(points), _first_astray(nodes, {point.node: point for point in points}))


@dataclass(frozen=True, slots=True)
class _Held:
    """Some elements of a result of the original; ``scale`` and ``beyond`` are of all of them."""

    elements: np.ndarray
    scale: float
    beyond: int


class _Notes:
    """The original's results of the nodes, and the half's relative errors there."""

    def __init__(self, held: int) -> None:
        self.errors: dict[str, float] = {}
        self.lost: set[str] = set()
        self.times: Counter[str] = Counter()
        self._held, self._free = held, HELD_BYTES
        self._original: dict[tuple[str, int], _Held] = {}
        self._places: dict[int, np.ndarray] = {}

    def hold(self, name: str, result: np.ndarray) -> None:
        if (key := self._key(name)) is not None:
            size = np.abs(result)
            beyond = ~(size < SENTINEL)
            scale = float(np.where(beyond, 0, size).max(initial=0.0))
            some = self._some(result).copy()
            self._free -= some.nbytes
            if self._free >= 0:  # what comes when all is used up has no point on the curve
                self._original[key] = _Held(some, scale, int(beyond.sum()))

    @np.errstate(invalid="ignore")
    def compare(self, name: str, result: np.ndarray) -> None:
        key = self._key(name)
        original = None if key is None else self._original.pop(key, None)
        if original is None or (half := self._some(result)).shape != original.elements.shape:
            return
        judged = np.abs(original.elements) < SENTINEL
        error = np.abs(half.astype(np.float64) - original.elements)[judged]
        worst = float(np.nan_to_num(error, nan=math.inf).max(initial=0.0))
        relative = worst / original.scale if original.scale else (math.inf if worst else 0.0)
        self.errors[name] = max(self.errors.get(name, 0.0), relative)
        if np.count_nonzero(~np.isfinite(result)) > original.beyond or not math.isfinite(worst):
            self.lost.add(name)

    def _key(self, name: str) -> tuple[str, int] | None:
        self.times[name] += 1
        return (name, self.times[name]) if self.times[name] <= MAX_TIMES else None

    def _some(self, result: np.ndarray) -> np.ndarray:
        flat = result.reshape(-1)
        if flat.size <= self._held:
            return flat
        if flat.size not in self._places:
            self._places[flat.size] = raw_draws(flat.size, self._held)[0].astype(np.int64) % flat.size
        return flat[self._places[flat.size]]


def _first_astray(nodes: Sequence[GraphNode], points: Mapping[str, Point]) -> Point | None:
    astray = [point for point in points.values() if point.lost or point.error_u > ASTRAY_U]
    if not astray:
        return None
    inputs = _largest_inputs(nodes, points)
    starts = [
        point
        for point in astray
        if (inputs[point.node] <= CALM_U or (point.lost and math.isfinite(inputs[point.node])))
    ]
    return (starts or astray)[0]


def _largest_inputs(nodes: Sequence[GraphNode], points: Mapping[str, Point]) -> dict[str, float]:
    """The largest error among each node's inputs; what has no error of its own passes theirs on."""
    seen: dict[str, float] = {}
    found: dict[str, float] = {}
    for node in nodes:
        found[node.name] = max((seen.get(name, 0.0) for name in node.inputs), default=0.0)
        seen[node.name] = points[node.name].error_u if node.name in points else found[node.name]
    return found
