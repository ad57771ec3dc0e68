"""Exports a module that has no model.toml yet, to see how many rows a batch may have and how many bytes a row needs.

Runs in the child, whose `export` traces as the capture of a conversion does.
"""

from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from . import child, failures
from .kept_tensors import traced

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.export import ExportedProgram

from .batch_found import Named

FOR_ONE_ROW = "1 because forward makes the number of rows a constant{place}: {remedy}"
REMEDY = (
    "where it takes that number from x.shape and keeps it as it is (no len(x), no int()), more are possible"
)
MANY = 64  # the largest batch that the trial asks for


def tried(
    torch: ModuleType, module: "nn.Module", shown: Named, result: Mapping[str, Any], folder: str
) -> dict[str, Any]:
    """Export a module that takes batches, and give the entries of the module's description that follow from it.

    ``{"row_bytes": …}`` where a batch of any size can be exported (`row_bytes`); ``{"max_batch_size": 1, "doubts":
    […]}`` where only one row can; an empty dictionary where the export fails for another reason, which the user
    reads when the module is converted.

    ``shown``: input name → tensor with its batch on the first axis. ``result``: that of `describing.seen`.
    """
    request, rows = _request(result, folder), list(shown.values())
    flat = child.Flat(module, request)
    try:
        program = traced(torch, flat.module, lambda: child.export(torch, flat, rows, request), rows)
    except Exception as error:
        if not failures.is_specialised(error):
            return {}
        why = FOR_ONE_ROW.format(place=failures.place_of(error, request), remedy=REMEDY)
        return {"max_batch_size": 1, "doubts": [*result["doubts"], ["", "max_batch_size", why]]}
    return {"row_bytes": row_bytes(torch, program, rows)}


def _request(result: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """The request for the export: every size is free but for those that model.toml is going to fix, as in a
    conversion."""
    inputs = [
        {
            "name": each["name"],
            "dims": [[size, size] if _is_fixed(size) else [1, None] for size in each["shape"]],
        }
        for each in result["inputs"]
    ]
    axes = {
        side: {tensor["name"]: tensor.get("batch_axis", 0) for tensor in result[side]}
        for side in ("inputs", "outputs")
    }
    return {
        "folder": folder,
        "path": [],
        "inputs": inputs,
        "outputs": [tensor["name"] for tensor in result["outputs"]],
        "batch_axes": axes,
        "max_batch_size": MANY,
    }


def _is_fixed(size: object) -> bool:
    return isinstance(size, int) and size > 0


def row_bytes(torch: ModuleType, program: "ExportedProgram", given: Iterable["Tensor"]) -> int:
    """The bytes that one row has in the largest value that grows with the batch; 0 where none is known to.

    ``given``: a tensor for each input, with the batch on its first axis; their other sizes are those that are counted
    with, and a size that depends on values counts as 1. Views are not counted: they have no memory of their own.
    """
    sizes, batch = {}, set()
    for node, tensor in zip(child.inputs_of(program), given, strict=True):
        shape = node.meta["val"].shape
        sizes |= {size.node.expr: known for size, known in zip(shape, tensor.shape, strict=True)
                  if isinstance(size, torch.SymInt)}  # fmt: skip
        batch |= _symbols(torch, shape[:1])
    sizes |= dict.fromkeys(batch, 1)
    grown = (value for value in _values(torch, program) if batch & _symbols(torch, value.shape))
    return max((_bytes(torch, value, sizes) for value in grown), default=0)


def _values(torch: ModuleType, program: "ExportedProgram") -> Iterator["Tensor"]:
    """The tensors that the nodes make."""
    for node in program.graph.nodes:
        if node.op == "call_function" and not getattr(node.target, "is_view", False):
            for value in torch.utils._pytree.tree_leaves(node.meta.get("val")):
                if isinstance(value, torch.Tensor):
                    yield value


def _symbols(torch: ModuleType, shape: Iterable[Any]) -> set[Any]:
    return {
        symbol for size in shape if isinstance(size, torch.SymInt) for symbol in size.node.expr.free_symbols
    }


def _bytes(torch: ModuleType, value: "Tensor", sizes: Mapping[Any, int]) -> int:
    elements = 1
    size: Any
    for size in value.shape:
        if isinstance(size, torch.SymInt):
            known = size.node.expr.subs(sizes)
            size = known.subs(dict.fromkeys(known.free_symbols, 1))
        elements *= int(size)
    return elements * value.element_size()
