"""Integer and boolean outputs of a captured program that come from a step (`steps.py`): a rounding, a cast to integers
or a comparison, through shape and type ops and limits (clamp) alone."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from ...models.engines.arrays import to_torch
from .choosers import SHAPES, TYPES
from .steps import VALUES, Step, Stepped, step_of

aten = torch.ops.aten
_COMPARES = {getattr(aten, name) for name in ("gt", "ge", "lt", "le", "eq", "ne")}
_ROUNDS: dict[Any, str] = {aten.round: "round", aten.floor: "floor", aten.ceil: "floor", aten.trunc: "floor"}
_KEEPS_PLACES = {aten.clamp, aten.clamp_min, aten.clamp_max, aten.logical_not, *TYPES}


def find_stepped(module: GraphModule, outputs: Sequence[str]) -> list[Stepped[Node]]:
    """The outputs (by name, in the graph's order) that come from a step."""
    (result,) = module.graph.find_nodes(op="output")
    found = (_traced(name, value) for name, value in zip(outputs, result.args[0], strict=True))
    return [stepped for stepped in found if stepped is not None]


def _traced(output: str, value: Any) -> Stepped[Node] | None:
    path, node, cast = list[Node](), value, -1
    while isinstance(node, Node) and node.op == "call_function":
        packet = getattr(node.target, "overloadpacket", None)
        if packet in _COMPARES or packet in _ROUNDS:
            return Stepped(output, node, _ROUNDS.get(packet, "compare"), tuple(reversed(path)))
        if (
            packet in TYPES
            and _is_whole(node)
            and isinstance(node.args[0], Node)
            and not _is_whole(node.args[0])
        ):
            cast = len(path)
        elif packet not in SHAPES | _KEEPS_PLACES:
            break
        path.append(node)
        node = node.args[0]
    return Stepped(output, path[cast], "floor", tuple(reversed(path[:cast]))) if cast >= 0 else None


def _is_whole(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and not value.is_floating_point() and value.dtype != torch.bool


def steps_of(
    module: GraphModule, stepped: Sequence[Stepped[Node]], inputs: Sequence[np.ndarray]
) -> dict[str, Step]:
    """Run the original once; how far the values of each of these outputs are from their step, by name."""
    watching = _Watching(module, stepped)
    with torch.inference_mode():
        watching.run(*[to_torch(array.copy()) for array in inputs])
    return watching.steps


class _Watching(Interpreter):
    """The original, noting at every step how far the values are from it; the distances travel the output's shape ops."""

    def __init__(self, module: GraphModule, stepped: Sequence[Stepped[Node]]) -> None:
        super().__init__(module)
        self.steps: dict[str, Step] = {}
        self._stepped = stepped
        self._distances: dict[tuple[str, Node], Tensor] = {}
        self._largest: dict[str, float] = {}

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        for each in self._stepped:
            if n is each.node:
                self._begin(each)
            elif n in each.path:
                self._follow(each, n)
            if n is (each.path[-1] if each.path else each.node) and (each.output, n) in self._distances:
                self.steps[each.output] = Step(
                    self._distances[each.output, n].numpy(), self._largest[each.output]
                )
        return result

    def _begin(self, each: Stepped[Node]) -> None:
        args, _ = self.fetch_args_kwargs_from_env(each.node)
        step = step_of(each.kind, [np.asarray(value) for value in args[: VALUES[each.kind]]])
        self._largest[each.output] = step.largest
        self._distances[each.output, each.node] = torch.from_numpy(np.ascontiguousarray(step.distances))

    def _follow(self, each: Stepped[Node], node: Node) -> None:
        distances = self._distances[each.output, node.args[0]]  # type: ignore[index]
        if node.target.overloadpacket in SHAPES and distances.numel():  # type: ignore[union-attr]
            args, kwargs = self.fetch_args_kwargs_from_env(node)
            distances = node.target(distances, *args[1:], **kwargs)  # type: ignore[operator]
        self._distances[each.output, node] = distances
