"""A program's operations on a CUDA device, recorded once for each slot and batch size, and replayed with one call.

A replay reads and writes the same addresses, so each belongs to the memory of one slot (`staging.py`). Nothing in it
may need the host. A recording is compared with the program before it is used; where there is none, the program runs
operation by operation (docs.pytorch.org, notes/cuda, "CUDA Graphs").
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Node

from ..program import look_of, walk
from ..spec.spec import UNIT_ROUNDOFF, ParityLimits
from .faults import give_back_cached_memory, out_of_memory
from .staging import CudaStreams

_READ_BY_THE_HOST = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_MASKS = (torch.bool, torch.uint8)
# These add with atomics on CUDA, in another order in each run (docs.pytorch.org, torch.use_deterministic_algorithms).
_SCATTERS = {"scatter_add", "scatter_reduce", "index_add", "index_reduce"}
_OTHERS_IN_ANY_ORDER = {"cumsum", "bincount", "histc"}
_ADDS_IF_ASKED = {"index_put", "_unsafe_index_put", "put"}
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


def adds_in_any_order(module: GraphModule) -> list[str]:
    """The operations that add floats into one element in an order that differs from run to run on CUDA, so that two
    runs of the program need not give the same bits."""
    found = []
    for name, node in walk(module):
        look = look_of(node)
        floats = look is None or look.dtype.is_floating_point
        if (
            isinstance(node.target, OpOverload)
            and floats
            and is_any_order(node.target, node.args, node.kwargs)
        ):
            found.append(f"{node.target._schema.name.removeprefix('aten::')} '{name}'")
    return found


def is_any_order(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return scatters_and_adds(target, args, kwargs) or _plain_name(target) in _OTHERS_IN_ANY_ORDER


def scatters_and_adds(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if several elements may come together in one; a scatter or a put that only writes is none of these."""
    name = _plain_name(target)
    if name == "scatter":
        return "reduce" in target._overloadname
    if name in _ADDS_IF_ASKED:
        return bool(kwargs.get("accumulate", args[3] if len(args) > 3 else False))
    return name in _SCATTERS


def _plain_name(target: OpOverload) -> str:
    return target._schema.name.removeprefix("aten::").removesuffix("_")


class NotRecorded(Exception):
    """An error that says why a batch size has no recording."""


class Graphs:
    """Recordings of ``compute`` for the batches of one slot. All methods are called in the stream that computes.

    One pool of memory for a slot: another slot's outputs may be on their way to the host when a replay computes. A
    stream of their own: cuBLAS's workspace belongs to a stream, is in the pool of the graph that was captured there
    first, and is let go when any graph that was captured there is reset. ``agreement``: see `agrees`.
    """

    def __init__(self, compute: Compute, streams: CudaStreams, agreement: float = 0.0) -> None:
        self._compute = compute
        self._streams = streams
        self._agreement = agreement
        self._recordings: dict[_Key, tuple[Any, Sequence[Tensor]]] = {}  # graph and outputs
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = streams.take()
        self._captured: list[Any] = []  # every graph, also one that is not used: none is reset before all are

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
        captured = None
        try:
            captured = self._capture(inputs)
        except Exception as error:
            if not out_of_memory(error):
                raise
        # The second try follows the `except` block: inside of it the error still keeps the memory of the first try.
        if captured is None:
            give_back_cached_memory()  # a pool takes none of it; other models lose theirs where there is no other
            captured = self._capture(inputs)
        graph, outputs = captured
        for _ in range(2):  # the second finds the memory as the first has left it
            _restore(inputs, before)
            graph.replay()
            if not all(agrees(*pair, self._agreement) for pair in zip(outputs, expected, strict=True)):
                raise NotRecorded(f"a replay at {len(inputs[0])} rows differs from the program")
        _restore(inputs, before)
        self._recordings[_key(inputs)] = graph, outputs
        return expected

    def close(self) -> None:
        """Forget all recordings; call it when no replay is under way."""
        self._recordings = {}
        for graph in self._captured:
            with suppress(Exception):  # of a lost device: the rest is forgotten all the same
                graph.reset()
        self._captured = []
        self._streams.give_back(self._stream)

    def _capture(self, inputs: Sequence[Tensor]) -> tuple[Any, Sequence[Tensor]]:
        """The graph and its outputs. Not with `torch.cuda.graph`, which first takes every model's cached memory."""
        graph = torch.cuda.CUDAGraph()
        self._captured.append(graph)
        with torch.cuda.stream(self._stream):
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                outputs = self._compute(*inputs)
                graph.capture_end()
            except BaseException:
                self._end_failed(graph, inputs[0].device)
                raise
        return graph, outputs

    def _end_failed(self, graph: Any, device: torch.device) -> None:
        """End a capture in which something failed: the device computes and gives memory back as before."""
        try:
            graph.capture_end()
        except Exception:  # CUDA gave no graph: torch's allocator is left in the middle of a capture
            _FAILED.append(graph)
            with suppress(Exception):
                torch._C._cuda_endAllocateToPool(device.index or 0, self._pool)
                torch._C._cuda_releasePool(device.index or 0, self._pool)
            self._pool = torch.cuda.graph_pool_handle()  # torch takes no capture into the other one any more
        with suppress(Exception):  # CUDA keeps the error for the next kernel's check (cudaGetLastError)
            torch.ones(1, device=device).add_(1)


_FAILED: list[Any] = []  # kept for ever: torch's allocator of page-locked memory goes on asking such a graph


def agreement_of(precision: str, in_any_order: Sequence[str]) -> float:
    """The largest allowed difference of two runs of a program; 0, equal bits, where no operation adds in any order."""
    unit = UNIT_ROUNDOFF.get(precision, UNIT_ROUNDOFF["fp16"])
    return ParityLimits().max_error_u * unit if in_any_order else 0.0


def agrees(one: Tensor, other: Tensor, agreement: float) -> bool:
    """True if two outputs are equal bit for bit, or floats that differ by no more than ``agreement``, a part of the
    largest finite magnitude."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    if bool((bits[0] == bits[1]).all()):
        return True
    if not agreement or not one.is_floating_point():
        return False
    came, expected = one.double(), other.double()
    most = agreement * expected.nan_to_num(0.0, 0.0, 0.0).abs().amax()
    same = (came == expected) | (came.isnan() & expected.isnan())
    return bool((same | ((came - expected).abs() <= most)).all())


def _key(inputs: Sequence[Tensor]) -> _Key:
    return tuple((tensor.data_ptr(), tensor.dtype, tuple(tensor.shape)) for tensor in inputs)


def _restore(inputs: Sequence[Tensor], before: Sequence[Tensor]) -> None:
    """A program may write over its inputs."""
    for tensor, saved in zip(inputs, before, strict=True):
        tensor.copy_(saved)
