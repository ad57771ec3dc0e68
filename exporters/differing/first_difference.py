"""Find the first tensor at which two runs of one model, A and B, differ by more than rounding explains.

An error is relative to the largest magnitude of A's tensor. What rounding explains is measured on A itself: its inputs
are moved by a known small step, and a tensor may err by as many units of B's type as it is moved by steps. So a tensor
behind a difference of nearly equal numbers may err more than one behind a product.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..gate.divergence import SENTINEL
from ..gate.parity import SENTINEL_LANDS
from ..gate.verdict import finite
from ..graph.backend import GraphNode
from ..question import Arrays

STEP = (
    2.0**-20
)  # the relative step of the inputs: far above FP32's rounding, far below what changes an answer
UNITS = 64.0  # of the type's rounding that a tensor may err by
CALM = 0.25  # of that: what the inputs of the first tensor may err by
MOST_STEPS = 2.0**10  # an index or a threshold that a step moves explains no more than this
FP32 = 2.0**-24


@dataclass(frozen=True, slots=True)
class Difference:
    """``error``: of the largest magnitude of A's tensor; ``explained``: what rounding explains, in the same measure."""

    tensor: str
    op: str
    error: float
    explained: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"error": finite(self.error)}


@dataclass(frozen=True, slots=True)
class Compared:
    """``tensors``: how many both have; ``astray``: how many differ; ``first``: the first whose inputs do not."""

    tensors: int
    astray: int
    first: Difference | None


def moved(inputs: Arrays) -> dict[str, np.ndarray]:
    """The floating inputs, each element moved by `STEP` of itself, up or down."""
    random = np.random.default_rng(0)

    def step(array: np.ndarray) -> np.ndarray:
        if array.dtype.kind != "f":
            return array
        return (array * (1 + STEP * random.choice((-1.0, 1.0), array.shape))).astype(array.dtype)

    return {name: step(array) for name, array in inputs.items()}


def compared(
    nodes: Sequence[GraphNode],
    ours: Arrays,
    ours_moved: Arrays,
    theirs: Arrays,
    roundoff: Mapping[str, float],
) -> Compared:
    """``nodes``: one for each tensor of A and called as it, in the order in which they run; ``ours``, ``ours_moved``:
    A's tensors, without and with moved inputs; ``theirs``: B's; ``roundoff``: that of B's computation, by tensor."""
    share, inputs, found = dict[str, float](), dict[str, float](), dict[str, Difference]()
    both = 0
    for node in nodes:
        name = node.name
        share[name] = inputs[name] = max((share.get(one, 0.0) for one in node.inputs), default=0.0)
        if name not in ours or name not in theirs:
            continue  # what B does not have passes the error of its inputs on
        both += 1
        error = _error(ours[name], theirs[name])
        steps = max(1.0, _error(ours[name], ours_moved[name]) / STEP)
        explained = UNITS * roundoff.get(name, FP32) * min(steps, MOST_STEPS)
        share[name] = error / explained
        if error > explained:
            found[name] = Difference(name, node.op, error, explained)
    first = next((one for name, one in found.items() if inputs[name] <= CALM), None)
    return Compared(both, len(found), first or next(iter(found.values()), None))


def _error(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference, of the largest magnitude of ``a``; infinite where one is not finite and the other is, and
    where shapes, integers or booleans differ. What is a sentinel in ``a`` must land where the gate lets it land, and
    NaN must be NaN."""
    if a.shape != b.shape:
        return np.inf
    if a.dtype.kind != "f":
        return 0.0 if np.array_equal(a, b) else np.inf
    a, b = a.astype(np.float64), b.astype(np.float64)
    sentinel, judged = np.abs(a) >= SENTINEL, np.abs(a) < SENTINEL
    if not np.all((np.sign(a[sentinel]) == np.sign(b[sentinel])) & (np.abs(b[sentinel]) >= SENTINEL_LANDS)):
        return np.inf
    if not (np.isfinite(b[judged]).all() and np.isnan(b[np.isnan(a)]).all()):
        return np.inf
    gaps, scale = np.abs(a[judged] - b[judged]), np.abs(a[judged]).max(initial=0.0)
    worst = float(gaps.max(initial=0.0))
    return worst / float(scale) if scale else (np.inf if worst else 0.0)
