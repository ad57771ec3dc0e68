"""Half precision without half kernels: products in FP32 on half-rounded inputs, their result rounded.

On a CPU true half convolutions are up to a hundred times slower than FP32 ones. A product that accumulates
in FP32 and rounds once is what the kernels of a GPU do too; all other ops are cheap and run as they are.
"""

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import GraphModule, Interpreter
from torch.fx.node import map_aggregate

from ..models.program import runnable
from .policy import CUDA, Rule


class Emulation(Interpreter):
    """Runs a half program; every op on the lower-precision list computes in FP32 and rounds."""

    def __init__(self, program: ExportedProgram) -> None:
        self._graph: GraphModule = runnable(program)
        self._wide: dict[int, tuple[Tensor, Tensor]] = {}
        super().__init__(self._graph)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        weight = super().get_attr(target, args, kwargs)
        if isinstance(weight, Tensor) and weight.dtype in (torch.float16, torch.bfloat16):
            self._wide.setdefault(id(weight), (weight.float(), weight))  # widened once, not at every run
        return weight

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if not isinstance(target, OpOverload) or CUDA.rule(target) is not Rule.LOWER:
            return super().call_function(target, args, kwargs)
        halves: set[torch.dtype] = set()

        def widen(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.dtype not in (torch.float16, torch.bfloat16):
                return value
            halves.add(value.dtype)
            known = self._wide.get(id(value))
            return known[0] if known is not None else value.float()

        wide_args, wide_kwargs = map_aggregate((args, kwargs), widen)
        result = super().call_function(target, wide_args, wide_kwargs)
        if not halves:
            return result
        dtype = halves.pop()
        return map_aggregate(result, lambda value: value.to(dtype) if isinstance(value, Tensor) else value)
