"""Export a graph as an interpreter runs it: the operations that the interpreter does become the program."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule

from ....models.errors import ExportFailed
from ....models.program import walk
from ....models.spec.spec import ModelSpec


def export_as_run(
    module: GraphModule, run: Callable[..., tuple[Any, ...]], spec: ModelSpec, example: Sequence[Tensor]
) -> ExportedProgram:
    """Trace ``run`` (which interprets ``module``) with the spec's free dimensions free.

    The weights keep their names. ``example`` has a batch of at least 2 where the batch is free.
    Raises ExportFailed with torch's own explanation.
    """
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            shapes = {"tensors": _dynamic(spec)}
            program = torch.export.export(
                _Run(module, run), tuple(example), dynamic_shapes=shapes, strict=False
            )
    except Exception as error:
        raise ExportFailed(
            f"'{spec.name}' cannot be exported again under its precision plan: {type(error).__name__}: "
            f"{str(error)[:800]}; keep the node that torch names in FP32 with --keep, or use level O1"
        ) from error
    _tidy(program)
    return program


def _tidy(program: ExportedProgram) -> None:
    """Remove the nodes that pin dtypes, and casts that no node reads."""
    for _, node in reversed(list(walk(program.graph_module))):
        unread = node.target is torch.ops.aten.to.dtype and not node.users
        if unread or node.target is torch.ops.aten._assert_tensor_metadata.default:
            node.graph.erase_node(node)
    for module in program.graph_module.modules():
        if isinstance(module, GraphModule):
            module.recompile()


class _Run(nn.Module):
    """A module with the weights of a graph, under their own names, whose forward is another function."""

    def __init__(self, module: GraphModule, run: Callable[..., tuple[Any, ...]]) -> None:
        super().__init__()
        # the very dictionaries: the export swaps the weights in them for its own while it traces
        self._parameters, self._buffers, self._modules = module._parameters, module._buffers, module._modules
        self._run = run

    def forward(self, *tensors: Tensor) -> tuple[Any, ...]:
        return self._run(*tensors)


def _dynamic(spec: ModelSpec) -> tuple[dict[int, Any], ...]:
    """The batch must stay free; any other free axis is as free as the program lets it be."""
    return tuple(
        {
            axis: _freedom(spec, axis, dim.fixed, dim.minimum, dim.maximum)
            for axis, dim in enumerate(tensor.shape)
        }
        for tensor in spec.inputs
    )


def _freedom(spec: ModelSpec, axis: int, fixed: bool, low: int, high: int | None) -> Any:
    if spec.batched and axis == 0:
        return Dim.DYNAMIC(min=1, max=spec.max_batch_size) if spec.max_batch_size > 1 else Dim.AUTO
    if fixed:
        return Dim.STATIC
    return Dim.AUTO if high is None else Dim.AUTO(min=low, max=high)
