"""The bytes that a half program's casts move, and whether half saves more bytes than that.

Bytes are those read from and written to memory at one run of the batch that the program was exported with
(at another batch they grow together). Where memory limits a device, they are proportional to its time; they are
counted, not measured.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import Node

from ....models.program import walk
from ...graph.traffic import Cast
from .dtypes import tensors_of
from .folding import _aliased

_CASTS = (torch.ops.aten.to.dtype, torch.ops.aten._to_copy.default)
_HALVES = (torch.float16, torch.bfloat16)


def cast_map(program: ExportedProgram) -> list[Cast]:
    """Every cast between floating types that the program does at a run, the most bytes first."""
    casts = []
    for name, node in walk(program.graph_module):
        if (pair := _cast(node)) is not None:
            source, result = pair
            prefix = name.removesuffix(node.name)
            readers = tuple(prefix + reader.name for reader in node.users)
            moved = _elements(source) * (source.element_size() + result.element_size())
            first = node.args[0]
            assert isinstance(first, Node)
            casts.append(Cast(prefix + first.name, source.dtype, result.dtype, moved, readers))
    return sorted(casts, key=lambda cast: -cast.bytes)


def saved_bytes(program: ExportedProgram) -> int:
    """Bytes that the program's half tensors save against FP32 ones, per run: two per element read or written.

    A tensor is written once and read by each of its readers; views neither read nor write; casts, which FP32
    would not have, save nothing.
    """
    saved = 0
    for _, node in walk(program.graph_module):
        if isinstance(node.target, OpOverload) and _cast(node) is None and not _aliased(node, written=False):
            saved += sum(2 * _elements(tensor) for tensor in _halves(node))
            saved += sum(
                2 * _elements(tensor) for parent in node.all_input_nodes for tensor in _halves(parent)
            )
    return saved


def _cast(node: Node) -> tuple[Tensor, Tensor] | None:
    """Source and result of a cast from one floating type to another."""
    if node.target not in _CASTS or not isinstance(node.args[0], Node):
        return None
    source, result = node.args[0].meta.get("val"), node.meta.get("val")
    if not isinstance(source, Tensor) or not isinstance(result, Tensor) or source.dtype == result.dtype:
        return None
    return (source, result) if source.is_floating_point() and result.is_floating_point() else None


def _halves(node: Node) -> Iterator[Tensor]:
    return (tensor for tensor in tensors_of(node.meta.get("val")) if tensor.dtype in _HALVES)


def _elements(tensor: Tensor) -> int:
    """How many at the sizes that the program was exported with; a size that depends on data counts as 1."""
    return math.prod(size if isinstance(size, int) else int(size.node.hint or 1) for size in tensor.shape)
