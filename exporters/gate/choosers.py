"""Ops that choose by comparing (topk, sort, argmax and their like), and what they chose from in one run.

An output is theirs where only shape and type ops lie between; it is found by walking back through the
whole graph. Choices inside the bodies of control flow are not looked for: those outputs must be equal.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from ...models.engines.arrays import to_torch
from .ties import Choice, lines_along

aten = torch.ops.aten
# Each with the place of its ``dim`` among the arguments, and which of its results are indices (None: itself).
_CHOOSERS: dict[Any, tuple[int, int | None]] = {
    aten.argmax.default: (1, None),
    aten.argmin.default: (1, None),
    aten.argsort.default: (1, None),
    aten.argsort.stable: (-1, None),
    aten.topk.default: (2, 1),
    aten.sort.default: (1, 1),
    aten.sort.stable: (-1, 1),
    aten.max.dim: (1, 1),
    aten.min.dim: (1, 1),
    aten.kthvalue.default: (2, 1),
    aten.median.dim: (1, 1),
}
# The operations whose dim is the last one unless it is given.
_LAST = {
    aten.topk.default,
    aten.sort.default,
    aten.sort.stable,
    aten.argsort.default,
    aten.argsort.stable,
    aten.kthvalue.default,
}
SHAPES = {
    getattr(aten, name)
    for name in (
        "view", "reshape", "_unsafe_view", "squeeze", "unsqueeze", "permute", "transpose", "t", "flatten",
        "unflatten", "select", "slice", "narrow", "expand", "movedim", "flip", "numpy_T",
    )
}  # fmt: skip
TYPES = {
    getattr(aten, name)
    for name in (
        "to", "_to_copy", "type_as", "clone", "contiguous", "alias", "detach", "detach_", "lift_fresh_copy",
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tied:
    """An output whose integers are the indices that ``chooser`` gave; ``path`` leads from it to the output."""

    output: str
    chooser: Node
    path: tuple[Node, ...]


def find_tied(module: GraphModule, outputs: Sequence[str]) -> list[Tied]:
    """The outputs (by name, in the graph's order) that come from an op which chooses by comparing."""
    (result,) = module.graph.find_nodes(op="output")
    found = (_traced(name, value) for name, value in zip(outputs, result.args[0], strict=True))
    return [tied for tied in found if tied is not None]


def compared_by(node: Node) -> Node | None:
    """The operation that chose the indices that this node gives; None where it gives something else."""
    if node.target in _CHOOSERS:
        return node if _CHOOSERS[node.target][1] is None else None
    if not _takes_one(node) or not isinstance(chooser := node.args[0], Node):
        return None
    return chooser if chooser.target in _CHOOSERS and _CHOOSERS[chooser.target][1] == node.args[1] else None


def compared(run: Interpreter, chooser: Node) -> tuple[Tensor, int]:
    """The values that the operation compares in this run, and the axis along which it does."""
    args, kwargs = run.fetch_args_kwargs_from_env(chooser)
    dim = _dim(chooser, args, kwargs)
    return (args[0].reshape(-1), 0) if dim is None else (args[0], dim)


def _traced(output: str, value: Any) -> Tied | None:
    path: list[Node] = []
    node = value
    while isinstance(node, Node) and node.op == "call_function":
        if node.target in _CHOOSERS:
            wanted = _CHOOSERS[node.target][1]
            taken = path[-1].args[1] if path and _takes_one(path[-1]) else None
            return Tied(output, node, tuple(reversed(path))) if taken == wanted else None
        if not (_takes_one(node) or getattr(node.target, "overloadpacket", None) in SHAPES | TYPES):
            return None
        path.append(node)
        node = node.args[0]
    return None


def _takes_one(node: Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def choices(module: GraphModule, tied: Sequence[Tied], inputs: Sequence[np.ndarray]) -> dict[str, Choice]:
    """Run the original once; what it compares for each tied output, by name."""
    watching = Watching(module, tied)
    with torch.inference_mode():
        watching.run(*[to_torch(array.copy()) for array in inputs])
    return watching.choices


class Watching(Interpreter):
    """The original, noting at every chooser what it compares; places travel the output's own shape ops."""

    def __init__(self, module: GraphModule, tied: Sequence[Tied]) -> None:
        super().__init__(module)
        self.choices: dict[str, Choice] = {}
        self._tied = tied
        self._places: dict[tuple[str, Node], Tensor] = {}
        self._rows: dict[
            str, tuple[np.ndarray, bool]
        ] = {}  # what was compared, and whether it is of integers

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        for tied in self._tied:
            if n is tied.chooser:
                self._begin(tied, result)
            elif n in tied.path:
                self._follow(tied, n)
            if n is (tied.path[-1] if tied.path else tied.chooser):
                self._end(tied, result)
        return result

    def _begin(self, tied: Tied, result: Any) -> None:
        args, kwargs = self.fetch_args_kwargs_from_env(tied.chooser)
        values, which = args[0], _CHOOSERS[tied.chooser.target][1]
        indices = result if which is None else result[which]
        dim = _dim(tied.chooser, args, kwargs)
        scores = values.double().numpy()
        if dim is None:
            rows, lines = scores.reshape(1, -1), np.zeros(indices.shape, np.int64)
        else:
            rows, lines = lines_along(scores, indices.numpy(), dim)
        self._rows[tied.output] = rows, not values.is_floating_point()
        self._places[tied.output, tied.chooser] = torch.stack([torch.tensor(lines).view_as(indices), indices])

    def _follow(self, tied: Tied, node: Node) -> None:
        source = self._places[tied.output, node.args[0]]  # type: ignore[index]
        if not _takes_one(node) and node.target.overloadpacket in SHAPES:  # type: ignore[union-attr]
            args, kwargs = self.fetch_args_kwargs_from_env(node)
            source = torch.stack([node.target(part, *args[1:], **kwargs) for part in source])  # type: ignore[operator]
        self._places[tied.output, node] = source

    def _end(self, tied: Tied, result: Any) -> None:
        if not isinstance(result, Tensor) or result.is_floating_point():
            return
        rows, integral = self._rows[tied.output]
        lines, chosen = self._places[tied.output, tied.path[-1] if tied.path else tied.chooser]
        self.choices[tied.output] = Choice(
            rows, lines.reshape(-1).numpy(), chosen.reshape(-1).numpy(), integral
        )


def _dim(chooser: Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    place, _ = _CHOOSERS[chooser.target]
    default = -1 if chooser.target in _LAST else None
    if "dim" in kwargs:
        return kwargs["dim"]
    return args[place] if 0 <= place < len(args) else default
