"""Finds the origin of a NaN in the module's own FP32 answers: the first node that makes a NaN of finite values.

±Inf in an answer is no fault (masked logits), nor is it one inside (additive masks); only an Inf that arithmetic
makes of finite values, on the way to a NaN, is. Runs in the child.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

# The node that makes it, "NaN" or "Inf", the node that first turns it into NaN.
Found = tuple[Node, str, Node]

# Give Inf from finite values on purpose: constants and masks.
SENTINELS = (
    "full",
    "full_like",
    "where",
    "masked_fill",
    "scalar_tensor",
    "fill",
    "fill_",
    "masked_fill_",
    "to",
)


def is_nan(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and bool(torch.isnan(value).any())


def nan_rows(value: Any, rows: int) -> list[int]:
    """The rows of an output that hold a NaN; all of them where its first axis is not the batch."""
    if not is_nan(value):
        return []
    if value.ndim == 0 or value.shape[0] != rows:
        return list(range(rows))
    return torch.isnan(value).reshape(rows, -1).any(1).nonzero().flatten().tolist()


def origin(run: GraphModule, inputs: Sequence[torch.Tensor]) -> Found | None:
    """The node of ``run`` (an unlifted program) that makes the NaN, and how; None where there is none.

    Weights and inputs that have a NaN or Inf themselves come before any op.
    """
    watch = _Watch(run)
    watch.run(*inputs)
    answers = run.graph.output_node().all_input_nodes
    nan = next((node for node in answers if watch.state[node] == "NaN"), None)
    if nan is None:
        return None
    while (before := next((n for n in nan.all_input_nodes if watch.state[n] == "NaN"), None)) is not None:
        nan = before
    ancestors = _ancestors(nan)
    makers = [node for node in run.graph.nodes if node in ancestors and watch.makes(node)]
    makers.sort(key=lambda node: node.op != "call_function")  # a mask may have Inf without being the cause
    maker = makers[0] if makers else nan
    return maker, watch.state[maker], nan


class _Watch(Interpreter):
    """Notes for every node whether its result holds a NaN, or only an Inf."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module, garbage_collect_values=True)
        self.state = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        state = [_state(item) for item in (value if isinstance(value, tuple | list) else [value])]
        self.state[n] = "NaN" if "NaN" in state else "Inf" if "Inf" in state else ""
        return value

    def makes(self, node: Node) -> bool:
        name = getattr(node.target, "_schema", None)
        on_purpose = name is not None and name.name.partition("::")[2] in SENTINELS
        dirty = any(self.state.get(before) for before in node.all_input_nodes)
        return bool(self.state[node]) and not dirty and not (on_purpose and self.state[node] == "Inf")


def _state(value: Any) -> str:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return ""
    return "NaN" if is_nan(value) else "Inf" if bool(torch.isinf(value).any()) else ""


def _ancestors(node: Node) -> set[Node]:
    found, stack = {node}, [node]
    while stack:
        for before in stack.pop().all_input_nodes:
            if before not in found:
                found.add(before)
                stack.append(before)
    return found


def sentence(name: str, rows: Sequence[int], found: Found | None, place: str, inputs: Sequence[str]) -> str:
    """``found`` as `origin` gives it; ``place`` the source line of its node; ``inputs`` the spec's names."""
    where = (
        f"output '{name}' is NaN for sample {', '.join(map(str, rows[:5]))}{' …' if len(rows) > 5 else ''}"
    )
    if found is None:
        return f"the FP32 model itself does not answer: {where}"
    maker, state, nan = found
    then = "" if maker is nan else f", which '{nan.name}' turns into NaN"
    if maker.op in ("get_attr", "placeholder"):
        what = f"weight '{maker.target}'"
        if maker.op == "placeholder":
            what = f"input '{inputs[maker.graph.find_nodes(op='placeholder').index(maker)]}'"
        blame = f"the {what} holds {state}{then}"
    else:
        blame = f"'{maker.name}' ({maker.target}){place} is the first to give {state}{then}"
    return f"the FP32 model itself does not answer: {where}; {blame}. No precision plan can correct that"
