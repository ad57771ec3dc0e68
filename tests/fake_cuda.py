"""Programs run on fake CUDA tensors: which operations come, with which datatypes and on which device; no values.

Torch's fake tensors know shape, datatype and device, so autocast's CUDA rules can be asked without a device. Without
one ``torch.autocast("cuda")`` switches itself off; what it sets can be set all the same.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from halfeven.models.program import runnable
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch._subclasses import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
CUDA = torch.device("cuda:0")
_SILENT = {"aten::_to_copy", "aten::clone"}  # a cast is looked at in what it feeds
_READ_BY_THE_HOST = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# Tensors have this attribute; what depends on weights alone may be computed at load.
_OF_A_REQUEST = "_of_a_request"
Operation = tuple[str, tuple[str, ...], tuple[str, ...]]  # name, datatypes of its inputs and of its outputs


@dataclass(frozen=True)
class Stream:
    """The floating operations on a request's numbers, in order; results that are not on the device; operations that
    the host waits for; the outputs."""

    operations: list[Operation] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    synchronises: list[str] = field(default_factory=list)
    outputs: list[tuple[torch.dtype, torch.Size]] = field(default_factory=list)


def on_fake_cuda(program: ExportedProgram, inputs: Sequence[Tensor], autocast: bool) -> Stream:
    """The stream of a program with its weights on CUDA, under live FP16 autocast or as it is.

    Raises torch's own error where an operation mixes devices.
    """
    mode, log = FakeTensorMode(allow_non_fake_inputs=False, shape_env=ShapeEnv()), OperationLog()
    with patch.object(torch.cuda, "_lazy_init", lambda: None), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = _moved(runnable(program), mode)
        there = [mode.from_tensor(tensor, static_shapes=True).to(CUDA) for tensor in inputs]
        for tensor in there:
            setattr(tensor, _OF_A_REQUEST, True)
        with mode, torch.no_grad(), log, _live() if autocast else _as_it_is():
            outputs = module(*there)
    log.stream.outputs.extend((output.dtype, output.shape) for output in outputs)
    log.stream.elsewhere.extend("an output" for output in outputs if output.device.type != "cuda")
    return log.stream


class OperationLog(TorchDispatchMode):
    """A mode that notes what the operations inside it do, in ``stream``."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.stream = Stream()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator):
            if func.name() != "scan":  # its number of steps is a size
                self.stream.synchronises.append(func.name())
            with self:
                return _BODIES[func.name()](*args)
        found = _with_places(*args) if _is_masked(func, args) else func(*args, **(kwargs or {}))
        if func.namespace == "aten":
            taken = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
            given = [one for one in tree_leaves(found) if isinstance(one, Tensor)]
            self._note(func, args, taken, given)
        return found

    def _note(self, func: Any, args: Any, taken: list[Tensor], given: list[Tensor]) -> None:
        name = func._schema.name
        crosses = any(one.device.type != "cuda" and one.dim() for one in taken)
        if _reads_on_the_host(func, args) or (crosses and any(one.device.type == "cuda" for one in given)):
            self.stream.synchronises.append(name)
        depends = any(hasattr(one, _OF_A_REQUEST) for one in taken)
        if depends:
            for one in given:
                setattr(one, _OF_A_REQUEST, True)
        if any(one.device.type != "cuda" for one in given) and any(
            one.device.type == "cuda" for one in taken
        ):
            self.stream.elsewhere.append(name)
        # Live autocast takes a new one of each cast of a weight
        is_view = func.is_view or name == "aten::_unsafe_view"
        if (
            depends
            and name not in _SILENT
            and not is_view
            and any(one.dtype.is_floating_point for one in taken + given)
        ):
            self.stream.operations.append((name, _dtypes(taken), _dtypes(given)))


def _both(predicate: Any, chosen: Any, other: Any, operands: Any) -> Any:
    other(*operands)
    return chosen(*operands)


def _once(condition: Any, body: Any, carried: Any, further: Any) -> Any:
    condition(*carried, *further)
    return body(*carried, *further)


def _one_step(combine: Any, initial: Any, sequences: Any, further: Any) -> Any:
    found = combine(*initial, *[one.select(0, 0) for one in sequences], *further)
    steps = len(sequences[0])
    return [*found[: len(initial)], *(torch.stack([one] * steps) for one in found[len(initial) :])]


# Each body is run once, whichever way the values would lead.
_BODIES = {"cond": _both, "while_loop": _once, "scan": _one_step}


def _reads_on_the_host(func: Any, args: Any) -> bool:
    if func is _aten.index.Tensor:  # only a mask's count is known to the device alone
        return _is_masked(func, args)
    return bool(_READ_BY_THE_HOST & set(func.tags))


def _is_masked(func: Any, args: Any) -> bool:
    masks = (torch.bool, torch.uint8)
    return func is _aten.index.Tensor and any(one is not None and one.dtype in masks for one in args[1])


def _with_places(table: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """``table[indices]`` with a mask: torch's own fake kernel needs a torch that was built with CUDA."""
    places: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            places.append(index)
        else:
            places += _aten.unbind.int(_aten.nonzero.default(index), 1)
    return _aten.index.Tensor(table, places)


def _dtypes(tensors: list[Tensor]) -> tuple[str, ...]:
    return tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


@contextmanager
def _live() -> Iterator[None]:
    """The state that ``torch.autocast("cuda", torch.float16, cache_enabled=False)`` sets where there is a device."""
    before = (
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.is_autocast_cache_enabled(),
    )
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.float16)
    torch.set_autocast_cache_enabled(False)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
        torch.set_autocast_cache_enabled(before[2])


def _moved(module: GraphModule, mode: FakeTensorMode) -> GraphModule:
    """Weights as fake tensors on CUDA, and devices that are written into nodes, as `on_device` moves them."""
    for part in module.modules():
        for held in (part._parameters, part._buffers, vars(part)):
            for name, value in list(held.items()):
                if isinstance(value, Tensor):
                    held.pop(name)
                    part._buffers[name] = mode.from_tensor(value.detach(), static_shapes=True).to(CUDA)
        if isinstance(part, GraphModule):
            for node in part.graph.nodes:
                if "device" in node.kwargs:
                    node.kwargs = {**node.kwargs, "device": CUDA}
                if node.target is _aten.to.device:
                    node.args = (node.args[0], CUDA, *node.args[2:])
            part.recompile()
    return module
