"""An original program in FP64: what FP32 answers otherwise is its own noise."""

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_aggregate

from ....models.engines.arrays import to_numpy
from ...graph.backend import Observe
from .attention import attention
from .bodies import ran

_NO_FRACTION = 2.0**24  # from here on FP32 has whole numbers alone


class InDouble(Interpreter):
    """Runs an original program (`models.program.runnable`) with every FP32 tensor in FP64.

    A node without a kernel for FP64 runs in FP32. A result of 2²⁴ or more is rounded to FP32, which keeps no fraction
    beside it in whatever order it adds up: a score to which a mask adds −1e9 is gone in FP32, and FP64 would keep it.
    ``observe``: sees every floating result of the graph's own nodes.
    """

    def __init__(self, module: GraphModule, prefix: str = "", observe: Observe | None = None) -> None:
        super().__init__(module)
        self._prefix, self._observe = prefix, observe

    def run_node(self, n: Node) -> Any:
        result = self._ran(n)
        if self._observe and n.op == "call_function" and _is(result, torch.float64):
            self._observe(n.name, to_numpy(result))
        return result

    def _ran(self, n: Node) -> Any:
        if n.op != "call_function":
            return _widened(super().run_node(n)) if n.op != "output" else super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if isinstance(n.target, HigherOrderOperator):
            return ran(n, args, self._prefix, self._run_body)
        args, kwargs = map_aggregate((args, kwargs), _double_by_name)
        if n.target is torch.ops.aten.scaled_dot_product_attention.default:
            return attention(*args, **kwargs, rounding=_absorbed)  # its kernel adds the mask inside
        try:
            return map_aggregate(_widened(n.target(*args, **kwargs)), _absorbed)  # type: ignore[operator]
        except (RuntimeError, NotImplementedError):
            args, kwargs = map_aggregate(self.fetch_args_kwargs_from_env(n), _narrowed)
            return _widened(n.target(*args, **kwargs))  # type: ignore[operator]

    def _run_body(self, body: GraphModule, prefix: str, operands: Sequence[Any]) -> Sequence[Any]:
        return InDouble(body, prefix).run(*operands)


def _double_by_name(value: Any) -> Any:
    return torch.float64 if value == torch.float32 and isinstance(value, torch.dtype) else value


def _widened(value: Any) -> Any:
    return map_aggregate(value, lambda one: one.double() if _is(one, torch.float32) else one)


def _absorbed(value: Any) -> Any:
    if not _is(value, torch.float64) or not bool((large := value.abs() >= _NO_FRACTION).any()):
        return value
    return torch.where(large, value.float().double(), value)


def _narrowed(value: Any) -> Any:
    return value.float() if _is(value, torch.float64) else value


def _is(value: Any, dtype: torch.dtype) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dtype == dtype
