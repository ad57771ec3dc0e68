"""From a version on disk to an engine on a device: the only place that chooses the kind of the engine."""

import torch
from safetensors.torch import load_file
from torch.export import ExportedProgram
from torch.fx import GraphModule

from ..archive.archive import load_program
from ..archive.plain_program import read_module
from ..errors import DamagedFile
from ..program import runnable
from ..store.store import Version
from .cpu.setup import PLAIN, CpuSetup
from .engine import Engine
from .live_engine import load_live
from .torch_engine import TorchEngine


def original_program(version: Version) -> ExportedProgram:
    """The FP32 original with its weights. Raises DamagedFile naming the file."""
    with version.opened("original.pt2") as file:
        return load_program(file, _weights(version))


def half_program(version: Version) -> ExportedProgram:
    """The half with its weights. Raises DamagedFile naming the file."""
    with version.opened("half.pt2") as file:
        return load_program(file)


def original_module(version: Version) -> GraphModule:
    """The same as a graph that runs, on a CPU. Raises DamagedFile naming the file."""
    program = _runnable(version, "original.pt2", torch.device("cpu"), _weights(version))
    return program if isinstance(program, GraphModule) else runnable(program)


def _weights(version: Version) -> dict[str, torch.Tensor]:
    with version.opened("weights.safetensors") as weights:
        try:
            return load_file(weights.again)
        except Exception as error:
            raise DamagedFile(f"{weights.path} is not a safetensors file: {error}") from error


def _runnable(
    version: Version, name: str, device: torch.device, state: dict[str, torch.Tensor] | None = None
) -> ExportedProgram | GraphModule:
    """A program as a graph that runs, where it can be read without torch.export; only that can move one to a GPU."""
    with version.opened(name) as file:
        module = read_module(file, state) if device.type == "cpu" else None
        return module if module is not None else load_program(file, state)


def load_original(version: Version, form: str, device: torch.device, setup: CpuSetup = PLAIN) -> Engine:
    """The FP32 original as an engine; ``form`` is ``torch``, ``onnx`` or ``live``, ``setup`` how a CPU is used."""
    if form == "live":
        return load_live(version, "fp32", device, setup)
    if form == "onnx":
        return _onnx_engine(version, "original.onnx", "fp32", device, setup)
    program, spec = _runnable(version, "original.pt2", device, _weights(version)), version.spec()
    return TorchEngine(program, "fp32", device, setup, rows_apart=spec.batched, spec=spec)


def load_half(version: Version, form: str, device: torch.device, setup: CpuSetup = PLAIN) -> Engine:
    """The half as an engine; whether it may serve is not decided here. ``setup`` as for the original."""
    precision = version.manifest["half"]
    if form == "live":
        return load_live(version, precision, device, setup)
    if form == "onnx":
        return _onnx_engine(version, "half.onnx", precision, device, setup)
    program, spec = _runnable(version, "half.pt2", device), version.spec()
    return TorchEngine(program, precision, device, setup, rows_apart=spec.batched, spec=spec)


def _onnx_engine(
    version: Version, name: str, precision: str, device: torch.device, setup: CpuSetup
) -> Engine:
    """ONNX Runtime is imported here, at the first use: a server of torch forms alone is 17 MB smaller without it.

    Weights beside the file (one of 2 GB and more) are checked too, but ONNX Runtime finds them by their path.
    """
    from .onnx_engine import OnnxEngine

    beside = f"{name}.data"
    if version.has(beside):
        version.file(beside)
        return OnnxEngine(version.file(name), precision, device, setup)
    with version.opened(name) as source:
        return OnnxEngine(source, precision, device, setup)
