"""Type-transparent ops: they give the same numbers whether they run before a rounding to half or after it.

``round(op(x)) == op(round(x))``, so that such an op may run in either precision without changing a result.
Movements only place values elsewhere (or flip their sign): equal bit for bit. Selections pick one of their
values, or a bound that half represents, by its order, which rounding keeps: equal but for the sign of a
zero (a negative value that underflows is −0 if it is rounded first and may be +0 if not).
"""

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


MOVEMENTS = _names("""
    view _unsafe_view reshape view_as reshape_as flatten unflatten squeeze unsqueeze transpose permute t mT
    movedim moveaxis swapaxes swapdims numpy_T expand expand_as broadcast_to slice select narrow diagonal
    split split_with_sizes unsafe_split chunk unsafe_chunk tensor_split unbind unfold contiguous clone alias
    detach cat concat stack hstack vstack repeat tile repeat_interleave roll flip rot90 tril triu index
    index_select gather take_along_dim embedding where masked_fill constant_pad_nd pad reflection_pad1d
    reflection_pad2d replication_pad1d replication_pad2d replication_pad3d pixel_shuffle pixel_unshuffle
    channel_shuffle im2col select_scatter slice_scatter neg abs upsample_nearest1d upsample_nearest2d
    upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
""")
SELECTIONS = _names("""
    relu relu6 hardtanh clamp clamp_min clamp_max amax amin maximum minimum max_pool1d max_pool2d max_pool3d
""")
# what tells −0 from +0; dividing by a computed value does too
_SEE_SIGNS_OF_ZERO = _names("atan2 arctan2 copysign signbit angle reciprocal rsqrt pow float_power")
_DIVISIONS = _names("div true_divide divide")


def is_transparent(node: Node, half: torch.dtype, signs_of_zero_matter: bool) -> bool:
    """Whether a node may run in FP32 or in ``half`` alike. Selections may not where signs of zero matter."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten" or target._schema.is_mutable:
        return False
    name = target._schema.name.removeprefix("aten::")
    listed = name in MOVEMENTS or (name in SELECTIONS and not signs_of_zero_matter)
    return listed and _scalars_are_exact(node, target, half)


def tells_signs_of_zero(graph: Graph) -> bool:
    """Whether some op gives different answers for −0 and +0 (beyond the sign of a zero)."""
    return any(_tells(node) for node in graph.nodes if isinstance(node.target, OpOverload))


def _tells(node: Node) -> bool:
    name = str(node.target._schema.name).removeprefix("aten::")  # type: ignore[union-attr]
    _, second = (*node.args, None, None)[:2]
    if name in _DIVISIONS:
        return isinstance(second, Node) and second.op != "get_attr"
    if name == "pow" and isinstance(second, int | float):
        return second < 0
    return name in _SEE_SIGNS_OF_ZERO


def _scalars_are_exact(node: Node, op: OpOverload, half: torch.dtype) -> bool:
    """Whether half represents each number that may come out: fill values, bounds."""
    for position, argument in enumerate(op._schema.arguments):
        given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        is_value = "number" in str(argument.type).lower() or (argument.name == "value" and given is not None)
        if not is_value or given is None:
            continue
        if (
            not isinstance(given, int | float)
            or torch.tensor(given, dtype=torch.float64).to(half).item() != given
        ):
            return False
    return True
