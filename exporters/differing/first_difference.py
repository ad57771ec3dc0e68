"""Find the first tensor at which another run of a model, B, differs from the model, A, by more than rounding explains.

Each node of A is computed from the values that B has for its inputs, so an error of B counts at the node that makes it
and at no node behind. An error is relative to the largest magnitude of the tensor, and then of each slice to the slice,
as the gate judges slices; of integers it is the share that differs, of which none may differ by more than 1 that does
not tie. What rounding explains is measured: the inputs are moved by a step of B's type, and the tensor moves with them.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from ...models.files.json_fields import JsonFields
from ..graph.backend import GraphNode
from ..question import Arrays
from .tensor_error import error_of, is_alike, is_far, is_rounded, lost_part, parts_of

if TYPE_CHECKING:  # a program brings torch, which two files do not need
    from .onnx_side import OnnxSide
    from .program_side import ProgramSide

    Side = OnnxSide | ProgramSide

STEP = 2.0**-20  # the relative step of FP32: far above its rounding, far below what changes an answer
UNITS = 4.0  # steps that a node may err by
MOST_STEPS = 2.0**10  # an index or a threshold that a step moves explains no more than this
MOST = 0.25  # of the largest value, or of the indices: no rounding explains more
TIED = 0.02  # of the indices that are read from half: their scores tie
NO_NODE = "no node"  # makes an output that is an input or a weight
DRAWS = 8  # runs with moved inputs that show which integers tie


@dataclass(frozen=True, slots=True)
class Difference(JsonFields):
    """``error``: of the largest magnitude of A's tensor; ``explained``: what rounding explains, in the same measure.
    ``part``: an axis and a place along it, where only this slice differs: both are of its own root mean square."""

    tensor: str
    op: str
    error: float
    explained: float
    part: tuple[int, int] | None = None


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
    made = {node.name for node in a.nodes}
    # A is asked with its own inputs and weights: only what a node makes is given in place of A's.
    read = {name for node in a.nodes for name in node.inputs} & made - {*a.inputs.values()}
    given = {
        name: array.astype(plain[name].dtype)
        for name, array in theirs.items()
        if name in plain and name in read and is_alike(plain[name], array)
    }
    given = given if a.takes_others else {}
    unmade = [GraphNode(name, NO_NODE, ()) for name in dict.fromkeys(a.outputs.values()) if name not in made]
    nodes = [*unmade, *a.nodes]
    steps = _steps(nodes, units)
    local = a.tensors(inputs, given) if given else plain
    of_inputs = {name: steps.get(tensor, STEP) for name, tensor in a.inputs.items()}
    nearby = a.tensors(moved(inputs, of_inputs), moved(given, steps))

    @cache
    def draws() -> list[Arrays]:
        wide, wide_inputs = ({name: UNITS * by for name, by in one.items()} for one in (steps, of_inputs))
        seeds = range(1, DRAWS + 1)
        return [a.tensors(moved(inputs, wide_inputs, one), moved(given, wide, one)) for one in seeds]

    both, found, long = 0, list[Difference](), dict[str, int]()
    for node in nodes:
        name = node.name
        long[name] = 1 + max((long.get(one, 0) for one in node.inputs if one not in given), default=0)
        if name not in local or name not in theirs:
            continue
        both += 1
        room = UNITS * long[name] ** 0.5
        arrays = (local[name], theirs[name], nearby[name], plain[name])
        if difference := _difference(node, *arrays, steps[name], room, draws):
            found.append(difference)
    return Compared(both, len(found), found[0] if found else None, local, local | given)


def before(a: "Side", tensor: str, theirs: Collection[str]) -> tuple[list[str], int]:
    """The nearest tensors before ``tensor`` that are inputs or in ``theirs``, the names of B's tensors; and how many
    tensors of A lie between them and ``tensor``. Constants do not count: nothing computes them."""
    reads = {node.name: node.inputs for node in a.nodes if node.inputs}
    near, hidden, waiting = dict[str, None](), set[str](), [*reads.get(tensor, ())]
    while waiting:
        name = waiting.pop(0)
        if name in theirs or name in a.inputs.values():
            near[name] = None
        elif name in reads and name not in hidden:
            hidden.add(name)
            waiting += reads[name]
    return list(near), len(hidden)


def _difference(
    node: GraphNode,
    local: np.ndarray,
    theirs: np.ndarray,
    nearby: np.ndarray,
    plain: np.ndarray,
    step: float,
    room: float,
    draws: Callable[[], Sequence[Arrays]],
) -> Difference | None:
    """The difference of one tensor: of the whole, of a slice, or of an integer. ``draws``: A with moved inputs, which
    only far integers ask for."""
    error = error_of(local, theirs, plain)
    explained = min(room * _noise(local, nearby, plain, step), MOST)
    if error > explained:
        return Difference(node.name, node.op, error if is_rounded(local) else np.inf, explained)
    if part := lost_part(local, theirs, nearby, plain, step, room):
        return Difference(node.name, node.op, part.error, part.explained, (part.axis, part.index))
    if error and is_far(local, theirs, (draw[node.name] for draw in draws())):
        return Difference(node.name, node.op, np.inf, explained)
    return None


def moved(arrays: Arrays, steps: Mapping[str, float], seed: int = 0) -> dict[str, np.ndarray]:
    """The floating and complex arrays, each part of an element moved by its array's step of itself, up or down."""
    random = np.random.default_rng(seed)

    def step(name: str, array: np.ndarray) -> np.ndarray:
        if array.dtype.kind == "c":
            made = np.empty_like(array)
            made.real, made.imag = step(name, parts_of(array))
            return made
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
    change = error_of(local, nearby, plain)
    if not is_rounded(local):
        return max(change, TIED) if step > STEP else change
    return min(max(step, change), MOST_STEPS * step)
