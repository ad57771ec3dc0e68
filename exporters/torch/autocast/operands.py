"""The operands of a control-flow op's bodies: each captured tensor in the dtypes in which they read it.

A weight is captured as an operand. Cast inside the body it would be cast at every iteration of a loop and could not be
folded; so the cast is done once, before the op, and the operand is handed over in half, in FP32, in both (as two
operands), or, where no body reads it, not at all.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Node

from .bodies import prefixes
from .dtypes import Dtypes


@dataclass(frozen=True, slots=True)
class _Layout:
    """Positions among an op's arguments: captured operands, what bodies get before them, loop-carried state."""

    captured: int
    before: tuple[int, ...] = ()
    state: int | None = None


_LAYOUTS: Mapping[str, _Layout] = {
    "cond": _Layout(3),
    "while_loop": _Layout(3, before=(2,), state=2),
    "scan": _Layout(3, before=(1, 2), state=1),
    "map_impl": _Layout(2, before=(1,)),
}


def is_control_flow(node: Node) -> bool:
    return isinstance(node.target, HigherOrderOperator) and node.target.name() in _LAYOUTS


def captured_at(node: Node) -> int:
    return _layout(node).captured


def state_at(node: Node) -> int | None:
    return _layout(node).state


@dataclass(frozen=True, slots=True)
class CapturedOperand:
    """A captured operand: the dtypes in which the bodies read it, its own first."""

    operand: Any
    dtypes: tuple[torch.dtype, ...]

    @property
    def count(self) -> int:
        """The number of operands of the call that stand for this captured operand."""
        return len(self.dtypes) if isinstance(self.operand, Tensor) else 1

    def versions(self, cast: Callable[[Tensor, torch.dtype], Tensor]) -> list[Any]:
        if not isinstance(self.operand, Tensor):
            return [self.operand]
        return [cast(self.operand, dtype) for dtype in self.dtypes]


def captured(node: Node, args: Sequence[Any], prefix: str, dtypes: Dtypes) -> list[CapturedOperand]:
    """The captured operands of a control-flow op, with the dtypes in which its bodies read them."""
    layout, found = _layout(node), []
    first = sum(len(args[i]) for i in layout.before)
    for index, operand in enumerate(args[layout.captured]):
        wanted = set[torch.dtype]()
        for body, name in _bodies(node, prefix):
            wanted |= read_in(_placeholder(body, first + index), name, dtypes)
        own = getattr(operand, "dtype", None)
        found.append(
            CapturedOperand(operand, tuple(sorted(wanted, key=lambda dtype: (dtype != own, str(dtype)))))
        )
    return found


def unpacked(given: Sequence[CapturedOperand], flat: Sequence[Any]) -> Iterator[list[Any]]:
    """The versions of each captured operand among the arguments of a body."""
    rest = iter(flat)
    for one in given:
        yield [next(rest) for _ in range(one.count)]


def read_in(source: Node, prefix: str, dtypes: Dtypes) -> set[torch.dtype]:
    """The dtypes in which a value is read by the nodes of its graph, and by those of their bodies."""
    return {dtype for _, dtype in readers(source, prefix, dtypes)}


def readers(source: Node, prefix: str, dtypes: Dtypes) -> Iterator[tuple[str, torch.dtype]]:
    """The nodes that read a value, by qualified name, each with the dtype; those of bodies that capture it too."""
    for user in source.users:
        name = prefix + user.name
        if not is_control_flow(user):
            yield name, dtypes.reads[name][prefix + source.name]
            continue
        layout = _layout(user)
        if any(source is arg for i in (0, *layout.before) for arg in _sequence(user.args[i])):
            yield name, dtypes.reads[name][prefix + source.name]
        first = sum(len(_sequence(user.args[i])) for i in layout.before)
        for index, operand in enumerate(_sequence(user.args[layout.captured])):
            if operand is source:
                for body, inner in _bodies(user, prefix):
                    yield from readers(_placeholder(body, first + index), inner, dtypes)


def _layout(node: Node) -> _Layout:
    assert isinstance(node.target, HigherOrderOperator)
    return _LAYOUTS[node.target.name()]


def _bodies(node: Node, prefix: str) -> list[tuple[GraphModule, str]]:
    owner, names = node.graph.owning_module, prefixes(node, prefix)
    return [(getattr(owner, name.removeprefix(prefix).removesuffix(".")), name) for name in names]


def _placeholder(body: GraphModule, index: int) -> Node:
    return [node for node in body.graph.nodes if node.op == "placeholder"][index]


def _sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else (value,)


def numbers(node: Node) -> list[float]:
    """The operands of a node that are numbers in the code. An exported file has them as tensors."""
    if not isinstance(node.target, OpOverload):
        return []
    found = []
    for position, argument in enumerate(node.target._schema.arguments):
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        is_operand = any(word in str(argument.type) for word in ("Tensor", "number"))
        if is_operand and isinstance(value, int | float) and not isinstance(value, bool):
            found.append(float(value))
    return found
