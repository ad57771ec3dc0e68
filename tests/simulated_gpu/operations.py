"""Operations on the simulated device's tensors: put into the current stream's queue, or waited for where CUDA waits.

A matrix product passes through cuBLAS's workspace: torch keeps one for each thread and stream, allocates it at the
first product there (inside a capture: of the capture's pool), and lets it go when a graph that was captured in that
stream is reset (ATen/cuda/CublasHandlePool.cpp and CUDAGraph.cpp of torch 2.13).
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from halfeven.models.engines.cuda_graphs import is_any_order
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from .memory import RUBBISH, Allocator, Block
from .work_queues import WorkQueues

_aten = torch.ops.aten
DEVICE = torch.device("cuda:0")
_READ_BY_THE_HOST = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_PRODUCTS = {"linear", "matmul", "mm", "addmm", "bmm", "baddbmm"}
_WORKSPACE = 4096  # bytes
_SCALARS = (_aten.item.default, _aten.is_nonzero.default)  # under inference mode they come as they are


class DeviceTensor(Tensor):
    """A tensor on the device: ``content`` is its memory as the kernels see it, ``block`` keeps that memory."""

    content: Tensor
    block: Block
    operations: "Operations"
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: Tensor, block: Block, operations: "Operations") -> "DeviceTensor":
        # A meta tensor for torch's C++ side: torch without CUDA cannot guard a CUDA device, as slicing does.
        return torch.Tensor._make_subclass(cls, _meta(inner), False)

    def __init__(self, inner: Tensor, block: Block, operations: "Operations") -> None:
        self.content, self.block, self.operations = inner, block, operations

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"DeviceTensor({self.dtype}, {list(self.shape)})"

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE

    def data_ptr(self) -> int:
        return self.content.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        (first, *_) = [one for one in tree_leaves((args, kwargs)) if isinstance(one, cls)]
        return first.operations.operate(func, args, kwargs or {})


class Operations(TorchDispatchMode):
    """``stream`` gives the current stream of the calling thread. ``waits`` names each operation that blocked the host.
    ``without_half``: the operations that the device has no half kernel for.

    Works on tensors of any thread; a tensor is made on the device only by a thread that has entered it.
    """

    def __init__(self, queues: WorkQueues, allocator: Allocator, stream: Callable[[], int]) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.without_half: set[str] = set()
        self._queues, self._allocator, self._stream = queues, allocator, stream
        self._workspaces: dict[tuple[int, int], Block] = {}  # by thread, which has a handle, and stream
        self._pinned: dict[int, Tensor] = {}  # by address; never given back, so that no address comes twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.operate(func, args, kwargs or {})

    def operate(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        if any(isinstance(one, FakeTensor) for one in tensors):
            return func(*args, **kwargs)
        if func is torch.ops.prim.device.default:
            return DEVICE
        asked = kwargs.get("device")
        there = asked is not None and torch.device(asked).type == "cuda"
        if not there and not any(isinstance(one, DeviceTensor) for one in tensors):
            return self._on_the_host(func, args, kwargs)
        if _gives_a_view(func) and func._can_decompose():
            with self:
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        with self._queues.changed:
            self._queues.check()
            self._queues.check_launch()
            return self._on_the_device(func, args, {k: v for k, v in kwargs.items() if k != "device"}, asked)

    def _on_the_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not kwargs.get("pin_memory"):
            return func(*args, **kwargs)
        made = func(*args, **{**kwargs, "pin_memory": False})
        if made.numel():
            made.view(-1).view(torch.uint8).fill_(RUBBISH)
        self._pinned[made.untyped_storage().data_ptr()] = made
        return made

    def _on_the_device(self, func: Any, args: Any, kwargs: Any, asked: Any) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in self.without_half and any(
            isinstance(one, Tensor) and one.dtype is torch.float16 for one in tree_leaves(args)
        ):
            raise RuntimeError(f"\"{name}\" not implemented for 'Half'")
        if func is _aten.copy_.default:
            return self._copy(*args, **kwargs)
        if func is _aten._to_copy.default and asked is not None and torch.device(asked).type == "cpu":
            return self._read(func, args, kwargs, to_host=True)
        if _reads_on_the_host(func, args):
            return self._read(func, args, kwargs, to_host=False)
        if func._schema.is_mutable:
            inner = _inner((args, kwargs))
            self._queues.put(self._stream(), lambda: func(*inner[0], **inner[1]))
            return args[0] if func._schema.returns else None
        if _gives_a_view(func):
            return self._view(func, args, kwargs)
        outputs = self._computed(func, args, kwargs)
        if func is _aten._to_copy.default and not isinstance(args[0], DeviceTensor):
            self._unless_in_background(args[0], kwargs.get("non_blocking", False), str(func))
        return outputs

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """New tensors, which hold rubbish until the stream gets there."""
        for one in tree_leaves((args, kwargs)):
            if isinstance(one, Tensor) and not isinstance(one, DeviceTensor) and one.dim():
                assert func is _aten._to_copy.default, f"{func} mixes a tensor of the host with the device's"
        like = _meta((args, kwargs))
        with _disable_current_modes():
            shapes = func(*like[0], device="meta", **like[1]) if _makes(func) else func(*like[0], **like[1])
        if not any(isinstance(one, Tensor) for one in tree_leaves(shapes)):
            return shapes  # a size
        single = isinstance(shapes, Tensor)
        outputs = [self._new(one) for one in ([shapes] if single else shapes)]
        inner, targets = _inner((args, kwargs)), [one.content for one in outputs]

        any_order = is_any_order(func, args, kwargs)

        def run() -> None:
            self._allocator.check_mapped(*targets)
            found = func(*inner[0], **inner[1])
            if any_order and found.is_floating_point():
                found = found * (1 + self._queues.noise() * torch.finfo(found.dtype).eps)
            for target, value in zip(targets, [found] if single else found, strict=True):
                target.copy_(value)

        if func._schema.name.removeprefix("aten::") in _PRODUCTS:
            self._through_workspace(lambda: func(*inner[0], **inner[1]), targets[0])
        else:
            self._queues.put(self._stream(), run)
        return outputs[0] if single else tuple(outputs)

    def _through_workspace(self, product: Callable[[], Tensor], target: Tensor) -> None:
        """Partial sums are in the workspace between two kernels of the stream."""
        stream = self._stream()
        key = threading.get_ident(), stream
        if key not in self._workspaces:
            self._workspaces[key] = self._allocator.take(_WORKSPACE, stream)
        memory, bits = self._workspaces[key].memory, list[Tensor]()

        def begin() -> None:
            self._allocator.check_mapped(memory)
            bits[:] = [product().contiguous().reshape(-1).view(torch.uint8).clone()]
            memory[: min(_WORKSPACE, len(bits[0]))] = bits[0][:_WORKSPACE]

        def end() -> None:
            self._allocator.check_mapped(memory, target)
            bits[0][:_WORKSPACE] = memory[: min(_WORKSPACE, len(bits[0]))]
            target.copy_(bits[0].view(target.dtype).view(target.shape))

        self._queues.put(stream, begin)
        self._queues.put(stream, end)

    def clear_workspaces(self, stream: int) -> None:
        for key in [key for key in self._workspaces if key[1] == stream]:
            del self._workspaces[key]

    def _new(self, like: Tensor) -> DeviceTensor:
        reach = 1 + sum((size - 1) * step for size, step in zip(like.size(), like.stride(), strict=True))
        block = self._allocator.take(reach * like.element_size() if like.numel() else 0, self._stream())
        flat = block.memory[: max(reach, 0) * like.element_size()].view(like.dtype)
        return DeviceTensor(flat.as_strided(like.size(), like.stride()), block, self)

    def _view(self, func: Any, args: Any, kwargs: Any) -> Any:
        (base,) = [one for one in tree_leaves((args, kwargs)) if isinstance(one, DeviceTensor)]
        block, inner = base.block, _inner((args, kwargs))
        with _disable_current_modes():
            found = func(*inner[0], **inner[1])
        with torch.inference_mode(base.is_inference()):  # torch notes a weight's view as one
            return tree_map_only(Tensor, lambda one: DeviceTensor(one, block, self), found)

    def _read(self, func: Any, args: Any, kwargs: Any, to_host: bool) -> Any:
        """The host waits for the stream and then has the result."""
        self._wait(str(func))
        inner = _inner((args, kwargs))
        with _disable_current_modes():
            found = func(*inner[0], **inner[1])
        if to_host or not isinstance(found, Tensor | tuple):
            return found
        return tree_map_only(Tensor, self._uploaded, found)

    def _uploaded(self, value: Tensor) -> DeviceTensor:
        made = self._new(value)
        made.content.copy_(value)
        return made

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        inner = _inner((target, source))
        if not isinstance(source, DeviceTensor) and not self._is_pinned(source):
            inner = (inner[0], source.clone())  # the driver has read pageable memory when the call returns
        self._queues.put(self._stream(), lambda: inner[0].copy_(inner[1]))
        host = next((one for one in (target, source) if not isinstance(one, DeviceTensor)), None)
        if host is not None:
            self._unless_in_background(host, non_blocking, "copy_")
        return target

    def _unless_in_background(self, host: Tensor, non_blocking: bool, name: str) -> None:
        if not (non_blocking and self._is_pinned(host)):
            self._wait(f"{name} of pageable memory" if non_blocking else f"{name} without non_blocking")

    def _wait(self, name: str) -> None:
        self.waits.append(name)
        self._queues.synchronize(self._stream())

    def _is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned


def _inner(tree: Any) -> Any:
    return tree_map_only(DeviceTensor, lambda one: one.content, tree)


def _meta(tree: Any) -> Any:
    def like(one: Tensor) -> Tensor:
        return torch.empty_strided(one.size(), one.stride(), dtype=one.dtype, device="meta")

    with _disable_current_modes():
        return tree_map_only(Tensor, like, tree)


def _makes(func: Any) -> bool:
    """True if the operator makes a tensor from no other."""
    return not any("Tensor" in str(argument.type) for argument in func._schema.arguments)


def _gives_a_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write


def _reads_on_the_host(func: Any, args: Any) -> bool:
    if func is _aten.index.Tensor:  # only a mask's count is known to the device alone
        return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])
    return func in _SCALARS or bool(_READ_BY_THE_HOST & set(func.tags))
