"""A program's operations on a CUDA device, recorded once for each slot and batch size, and replayed with one call.

A replay reads and writes the same addresses, so each belongs to the memory of one slot (`staging.py`). Nothing in it
may need the host. A recording is compared with the program before it is used; where there is none, the program runs
operation by operation (docs.pytorch.org, notes/cuda, "CUDA Graphs").
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Node

from ..program import look_of, walk

_READ_BY_THE_HOST = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_MASKS = (torch.bool, torch.uint8)
Compute = Callable[..., Sequence[Tensor]]
_Key = tuple[tuple[int, torch.dtype, tuple[int, ...]], ...]


def host_reads(module: GraphModule) -> list[str]:
    """The operations whose results the host has to know before it can go on, so that no graph can hold them."""
    found = []
    for name, node in walk(module):
        target = node.target
        if isinstance(target, HigherOrderOperator):
            found += [] if target.name() == "scan" else [f"{target.name()} '{name}'"]
        elif isinstance(target, OpOverload) and _is_read(node, target):
            found.append(f"{target._schema.name.removeprefix('aten::')} '{name}'")
    return found


def _is_read(node: Node, target: OpOverload) -> bool:
    if target is torch.ops.aten.index.Tensor:
        looks = [look_of(index) for index in node.args[1]]  # type: ignore[union-attr]
        return any(look is not None and look.dtype in _MASKS for look in looks)
    if target is torch.ops.aten.one_hot.default and len(node.args) > 1:
        return bool(node.args[1] == -1)  # then the largest number says how many classes there are
    return bool(_READ_BY_THE_HOST & set(target.tags))


class NotRecorded(Exception):
    """Why a batch size has no recording."""


class Graphs:
    """Recordings of ``compute``. All methods are called in the stream that computes.

    They share a pool of memory that nothing else uses: one replay computes after another, and outputs are kept apart.
    """

    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self._recordings: dict[_Key, tuple[Any, Sequence[Tensor]]] = {}  # graph and outputs
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        """The program's outputs. Those of a replay are overwritten by the next replay of the same slot."""
        recording = self._recordings.get(_key(inputs))
        if recording is None:
            return self._compute(*inputs)
        graph, outputs = recording
        graph.replay()
        return outputs

    def record(self, *inputs: Tensor) -> Sequence[Tensor]:
        """Record these inputs' memory, shapes and datatypes, and give the outputs; the host waits.

        Raises NotRecorded where a replay would not give the program's bits, and what the device says where it cannot
        record; then the batch size is computed as before.
        """
        before = [tensor.clone() for tensor in inputs]
        expected = [tensor.clone() for tensor in self._compute(*inputs)]
        _restore(inputs, before)
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(inputs[0].device)
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            outputs = self._compute(*inputs)
        for _ in range(2):  # the second finds the memory as the first has left it
            _restore(inputs, before)
            graph.replay()
            if not all(map(_same_bits, outputs, expected)):
                raise NotRecorded(f"a replay at {len(inputs[0])} rows differs from the program")
        _restore(inputs, before)
        self._recordings[_key(inputs)] = graph, outputs
        return expected


def _key(inputs: Sequence[Tensor]) -> _Key:
    return tuple((tensor.data_ptr(), tensor.dtype, tuple(tensor.shape)) for tensor in inputs)


def _restore(inputs: Sequence[Tensor], before: Sequence[Tensor]) -> None:
    """A program may write over its inputs."""
    for tensor, saved in zip(inputs, before, strict=True):
        tensor.copy_(saved)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return one.shape == other.shape and bool((bits[0] == bits[1]).all())
