"""A captured FP32 program whose run can be changed at a node (`graph.original_graph.OriginalGraph`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Interpreter, Node

from ...models.engines.arrays import to_numpy, to_torch
from ...models.spec import ModelSpec
from ..graph.backend import GraphNode, Observe
from ..graph.original_graph import Visit
from ..prove import emulated
from ..question import Answers, Arrays
from .autocast.in_double import InDouble
from .program_graph import nodes_of


@dataclass(frozen=True)
class ProgramOriginal:
    """A captured program. ``module`` is prepared (`models.program.runnable`)."""

    module: GraphModule
    spec: ModelSpec

    def nodes(self) -> list[GraphNode]:
        return nodes_of(self.module)

    def watched(self, inputs: Arrays, visit: Visit) -> Arrays:
        def seen(run: "_Watched", node: Node, result: Tensor) -> None:
            visit(node.name, result, lambda changed: self._rest(run, inputs, node, changed))

        with torch.inference_mode():
            return self._named(_Watched(self.module, seen).run(*self._tensors(inputs)))

    def as_served(self, observe: Observe) -> Answers:
        def seen(run: "_Watched", node: Node, result: Tensor) -> None:
            observe(node.name, result)

        return emulated(self.spec, _Watched(self.module, seen))

    def otherwise(self, observe: Observe) -> Answers:
        return emulated(self.spec, InDouble(self.module, observe=observe))

    def _rest(self, run: "_Watched", inputs: Arrays, node: Node, changed: Tensor) -> Arrays:
        """The answers where ``node`` gave ``changed``. A node that writes into its input would spoil what later runs
        need: such a program runs again from the start."""
        if self._writes_in_place:
            known = {node: changed.clone()}
            return self._named(Interpreter(self.module).run(*self._tensors(inputs), initial_env=known))
        before = takewhile(lambda one: one is not node, self.module.graph.nodes)
        known = {**dict.fromkeys(before), **run.env, node: changed}
        return self._named(Interpreter(self.module).run(initial_env=known))

    @cached_property
    def _writes_in_place(self) -> bool:
        return any(map(_writes, self.module.graph.nodes))

    def _tensors(self, inputs: Arrays) -> list[Tensor]:
        return [to_torch(inputs[tensor.name].copy()) for tensor in self.spec.inputs]

    def _named(self, outputs: Sequence[Tensor]) -> Arrays:
        answers = zip(self.spec.outputs, outputs, strict=True)
        return {tensor.name: to_numpy(answer.to(tensor.type.torch)) for tensor, answer in answers}


def _writes(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


class _Watched(Interpreter):
    """``seen``: is told of every floating result of the graph's own nodes that another node reads, but for those that
    are written into an input."""

    def __init__(self, module: GraphModule, seen: Any) -> None:
        super().__init__(module)
        self._seen = seen

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        computed = n.op == "call_function" and n.users and not _writes(n)
        if computed and isinstance(result, Tensor) and result.is_floating_point():
            self._seen(self, n, result)
        return result
