"""What rounding does to each weight that is read in half; a weight that half cannot hold stays FP32.

Weights are rounded as torch's ``.to(half)`` does: to the nearest even, subnormal below 2⁻¹⁴ (fp16), zero below
2⁻²⁵, infinite from 65,520 on. Nothing is clamped: a weight whose largest number would become infinite, or
whose rounding error is out of proportion (`BUDGET`), is read in FP32 by every node, and the plan says why.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from ...models.program import duplicate, walk
from .dtypes import Typing
from .folding import attribute, fold_constants
from .operands import readers
from .plan import Kept, PrecisionPlan, foldable, is_mutable, op_name

BUDGET = 4.0  # ‖rounded − weight‖ ÷ ‖weight‖, in u: what rounds well stays under 1, what underflows does not


@dataclass(frozen=True, slots=True)
class Entry:
    """One weight. ``worst``: largest error ÷ largest magnitude; ``error_u``: norm of the errors ÷ norm, in u;
    shares are of its non-zero elements; ``saturated`` counts finite elements that become infinite."""

    weight: str
    elements: int
    worst: float
    error_u: float
    underflowed: float
    subnormal: float
    saturated: int

    @property
    def over_budget(self) -> bool:
        return self.saturated > 0 or not self.error_u <= BUDGET

    @property
    def reason(self) -> str:
        return f"the weight '{self.weight}' does not fit in half"

    @property
    def evidence(self) -> str:
        if self.saturated:
            return f"{self.saturated} of {self.elements} elements would become infinite"
        return (
            f"rounding error {self.error_u:.3g}u of its norm, {self.underflowed:.2%} of it would become zero"
        )

    def to_json(self) -> dict[str, Any]:
        told = asdict(self) | {"fp32": self.over_budget}
        return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in told.items()}


@dataclass(frozen=True, slots=True)
class Ledger:
    entries: tuple[Entry, ...]

    def to_json(self) -> list[dict[str, Any]]:
        return [entry.to_json() for entry in self.entries]


def weigh(
    module: GraphModule, plan: PrecisionPlan, example: Sequence[Tensor]
) -> tuple[Ledger, PrecisionPlan]:
    """The ledger of all weights that are read in half, and the plan with the readers of unfit ones in FP32.

    ``module`` is the prepared whole and stays as it is; ``example`` holds one tensor per input. What depends
    on weights alone and is computed at conversion (a transposed weight) stands under its node's name.
    """
    graph = fold_constants(duplicate(module), lambda node: foldable(plan, node))
    dtypes, nodes = Typing(graph, example).under(plan), dict(walk(graph))
    entries: dict[str, Entry] = {}
    kept: dict[str, Kept] = {}
    for node in graph.graph.nodes:
        weight = attribute(graph, str(node.target)) if node.op == "get_attr" else None
        if not isinstance(weight, Tensor) or not weight.is_floating_point():
            continue
        half = [name for name, dtype in readers(node, "", dtypes) if dtype == plan.dtype]
        if half and weight.dtype == torch.float32:
            entry = measure(_origin(module, str(node.target)), weight, plan.dtype)
            entries[entry.weight] = entry
            unfit = [n for n in half if entry.over_budget and n in plan.actions and not is_mutable(nodes[n])]
            kept |= {n: Kept(n, op_name(nodes[n]), entry.reason, entry.evidence) for n in unfit}
    return Ledger(tuple(entries.values())), plan.keeping(list(kept.values()))


def _origin(module: GraphModule, weight: str) -> str:
    """A weight's name; for what is computed from weights alone, theirs and the op's."""
    made = {f"folded_{node.name}": node for node in module.graph.nodes}.get(weight)
    if made is None:
        return weight
    leaves, stack = set[str](), [made]
    while stack:
        node = stack.pop()
        stack += node.all_input_nodes
        leaves |= {str(node.target)} if node.op == "get_attr" else set()
    return f"{', '.join(sorted(leaves))} ({made.name})"


def measure(name: str, weight: Tensor, half: torch.dtype) -> Entry:
    """What rounding ``weight`` (FP32) to ``half`` does to it."""
    with torch.no_grad():
        limits = torch.finfo(half)
        rounded = weight.to(half)
        saturated = int((rounded.isinf() & weight.isfinite()).sum())
        nonzero = int(torch.count_nonzero(weight))
        lost = nonzero - int(torch.count_nonzero(rounded))
        tiny = int(torch.count_nonzero(rounded.abs() < limits.smallest_normal)) - (weight.numel() - nonzero)
        finite = weight[weight.isfinite()]
        gap = (weight - rounded.float())[weight.isfinite()]
        largest, norm = float(finite.abs().max()) if finite.numel() else 0.0, _norm(finite)
        return Entry(
            name,
            weight.numel(),
            worst=float(gap.abs().max()) / largest if largest else 0.0,
            error_u=_norm(gap) / norm / (limits.eps / 2) if norm else 0.0,
            underflowed=lost / max(nonzero, 1),
            subnormal=max(tiny - lost, 0) / max(nonzero, 1),
            saturated=saturated,
        )


def _norm(tensor: Tensor) -> float:
    """In float64: squares of numbers near 1e-30 are nothing in FP32."""
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
