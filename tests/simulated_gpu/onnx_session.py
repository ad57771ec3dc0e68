"""ONNX Runtime's CUDA session on the simulated device: a real session of the CPU computes when the queue gets there.

It reads and writes addresses on the device, as the real one does: an answer whose memory was given back is rubbish.
"""

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import onnxruntime
import torch
from halfeven.models.engines import onnx_on_cuda
from halfeven.models.engines.arrays import to_torch
from torch import Tensor

from .gpu import SimulatedGpu
from .memory import Block
from .operations import DeviceTensor

_REAL = onnxruntime.InferenceSession
_NUMPY = {1: np.float32, 2: np.uint8, 7: np.int64, 10: np.float16}  # TensorProto.DataType
_NUMBERS = {np.dtype(one): number for number, one in _NUMPY.items()}


@contextmanager
def onnx_runtime_on(gpu: SimulatedGpu) -> Iterator[None]:
    """Sessions that ask for CUDA get a `Session` on the device."""

    def session(*args: Any, **kwargs: Any) -> Any:
        on_cuda = kwargs["providers"][0][0] == "CUDAExecutionProvider"
        return Session(gpu, *args, **kwargs) if on_cuda else _REAL(*args, **kwargs)

    providers = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    with (
        patch.object(onnxruntime, "InferenceSession", session),
        patch.object(onnxruntime, "get_available_providers", lambda: providers),
        patch.object(onnx_on_cuda.torch, "as_tensor", gpu_tensor),
    ):
        yield


def gpu_tensor(holder: Any, device: torch.device) -> Tensor:
    """``torch.as_tensor`` of a value on the device: a tensor over its memory, which keeps the holder alive."""
    facts = holder.__cuda_array_interface__
    content = torch.from_numpy(_at(facts["data"][0], facts["shape"], np.uint8))
    return DeviceTensor(content, holder, holder.value.gpu.operations)


@dataclass(eq=False)
class Value:
    """An ``OrtValue`` of the device: its memory is taken until nothing refers to it."""

    gpu: SimulatedGpu
    block: Block
    like: np.ndarray

    def element_type(self) -> int:
        return _NUMBERS[self.like.dtype]

    def shape(self) -> list[int]:
        return list(self.like.shape)

    def tensor_size_in_bytes(self) -> int:
        return self.like.nbytes

    def data_ptr(self) -> int:
        return self.block.memory.data_ptr()


@dataclass(eq=False)
class Binding:
    """``wait``: until all work of the session's stream is done."""

    wait: Callable[[], None]
    inputs: dict[str, tuple[int, list[int], Any]] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)

    def bind_input(
        self, name: str, kind: str, index: int, element_type: int, shape: list[int], at: int
    ) -> None:
        assert (kind, index) == ("cuda", 0)
        self.inputs[name] = (at, shape, _NUMPY[element_type])

    def bind_output(self, name: str, kind: str, index: int) -> None:
        assert (kind, index) == ("cuda", 0)
        self.outputs.append(name)

    def synchronize_inputs(self) -> None:
        self.wait()

    def get_outputs(self) -> list[Value]:
        return self.values


class Session:
    """``settings``: the provider's options."""

    def __init__(
        self,
        gpu: SimulatedGpu,
        source: Any,
        options: Any,
        providers: list[tuple[str, Mapping[str, str]]],
        disabled_optimizers: Any = None,
    ) -> None:
        self.gpu, self.settings = gpu, providers[0][1]
        self._real = _REAL(source, providers=["CPUExecutionProvider"])
        asked = self.settings.get("user_compute_stream")
        self._stream = gpu.queues.new_stream() if asked is None else int(asked)

    def get_providers(self) -> list[str]:
        return ["CUDAExecutionProvider", "CPUExecutionProvider"]

    def get_inputs(self) -> Any:
        return self._real.get_inputs()

    def get_outputs(self) -> Any:
        return self._real.get_outputs()

    def get_provider_graph_assignment_info(self) -> list[Any]:
        return []

    def io_binding(self) -> Binding:
        return Binding(lambda: self.gpu.queues.synchronize(self._stream))

    def run_with_iobinding(self, binding: Binding, options: Any) -> None:
        queues, stream = self.gpu.queues, self._stream
        with queues.changed:
            queues.check()
            nothing = {name: np.zeros(shape, dtype) for name, (_, shape, dtype) in binding.inputs.items()}
            likes = self._arrays(binding.outputs, nothing)
            take = self.gpu.memory.take
            binding.values = [Value(self.gpu, take(like.nbytes, stream), like) for like in likes]
            targets = [one.block.memory for one in binding.values]
            inputs = dict(binding.inputs)

            def run() -> None:
                feed = {name: _at(at, shape, dtype) for name, (at, shape, dtype) in inputs.items()}
                for target, found in zip(targets, self._arrays(binding.outputs, feed), strict=True):
                    target[: found.nbytes].copy_(to_torch(found.reshape(-1).view(np.uint8)))

            if options.get_run_config_entry("disable_synchronize_execution_providers") == "1":
                queues.put(stream, run)
            else:  # a node on the CPU reads its inputs at once
                self.gpu.operations.waits.append("a run of ONNX Runtime")
                run()

    def _arrays(self, outputs: list[str], feed: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        return [np.ascontiguousarray(found) for found in self._real.run(outputs, feed)]


def _at(address: int, shape: Sequence[int], dtype: Any) -> np.ndarray:
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory: Any = (ctypes.c_char * count).from_address(address)
    return np.frombuffer(memory, dtype).reshape(shape)
