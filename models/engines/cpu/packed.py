"""Weights on a CPU in the layout that oneDNN's kernels read, packed once at load, with the ops after them fused in.

Torch packs a weight anew in each call. Measured on two cores with AVX-512: an encoder takes 0.6 to 0.7 of the time with
packed products, an image net 0.5 (batch 1) to 0.7 (batch 32) with packed convolutions; restricted to AVX2 packed
convolutions take 8 times as long at batch 1. These are what torch.compile's freezing puts there
(torch/_inductor/fx_passes/mkldnn_fusion.py). FP32 stays FP32: sums come in
another order, and BatchNorm's factor is multiplied into the weight before instead of after. ReLU is not fused: oneDNN's
makes 0 of NaN, and an answer that is not finite must be seen to be rescued or refused.
"""

from collections import Counter
from collections.abc import Callable, Collection
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ...machine.processor import this_processor
from ...program import argument, dimensions_of, look_of
from .setup import PACKED, PACKED_CONVOLUTIONS, PACKED_PRODUCTS

_aten = torch.ops.aten
_LARGE = 1 << 17  # elements of an FP32 weight: below, torch's call costs less than oneDNN's
_GELU = _aten.gelu.default
_PACKED_TYPES = (torch.float32, torch.bfloat16)


def packable(module: GraphModule) -> set[str]:
    """The passes of `PACKED` that would change something of this program, by the processor this runs on."""
    if not this_processor().onednn:
        return set()
    return {_PACKS[node.target][1] for node, _ in _candidates(module) if _is_worth_it(module, node)}


def pack_weights(module: GraphModule, passes: Collection[str] = PACKED) -> None:
    """Change every linear layer and 2-d convolution that ``passes`` name and that oneDNN has packed kernels for.

    Nothing is changed where this torch or this processor does not have them. A weight that something else reads as well
    (tied to an embedding) stays as it is: it would be in memory twice.
    """
    if not this_processor().onednn:
        return
    for node, weight in _candidates(module):
        _, name, pack = _PACKS[node.target]
        if name in passes and _is_worth_it(module, node):
            pack(module, node, weight)
    module.graph.lint()
    module.recompile()


def _candidates(module: GraphModule) -> list[tuple[Node, Tensor]]:
    """Every node with a weight of its own that oneDNN's kernels take."""
    readers = _readers(module)
    found = []
    for node in module.graph.nodes:
        if node.target in _PACKS:
            weight = _tensor(module, node.args[_PACKS[node.target][0]])
            if (
                weight is not None
                and weight.dtype in _PACKED_TYPES
                and this_processor().computes(weight.dtype)
                and readers[_address(weight)] == 1
            ):
                found.append((node, weight))
    return found


def _is_worth_it(module: GraphModule, node: Node) -> bool:
    """True if the shapes are those that a packed kernel takes, and the weight is not so small that torch's call costs
    less than oneDNN's."""
    place, name, _ = _PACKS[node.target]
    if name == PACKED_CONVOLUTIONS:
        return dimensions_of(node.args[0]) == 4
    if node.target is _aten.addmm.default and (
        node.kwargs or len(node.args) != 3 or dimensions_of(node.args[0]) != 1
    ):
        return False
    weight = _tensor(module, node.args[place])
    assert weight is not None  # of `_candidates`
    large = weight.dtype != torch.float32 or weight.numel() >= _LARGE
    return large and dimensions_of(node.args[place - 1]) >= 2


def _pack_linear(module: GraphModule, node: Node, matrix: Tensor) -> None:
    rows, weight, bias = _arguments(node, 3)
    _pack_product(module, node, rows, weight, matrix, bias)


def _pack_addmm(module: GraphModule, node: Node, matrix: Tensor) -> None:
    """`aten::addmm` as a linear layer, whose weight is transposed."""
    bias, rows, weight = _arguments(node, 3)
    _pack_product(module, node, rows, weight, matrix.t().contiguous(), bias)


def _pack_product(
    module: GraphModule, node: Node, rows: Node, weight: Node, matrix: Tensor, bias: Node | None
) -> None:
    """Replace a product, with the GELU behind it, by `mkldnn::_linear_pointwise`."""
    last, activation = _activation_behind(node)
    packed = torch.ops.mkldnn._reorder_linear_weight(matrix, None)
    _replace(
        module,
        last,
        torch.ops.mkldnn._linear_pointwise.default,
        lambda: (rows, _constant(module, weight, packed), bias, *activation),
    )


def _pack_convolution(module: GraphModule, node: Node, kernel: Tensor) -> None:
    """`aten::conv2d`, with BatchNorm and a sum or GELU behind it, as `mkldnn::_convolution_pointwise`."""
    image, weight, bias, stride, padding, dilation, groups = _arguments(node, 7)
    kernel, shift, last = _normed(module, node, kernel, bias)
    geometry = (_pair(padding, 0), _pair(stride, 1), _pair(dilation, 1), groups or 1)
    packed = torch.ops.mkldnn._reorder_convolution_weight(kernel, *geometry, None)

    def operands() -> tuple[Any, Any]:
        moved = bias if shift is None else _constant(module, weight, shift)
        return _constant(module, weight, packed), moved

    pointwise, read = torch.ops.mkldnn._convolution_pointwise.default, (image,)
    total, other = _sum_behind(last)
    if total is not None and other is not None:
        pointwise, read = torch.ops.mkldnn._convolution_pointwise.binary, (image, other)
        last, after = total, ("add", 1.0, None, [], None)
    else:
        last, after = _activation_behind(last)
    _replace(module, last, pointwise, lambda: (*read, *operands(), *geometry, *after))


# The op, where its weight stands among its arguments, the pass that packs it, and what does so.
_PACKS: dict[Any, tuple[int, str, Callable[[GraphModule, Node, Tensor], None]]] = {
    _aten.linear.default: (1, PACKED_PRODUCTS, _pack_linear),
    _aten.addmm.default: (2, PACKED_PRODUCTS, _pack_addmm),
    _aten.conv2d.default: (1, PACKED_CONVOLUTIONS, _pack_convolution),
}


def _normed(
    module: GraphModule, node: Node, kernel: Tensor, bias: object
) -> tuple[Tensor, Tensor | None, Node]:
    """Kernel and bias with the BatchNorm after the convolution multiplied in, and the last node of both. FP32 only,
    since a half's weights were rounded and proven as they are."""
    norm = _only_reader(node)
    constants = [bias] if bias is not None else []
    if norm is None or norm.target is not _aten.batch_norm.default or kernel.dtype != torch.float32:
        return kernel, None, node
    _, weight, offset, mean, variance, training, _, epsilon, _ = _arguments(norm, 9)
    constants += [value for value in (weight, offset, mean, variance) if value is not None]
    known = {value: _tensor(module, value) for value in constants if isinstance(value, Node)}
    if training or mean is None or variance is None or any(value is None for value in known.values()):
        return kernel, None, node
    scale = torch.rsqrt(known[variance].double() + epsilon)  # type: ignore[union-attr]
    if weight is not None:
        scale = scale * known[weight].double()  # type: ignore[union-attr]
    moved = -known[mean].double()  # type: ignore[union-attr]
    if bias is not None:
        moved = moved + known[bias].double()  # type: ignore[index, union-attr]
    shift = moved * scale + (known[offset].double() if offset is not None else 0.0)  # type: ignore[union-attr]
    return (kernel.double() * scale[:, None, None, None]).float(), shift.float(), norm


def _activation_behind(node: Node) -> tuple[Node, tuple[str, list[object], str]]:
    """The GELU that alone reads a node, or the node itself, and oneDNN's arguments for it."""
    reader = _only_reader(node)
    if reader is not None and reader.target is _GELU:
        return reader, ("gelu", [], str(reader.kwargs.get("approximate", "none")))
    return node, ("none", [], "")


def _sum_behind(node: Node) -> tuple[Node | None, Node | None]:
    """The sum that is a node's only reader, and its other addend; None and None where there is no such sum."""
    total = _only_reader(node)
    if total is None or total.target is not _aten.add.Tensor or total.kwargs or len(total.args) != 2:
        return None, None
    others = [value for value in total.args if value is not node]
    if len(others) != 1 or not isinstance(others[0], Node):
        return None, None
    same = look_of(total) is not None and look_of(others[0]) == look_of(node) == look_of(total)
    return (total, others[0]) if same else (None, None)


def _replace(module: GraphModule, last: Node, target: Any, arguments: Callable[[], tuple[Any, ...]]) -> None:
    """Put one call in the place of ``last``; nodes that only led to it are removed."""
    with module.graph.inserting_before(last):
        fused = module.graph.call_function(target, arguments())
    fused.meta = dict(last.meta)
    last.replace_all_uses_with(fused)
    dead, gone = [last], set[Node]()
    while dead:
        node = dead.pop()
        if node not in gone and not node.users and node.op in ("call_function", "get_attr"):
            before = node.all_input_nodes
            module.graph.erase_node(node)
            gone.add(node)
            dead += before
            if node.op == "get_attr" and not _read(module, str(node.target)):
                owner, _, name = str(node.target).rpartition(".")
                delattr(module.get_submodule(owner), name)


def _constant(module: GraphModule, like: Node, tensor: Tensor) -> Node:
    """A new tensor of the program, named after the one that it is made from."""
    name = str(like.target).replace(".", "_") + "_packed"
    while hasattr(module, name):
        name += "_"
    module.register_buffer(name, tensor.detach(), persistent=False)
    return module.graph.get_attr(name)


def _readers(module: GraphModule) -> Counter[tuple[int, int]]:
    """The number of nodes that read the tensor at each address, under any name."""
    addresses: Counter[tuple[int, int]] = Counter()
    for node in module.graph.nodes:
        tensor = _tensor(module, node)
        if tensor is not None:
            addresses[_address(tensor)] += max(len(node.users), 1)
    return addresses


def _address(tensor: Tensor) -> tuple[int, int]:
    return tensor.untyped_storage().data_ptr(), int(tensor.storage_offset())


def _tensor(module: GraphModule, node: object) -> Tensor | None:
    if not isinstance(node, Node) or node.op != "get_attr":
        return None
    found = attrgetter(str(node.target))(module)
    return found.detach() if isinstance(found, Tensor) else None


def _read(module: GraphModule, name: str) -> bool:
    return any(node.op == "get_attr" and str(node.target) == name for node in module.graph.nodes)


def _only_reader(node: Node) -> Node | None:
    readers = list(node.users)
    return readers[0] if len(readers) == 1 and readers[0].all_input_nodes.count(node) == 1 else None


def _arguments(node: Node, count: int) -> list[Any]:
    """Positional arguments, by name where they were given so, and their defaults."""
    return [argument(node, place) for place in range(count)]


def _pair(value: Any, default: int) -> list[int]:
    values = [default] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
    return values * 2 if len(values) == 1 else values
