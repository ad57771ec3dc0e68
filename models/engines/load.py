"""From a version on disk to an engine on a device: the only place that knows which kinds there are."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.export import ExportedProgram
from torch.fx import GraphModule

from ..archive import load_program
from ..errors import DamagedFile
from ..plain_program import read_module
from ..program import runnable
from ..store import Version
from .engine import Engine
from .live_engine import load_live
from .torch_engine import TorchEngine


def whole_program(version: Version) -> ExportedProgram:
    """The FP32 original with its weights. Raises DamagedFile naming the file."""
    return load_program(version.file("whole.pt2"), _weights(version))


def whole_module(version: Version) -> GraphModule:
    """The same as a graph that runs, on a CPU. Raises DamagedFile naming the file."""
    program = _runnable(version.file("whole.pt2"), torch.device("cpu"), _weights(version))
    return program if isinstance(program, GraphModule) else runnable(program)


def _weights(version: Version) -> dict[str, torch.Tensor]:
    weights = version.file("weights.safetensors")
    try:
        return load_file(weights)
    except Exception as error:
        raise DamagedFile(f"{weights} is not a safetensors file: {error}") from error


def _runnable(
    path: Path, device: torch.device, state: dict[str, torch.Tensor] | None = None
) -> ExportedProgram | GraphModule:
    """A program as a graph that runs, where that can be read without torch.export; it alone moves one to a GPU."""
    module = read_module(path, state) if device.type == "cpu" else None
    return module if module is not None else load_program(path, state)


def load_whole(version: Version, form: str, device: torch.device, threads: int = 0) -> Engine:
    """The FP32 original as an engine; ``form`` is ``torch``, ``onnx`` or ``live``.

    ``threads`` within an operation on a CPU; 0 leaves it to the engine.
    """
    if form == "live":
        return load_live(version, "fp32", device, threads)
    if form == "onnx":
        return _onnx_engine(version.file("whole.onnx"), "fp32", device, threads)
    program, spec = _runnable(version.file("whole.pt2"), device, _weights(version)), version.spec()
    return TorchEngine(program, "fp32", device, threads, rows_apart=spec.batched, spec=spec)


def load_half(version: Version, form: str, device: torch.device, threads: int = 0) -> Engine:
    """The half as an engine; whether it may serve is not decided here. ``threads`` as for the whole."""
    precision = version.manifest["half"]
    if form == "live":
        return load_live(version, precision, device, threads)
    if form == "onnx":
        return _onnx_engine(version.file("half.onnx"), precision, device, threads)
    program, spec = _runnable(version.file("half.pt2"), device), version.spec()
    return TorchEngine(program, precision, device, threads, rows_apart=spec.batched, spec=spec)


def _onnx_engine(path: Path, precision: str, device: torch.device, threads: int) -> Engine:
    """Imported when first asked for: a server of torch forms alone is 17 MB smaller without ONNX Runtime."""
    from .onnx_engine import OnnxEngine

    return OnnxEngine(path, precision, device, threads=threads)
