"""Exact repairs, after which nodes need not stay in FP32: a power of two taken out of numbers that overflow in half.

Multiplying with 2⁻ᵏ changes the exponent alone, so that products, sums, squares and roots of numbers scaled
beforehand have the same mantissa as before, and the scale comes out again where the result is small anyway.
The patterns are few, those that real models overflow in:

- ``product``: matmul, bmm, linear or convolution → divided by or multiplied with a number (attention scores);
- ``norm``: the same → layer_norm or group_norm, which take any scale away (their eps is scaled with it);
- ``mean``: sum → divided by a number or a count;
- ``square``: x² → sum or mean (+ eps) → sqrt or rsqrt. Left out where the scaled eps is nothing in half: the
  repair would trade an overflow for a division by zero.

Exact but for FP32's own denormals. Whether a repair helps is found by trial: candidates are proposals.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from ...models.program import walk
from .guards import aten_name, constant, is_view
from .ranges import Profile

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Repair:
    """A change of the FP32 program that keeps its answers. ``exponent``: k of the 2⁻ᵏ that it scales with."""

    node: str
    what: str
    evidence: str
    kind: str = ""
    exponent: int = 0

    def to_json(self) -> dict[str, Any]:
        return {"node": self.node, "what": self.what, "evidence": self.evidence}


def insert(
    target: OpOverload,
    args: tuple[Any, ...],
    *,
    after: Node | None = None,
    before: Node | None = None,
    like: Node | None = None,
) -> Node:
    """A new call beside a node, which it takes its origin from; ``like`` has the shape of its result."""
    place = after or before
    assert place is not None
    graph = place.graph
    with graph.inserting_after(place) if after else graph.inserting_before(place):
        node = graph.call_function(target, args)
    for key in ("nn_module_stack", "stack_trace"):
        if key in place.meta:
            node.meta[key] = place.meta[key]
    if (shape := like or after) is not None and "val" in shape.meta:
        node.meta["val"] = shape.meta["val"]
    return node


@dataclass(slots=True)
class _Pattern:
    """A place to repair: ``inputs`` (node, position) are scaled with 2⁻ᵏ; ``last`` takes the scale out.

    ``power``: how often k goes into the numbers in between (2 for squares). ``degree``: how often the input
    does, which the gate also multiplies with 4. ``undo`` changes ``last`` for a k.
    """

    kind: str
    inputs: list[tuple[Node, int]]
    between: list[Node]
    last: Node
    undo: Callable[[int], None]
    power: int = 1
    degree: int = 1
    eps: float | None = None


def candidates(module: GraphModule, profile: Profile) -> list[Repair]:
    """The places that overflow in half and could be scaled, in the graph's order. Changes nothing."""
    found = []
    for name, node in walk(module):
        pattern = _pattern(node)
        if pattern is None:
            continue
        prefix = name.removesuffix(node.name)
        ranges = [profile.range(prefix + inner.name) for inner in pattern.between]
        last = profile.range(prefix + pattern.last.name)
        largest = max((held.largest for held in ranges if held is not None), default=0.0)
        if last is None or largest <= profile.limits.largest or last.largest > profile.limits.largest / 2.0:
            continue
        bits = math.ceil(math.log2(largest / profile.limits.largest)) + 2 * pattern.degree + 1
        exponent = math.ceil(bits / pattern.power)
        if pattern.eps is not None and pattern.eps * 4.0**-exponent < 4.0 * profile.limits.smallest:
            continue
        found.append(_proposal(pattern, prefix, name, exponent, largest, profile))
    return found


def _proposal(
    pattern: _Pattern, prefix: str, name: str, exponent: int, largest: float, profile: Profile
) -> Repair:
    return Repair(
        node=name,
        what=f"scaled with 2^-{exponent} before {name}, and back in {prefix}{pattern.last.name}",
        evidence=f"largest magnitude {largest:.3g} before, {largest * 2.0 ** -(exponent * pattern.power):.3g} after; "
        f"half ends at {profile.limits.largest:g}; a power of two is exact",
        kind=pattern.kind,
        exponent=exponent,
    )


def apply(module: GraphModule, repair: Repair) -> None:
    """Carry out one candidate, in place. Raises ValueError where the graph has no such pattern (any more)."""
    node = next((node for name, node in walk(module) if name == repair.node), None)
    pattern = None if node is None else _pattern(node)
    if pattern is None or pattern.kind != repair.kind:
        raise ValueError(
            f"no {repair.kind!r} pattern at {repair.node}: the graph is not the one that was profiled"
        )
    scaled: dict[Node, Node] = {}
    for reader, position in pattern.inputs:
        source = reader.args[position]
        assert isinstance(source, Node)
        if source not in scaled:
            factor = 2.0**-repair.exponent
            scaled[source] = insert(_aten.mul.Tensor, (source, factor), before=reader, like=source)
        reader.update_arg(position, scaled[source])
    pattern.undo(repair.exponent)
    owner = pattern.last.graph.owning_module
    assert isinstance(owner, GraphModule)
    owner.graph.lint()
    owner.recompile()


def _pattern(node: Node) -> _Pattern | None:
    name = aten_name(node)
    if name in _PRODUCTS:
        return _product(node)
    if name == "sum":
        return _mean(node)
    if _is_square(node):
        return _square(node)
    return None


# Op → where its bias stands; 0: it has none.
_PRODUCTS = {"matmul": 0, "mm": 0, "bmm": 0, "linear": 2, "conv1d": 2, "conv2d": 2, "conv3d": 2}
_NORMS = ("layer_norm", "group_norm")
_EPS = 4  # its position in both
_MULTIPLIED, _DIVIDED = _aten.mul.Tensor, _aten.div.Tensor


def _next(node: Node) -> tuple[list[Node], Node | None]:
    """The views of a node, itself first, and the one node that reads its numbers; None where several do."""
    views = [node]
    while len(views[-1].users) == 1:
        user = next(iter(views[-1].users))
        if not is_view(user):
            return views, user
        views.append(user)
    return views, None


def _product(node: Node) -> _Pattern | None:
    between, user = _next(node)
    if user is None or user.args[0] is not between[-1]:
        return None
    bias = _PRODUCTS[aten_name(node)]
    degree = 1 if bias else 2  # a product of two activations grows with the square of the input
    inputs = [(node, 0)]
    if bias and len(node.args) > bias and isinstance(node.args[bias], Node):
        inputs.append((node, bias))
    if aten_name(user) in _NORMS and between[-1] not in user.args[1:]:
        eps = float(user.args[_EPS]) if len(user.args) > _EPS else 1e-5  # type: ignore[arg-type]

        def undo(exponent: int) -> None:
            rest = (None,) * (_EPS - len(user.args))
            user.args = (*user.args[:_EPS], *rest, eps * 4.0**-exponent, *user.args[_EPS + 1 :])

        return _Pattern("norm", inputs, between, user, undo, degree=degree)
    unscale = _by_number(user)
    return None if unscale is None else _Pattern("product", inputs, between, user, unscale, degree=degree)


def _by_number(node: Node) -> Callable[[int], None] | None:
    """Puts a scale into the number that a node divides by or multiplies with."""
    if node.target not in (_MULTIPLIED, _DIVIDED) or not isinstance(node.args[1], int | float):
        return None
    number, sign = float(node.args[1]), 1 if node.target is _MULTIPLIED else -1
    return lambda exponent: node.update_arg(1, number * 2.0 ** (sign * exponent))


def _mean(node: Node) -> _Pattern | None:
    between, user = _next(node)
    if (
        user is None
        or user.target is not _DIVIDED
        or user.args[0] is not between[-1]
        or user.args[1] in between
    ):
        return None
    undo = _by_number(user) or _rescaled(user, 1)
    return _Pattern("mean", [(node, 0)], between, user, undo)


def _rescaled(node: Node, sign: int) -> Callable[[int], None]:
    """Multiplies a result with 2^(sign·k)."""

    def undo(exponent: int) -> None:
        scaled = insert(_MULTIPLIED, (node, 2.0 ** (sign * exponent)), after=node)
        node.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)

    return undo


def _is_square(node: Node) -> bool:
    name = aten_name(node)
    doubled = name == "mul" and node.args[0] is node.args[1]
    return doubled or name == "square" or (name == "pow" and constant(node.args[1]) == 2.0)


def _square(node: Node) -> _Pattern | None:
    between, reduced = _next(node)
    if reduced is None or aten_name(reduced) not in ("sum", "mean"):
        return None
    more, user = _next(reduced)
    between, added, eps = [*between, *more], None, None
    if user is not None and user.target is _aten.add.Tensor and isinstance(user.args[1], int | float):
        added, eps = user, float(user.args[1])
        more, user = _next(added)
        between = [*between, *more]
    if user is None or aten_name(user) not in ("sqrt", "rsqrt"):
        return None
    last, unscale = user, _rescaled(user, 1 if aten_name(user) == "sqrt" else -1)

    def undo(exponent: int) -> None:
        if added is not None and eps is not None:
            added.update_arg(1, eps * 4.0**-exponent)
        unscale(exponent)

    inputs = [(node, place) for place, arg in enumerate(node.args) if isinstance(arg, Node)]
    return _Pattern("square", inputs, between, last, undo, power=2, degree=2, eps=eps)
