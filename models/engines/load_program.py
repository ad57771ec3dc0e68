"""A captured program of a version on disk, and its engine."""

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
from .torch_engine import TorchEngine
from .true_fp32 import use_true_fp32


def original_program(version: Version) -> ExportedProgram:
    """The FP32 original with its weights. Raises DamagedFile naming the file."""
    with version.opened("original.pt2") as file:
        return load_program(file, _weights(version))


def half_program(version: Version) -> ExportedProgram:
    """The half with its weights. Raises DamagedFile naming the file."""
    with version.opened("half.pt2") as file:
        return load_program(file)


def original_module(version: Version) -> GraphModule:
    """The FP32 original as a graph that can be called, on a CPU. Raises DamagedFile naming the file."""
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


def load_program_engine(
    version: Version, name: str, device: torch.device, setup: CpuSetup = PLAIN
) -> TorchEngine:
    """The program ``original.pt2`` or ``half.pt2`` as an engine."""
    use_true_fp32()
    is_half, spec = name == "half.pt2", version.spec()
    program = _runnable(version, name, device, None if is_half else _weights(version))
    precision = version.manifest["half"] if is_half else "fp32"
    return TorchEngine(program, precision, device, setup, rows_apart=spec.batched, spec=spec)
