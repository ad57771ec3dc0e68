"""The operations of a captured program, counted in one run: loops and branches as the inputs have them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from ..policy.operations import Counted, Operations
from .autocast.bodies import ran
from .autocast.dtypes import tensors_of


def program_operations(module: GraphModule, inputs: Sequence[Tensor]) -> Operations:
    """The operations of any execution of an original (`models.program.runnable`), estimated from one on ``inputs``."""
    counted = Counted()
    with torch.inference_mode():
        _Counting(module, counted).run(*[tensor.clone() for tensor in inputs])
    return counted.estimate(sum(tensor.numel() for tensor in inputs))


class _Counting(Interpreter):
    """Runs a program and counts its operations. Views give no elements."""

    def __init__(self, module: GraphModule, counted: Counted) -> None:
        super().__init__(module)
        self._counted = counted

    def run_node(self, n: Node) -> Any:
        if isinstance(n.target, HigherOrderOperator):
            args, _ = self.fetch_args_kwargs_from_env(n)
            return ran(n, args, "", self._run_body)
        result = super().run_node(n)
        if isinstance(n.target, OpOverload):
            name = n.target._schema.name.removeprefix("aten::")
            results = () if n.target.is_view else tensors_of(result)
            self._counted.add(name, self._shapes_read(n), [tensor.shape for tensor in results])
        return result

    def _run_body(self, body: GraphModule, prefix: str, operands: Sequence[Any]) -> Sequence[Any]:
        results = _Counting(body, self._counted).run(*operands)
        return results if isinstance(results, tuple | list) else (results,)

    def _shapes_read(self, node: Node) -> list[torch.Size]:
        read = map_arg((node.args, node.kwargs), lambda source: self.env[source])
        return [tensor.shape for tensor in tensors_of(read)]
