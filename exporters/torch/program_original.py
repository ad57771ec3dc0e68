"""A captured FP32 program whose run can be changed at a node (`graph.original_graph.OriginalGraph`)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from ...models.engines.arrays import floats_of, to_numpy, to_torch
from ...models.spec.spec import ModelSpec
from ..gate.steppers import Watched, rest_of_run
from ..graph.backend import GraphNode, Observe
from ..graph.original_graph import Visit
from ..question import Answers, Arrays
from .autocast.in_double import InDouble
from .program_answers import emulated
from .program_graph import nodes_of


@dataclass(frozen=True)
class ProgramOriginal:
    """A captured program. ``module`` is prepared (`models.program.runnable`)."""

    module: GraphModule
    spec: ModelSpec

    def nodes(self) -> list[GraphNode]:
        return nodes_of(self.module)

    def makers(self) -> dict[str, str]:
        given = self.module.graph.output_node().args[0]
        assert isinstance(given, tuple | list)
        pairs = zip(self.spec.outputs, given, strict=True)
        return {tensor.name: node.name for tensor, node in pairs if isinstance(node, Node)}

    def watched(self, inputs: Arrays, visit: Visit) -> Arrays:
        def seen(run: Interpreter, node: Node, result: Tensor) -> None:
            def rest(changed: np.ndarray) -> Arrays:
                tensor = torch.from_numpy(np.array(changed)).to(result.dtype).reshape(result.shape)
                return self._named(rest_of_run(self.module, run, self._tensors(inputs), node, tensor))

            if result.is_floating_point():
                visit(node.name, floats_of(result), rest)

        with torch.inference_mode():
            return self._named(Watched(self.module, seen).run(*self._tensors(inputs)))

    def as_served(self, observe: Observe) -> Answers:
        def seen(run: Interpreter, node: Node, result: Tensor) -> None:
            if result.is_floating_point():
                observe(node.name, floats_of(result))

        return emulated(self.spec, Watched(self.module, seen))

    def otherwise(self, observe: Observe) -> Answers:
        return emulated(self.spec, InDouble(self.module, observe=observe))

    def _tensors(self, inputs: Arrays) -> list[Tensor]:
        return [to_torch(inputs[tensor.name].copy()) for tensor in self.spec.inputs]

    def _named(self, outputs: Sequence[Tensor]) -> Arrays:
        answers = zip(self.spec.outputs, outputs, strict=True)
        return {tensor.name: to_numpy(answer.to(tensor.type.torch)) for tensor, answer in answers}
