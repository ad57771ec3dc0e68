"""The range of every tensor of an original program on real samples: one pass, no tensor is kept.

Floating tensors only: token ids are not magnitudes. Numbers of 1e9 or more can only be a mask, and are counted
separately, as are NaN and infinities.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_aggregate

from ...models.engines.arrays import to_numpy
from ...models.program import walk
from ..policy.classes import Trait, class_of, has
from ..torch.autocast.bodies import ran
from ..torch.autocast.dtypes import tensors_of
from .guards import aten_name, find_guards, is_view
from .ranges import Limits, NodeProfile, Profile, RangeCollector

_MEASURED = (torch.float32, torch.float16, torch.bfloat16)  # float64 never takes part, as in autocast


def profile(module: GraphModule, batches: Iterable[Sequence[Tensor]], half: str = "fp16") -> Profile:
    """Run a prepared original program (`models.program.runnable`) on batches of inputs and measure every node."""
    collectors: dict[str, _Measured] = {}
    ran = set[str]()
    count = 0
    with torch.inference_mode():
        for batch in batches:
            count += 1
            _Profiler(module, collectors, ran, Limits.of(half)).run(*batch)
    collectors = {name: collector for name, collector in collectors.items() if collector.seen}
    nodes = {name: _profiled(name, node, collectors) for name, node in walk(module) if name in collectors}
    idle = [name for name, node in walk(module) if isinstance(node.target, OpOverload) and name not in ran]
    return Profile(half, count, nodes, find_guards(module, half), tuple(idle))


@dataclass(slots=True)
class _Measured(RangeCollector):
    """The range of a node's result, with the figures that depend on its op."""

    reduces: int = 1
    scores: float = 0.0


def _profiled(name: str, node: Node, collectors: Mapping[str, _Measured]) -> NodeProfile:
    prefix, collector = name.removesuffix(node.name), collectors[name]
    reads = tuple(read for source in node.all_input_nodes if (read := prefix + source.name) in collectors)
    return NodeProfile(
        name, aten_name(node) or node.op, reads, collector.range(), collector.reduces, collector.scores
    )


class _Profiler(Interpreter):
    """Runs a program and measures every node's result."""

    def __init__(
        self,
        module: GraphModule,
        collectors: dict[str, _Measured],
        ran: set[str],
        limits: Limits,
        prefix: str = "",
    ) -> None:
        super().__init__(module)
        self._collectors, self._ran, self._limits, self._prefix = collectors, ran, limits, prefix

    def run_node(self, n: Node) -> Any:
        if isinstance(n.target, HigherOrderOperator):
            args, _ = self.fetch_args_kwargs_from_env(n)
            result = ran(n, args, self._prefix, self._run_body)
        else:
            result = super().run_node(n)
        known = n.op == "get_attr" and self._prefix + n.name in self._collectors  # the same in every batch
        if n.op != "output" and not known:
            self._measure(n, result)
        tensors = list(tensors_of(result))
        if not tensors or any(tensor.numel() for tensor in tensors):
            self._ran.add(self._prefix + n.name)
        return result

    def _run_body(self, body: GraphModule, prefix: str, operands: Sequence[Any]) -> Sequence[Any]:
        results = _Profiler(body, self._collectors, self._ran, self._limits, prefix).run(*operands)
        return results if isinstance(results, tuple | list) else (results,)

    def _measure(self, node: Node, result: Any) -> None:
        tensors = _floats(result)
        if not tensors:
            return
        collector = self._collectors.setdefault(self._prefix + node.name, _Measured(self._limits))
        source = node.args[0] if node.args else None
        parent = self._collectors.get(self._prefix + source.name) if isinstance(source, Node) else None
        held = self.env.get(source) if isinstance(source, Node) and is_view(node) else None
        if parent is not None and _holds_all(tensors[0], held):
            collector.of = parent
            return
        for tensor in tensors:
            collector.add(to_numpy(tensor))
        if isinstance(node.target, OpOverload):
            self._measure_sums(node, collector, tensors[0])

    def _measure_sums(self, node: Node, collector: _Measured, result: Tensor) -> None:
        name = aten_name(node)
        args, _ = self.fetch_args_kwargs_from_env(node)
        if has(name, Trait.PRODUCT):
            left = args[1] if class_of(name).name == "product and sum" else args[0]
            collector.reduces = max(collector.reduces, left.shape[-1])
        elif "conv" in name and isinstance(args[1], Tensor):
            collector.reduces = max(collector.reduces, args[1].numel() // args[1].shape[0])
        elif has(name, Trait.REDUCES):
            source = args[0]
            same = source.numel() == result.numel()
            length = source.shape[-1] if same and source.ndim else source.numel() // max(result.numel(), 1)
            collector.reduces = max(collector.reduces, length)
        elif has(name, Trait.ATTENTION):
            collector.scores = max(collector.scores, _largest_score(node, args))


def _floats(values: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def look(value: Any) -> None:
        if isinstance(value, Tensor) and value.dtype in _MEASURED:
            found.append(value)

    map_aggregate(values, look)
    return found


def _holds_all(view: Tensor, source: Any) -> bool:
    """True if a view holds every element of its source (an expanded one each as often)."""
    return isinstance(source, Tensor) and view.dtype == source.dtype and view.numel() >= source.numel() > 0


def _largest_score(node: Node, args: Sequence[Any]) -> float:
    """Cauchy and Schwarz: no score is larger than the longest query times the longest key times the scale."""
    query, key = args[0].float(), args[1].float()
    scale = node.kwargs.get("scale") or query.shape[-1] ** -0.5
    longest = (torch.linalg.vector_norm(rows, dim=-1).max() for rows in (query, key) if rows.numel())
    return math.prod(float(length) for length in longest) * float(scale)  # type: ignore[arg-type]
