"""Find the first tensor at which another run of a model, B, differs from the model, A, by more than rounding explains.

Each node of A is computed from the values that B has for its inputs, so an error of B counts at the node that makes it
and at no node behind. An error is relative to the largest magnitude of the tensor; of integers it is the share that
differs. What rounding explains is measured: the inputs are moved by a step of B's type, and the tensor moves with them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...models.files.json_fields import JsonFields
from ..gate.divergence import SENTINEL
from ..gate.parity import SENTINEL_LANDS
from ..graph.backend import GraphNode
from ..question import Arrays
from .units import ROUNDOFF

if TYPE_CHECKING:  # a program brings torch, which two files do not need
    from .onnx_side import OnnxSide
    from .program_side import ProgramSide

    Side = OnnxSide | ProgramSide

STEP = 2.0**-20  # the relative step of FP32: far above its rounding, far below what changes an answer
UNITS = 4.0  # steps that a node may err by
MOST_STEPS = 2.0**10  # an index or a threshold that a step moves explains no more than this
MOST = 0.25  # of the largest value, or of the indices: no rounding explains more
TIED = 0.02  # of the indices that are read from half: their scores tie


@dataclass(frozen=True, slots=True)
class Difference(JsonFields):
    """``error``: of the largest magnitude of A's tensor; ``explained``: what rounding explains, in the same measure."""

    tensor: str
    op: str
    error: float
    explained: float


@dataclass(frozen=True, slots=True)
class Compared:
    """``tensors``: how many both have; ``astray``: how many differ; ``first``: the first of them; ``values``: A's,
    each computed from those of B, and ``read``: what they were computed from."""

    tensors: int
    astray: int
    first: Difference | None
    values: Arrays
    read: Arrays


def compared(a: "Side", inputs: Arrays, theirs: Arrays, units: Mapping[str, float]) -> Compared:
    """``theirs``: B's tensors, called as A's; ``units``: the roundoff of each."""
    plain = a.tensors(inputs)
    read = {name for node in a.nodes for name in node.inputs}
    given = {
        name: array.astype(plain[name].dtype)
        for name, array in theirs.items()
        if name in plain and name in read and _is_alike(plain[name], array)
    }
    given = given if a.takes_others else {}
    steps = _steps(a.nodes, units)
    local = a.tensors(inputs, given) if given else plain
    of_inputs = {name: steps.get(tensor, STEP) for name, tensor in a.inputs.items()}
    nearby = a.tensors(moved(inputs, of_inputs), moved(given, steps))
    both, found, long = 0, list[Difference](), dict[str, int]()
    for node in a.nodes:
        name = node.name
        long[name] = 1 + max((long.get(one, 0) for one in node.inputs if one not in given), default=0)
        if name not in local or name not in theirs:
            continue
        both += 1
        error = _error(local[name], theirs[name], plain[name])
        noise = _noise(local[name], nearby[name], plain[name], steps[name])
        explained = min(UNITS * long[name] ** 0.5 * noise, MOST)
        if error > explained:
            is_float = _kind(local[name]) == "f"
            found.append(Difference(name, node.op, error if is_float else np.inf, explained))
    return Compared(both, len(found), found[0] if found else None, local, local | given)


def moved(arrays: Arrays, steps: Mapping[str, float]) -> dict[str, np.ndarray]:
    """The floating arrays, each element moved by its array's step of itself, up or down."""
    random = np.random.default_rng(0)

    def step(name: str, array: np.ndarray) -> np.ndarray:
        if array.dtype.kind != "f":
            return array
        by = steps.get(name, STEP) * random.choice((-1.0, 1.0), array.shape)
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(array * (1 + by), array.dtype)  # a product of scalars is a number

    return {name: step(name, array) for name, array in arrays.items()}


def _steps(nodes: Sequence[GraphNode], units: Mapping[str, float]) -> dict[str, float]:
    """The step of each tensor and input of A: of its own type in B, or the coarsest in which it is read there."""
    found = dict[str, float]()
    for node in reversed(nodes):
        own = found[node.name] = max(STEP, units.get(node.name, found.get(node.name, STEP)))
        for name in node.inputs:
            found[name] = max(own, found.get(name, STEP))
    return {name: max(step, units.get(name, STEP)) for name, step in found.items()}


def _noise(local: np.ndarray, nearby: np.ndarray, plain: np.ndarray, step: float) -> float:
    change = _error(local, nearby, plain)
    if _kind(local) != "f":
        return max(change, TIED) if step > STEP else change
    return min(max(step, change), MOST_STEPS * step)


def _is_alike(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and _kind(a) == _kind(b)


def _kind(array: np.ndarray) -> str:
    return "f" if array.dtype.name in ROUNDOFF else array.dtype.kind


def _error(a: np.ndarray, b: np.ndarray, plain: np.ndarray) -> float:
    """The largest difference, of the largest magnitude of ``a``; infinite where one is not finite and the other is, and
    where shapes or kinds differ. Of integers and booleans the share that differs. What is a sentinel in ``plain``, A's
    run on its own values, must land where the gate lets it land, and NaN must be NaN."""
    if not _is_alike(a, b):
        return np.inf
    if _kind(a) != "f":
        return float(np.mean(a != b)) if a.size else 0.0
    a, b, plain = (array.astype(np.float64) for array in (a, b, plain))
    sentinel = np.abs(plain if plain.shape == a.shape else a) >= SENTINEL
    if not np.all((np.sign(a[sentinel]) == np.sign(b[sentinel])) & (np.abs(b[sentinel]) >= SENTINEL_LANDS)):
        return np.inf
    a, b = a[~sentinel], b[~sentinel]
    numbers = np.isfinite(a)
    if not np.array_equal(a[~numbers], b[~numbers], equal_nan=True) or not np.isfinite(b[numbers]).all():
        return np.inf
    worst = np.abs(a[numbers] - b[numbers]).max(initial=0.0)
    scale = np.abs(a[numbers]).max(initial=0.0)
    return float(worst / scale) if scale else (np.inf if worst else 0.0)
