"""ONNX Runtime on a CUDA device: its settings, and runs on memory that is there already, in a stream of ours.

ONNX Runtime would otherwise copy each input from pageable memory, wait for each run, and take streams of its own
(onnxruntime.ai, "CUDA Execution Provider" and "I/O Binding").
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import onnxruntime
import torch
from torch import Tensor

from ..errors import EngineFailed
from .staging import Staging, cuda_streams, slots_on

_ELEMENT_TYPES = {  # TensorProto.DataType (onnx.proto)
    torch.float32: 1,
    torch.uint8: 2,
    torch.int8: 3,
    torch.int16: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.bool: 9,
    torch.float16: 10,
    torch.float64: 11,
    torch.bfloat16: 16,
}
_DTYPES = {number: dtype for dtype, number in _ELEMENT_TYPES.items()}
VERSIONS_AT_ONCE = 2  # the active one, and one that is loaded to replace it


def settings_for(name: str, file: str) -> dict[str, str]:
    """The provider's options on the device of this name, in whose stream a session of ``file`` is to compute. Raises
    EngineFailed where torch sees no such device."""
    if not torch.cuda.is_available():
        raise EngineFailed(
            f"{file} is to run on {name}, but torch {torch.__version__} sees no CUDA device, and ONNX Runtime "
            "would fall back to CPUExecutionProvider; run `halfeven doctor` to see what is missing"
        )
    device = torch.device(name)
    return provider_settings(device, cuda_streams(device).computing)


def staging_of(name: str, runs: Callable[..., Sequence[Tensor]]) -> Staging:
    """The staging of a session's batches on the device of this name."""
    device = torch.device(name)
    return Staging(cuda_streams(device), runs, slots_on(device))


def provider_settings(device: torch.device, stream: int) -> dict[str, str]:
    """Options of the CUDA provider. ``stream``: the address of the stream that computes.

    A session's arena may take half of the device, and takes what a run needs: the default doubles what it has. The
    default search for a convolution's algorithm tries every one at every new shape, on a request's time.
    """
    _, total_bytes = torch.cuda.mem_get_info(device)
    return {
        "device_id": str(device.index or 0),
        "use_tf32": "0",
        "user_compute_stream": str(stream),
        "cudnn_conv_algo_search": "HEURISTIC",
        "arena_extend_strategy": "kSameAsRequested",
        "gpu_mem_limit": str(total_bytes // VERSIONS_AT_ONCE),
    }


class BoundRuns:
    """Runs of a session whose inputs and outputs are on its device.

    ``waits``: some nodes compute on the host, which then has to have its inputs before it begins: each run is waited
    for. Otherwise a run only puts work into the session's stream.
    """

    def __init__(self, session: onnxruntime.InferenceSession, device: str, waits: bool) -> None:
        self._session, self._device, self._waits = session, torch.device(device), waits
        self._inputs = [value.name for value in session.get_inputs()]
        self._outputs = [value.name for value in session.get_outputs()]
        self._options = onnxruntime.RunOptions()
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "0" if waits else "1")

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """The outputs, in memory of the session's arena that is taken for as long as they are referred to."""
        binding, index = self._session.io_binding(), self._device.index or 0
        for name, tensor in zip(self._inputs, inputs, strict=True):
            element_type = _ELEMENT_TYPES[tensor.dtype]
            binding.bind_input(name, "cuda", index, element_type, list(tensor.shape), tensor.data_ptr())
        for name in self._outputs:
            binding.bind_output(name, "cuda", index)
        if self._waits:
            binding.synchronize_inputs()
        self._session.run_with_iobinding(binding, self._options)
        return [tensor_of(value, self._device) for value in binding.get_outputs()]


@dataclass(frozen=True)
class _Memory:
    """The bytes of a value, as torch takes them; torch keeps this object, and so the value."""

    value: Any

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        size = self.value.tensor_size_in_bytes()
        return {"shape": (size,), "typestr": "|u1", "data": (self.value.data_ptr(), False), "version": 2}


def tensor_of(value: Any, device: torch.device) -> Tensor:
    """An ``OrtValue`` on the device as a tensor over the same memory."""
    dtype, shape = _DTYPES[value.element_type()], value.shape()
    if not value.tensor_size_in_bytes():
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.as_tensor(_Memory(value), device=device).view(dtype).view(shape)
