"""The way from a version on disk to an engine on a device: the only place that chooses the kind of the engine.

What brings a kind's libraries is imported at its first use: ONNX files need no torch on a CPU, and a server of torch
forms alone is 17 MB smaller without ONNX Runtime.
"""

from typing import TYPE_CHECKING

from ..store.store import Version
from .cpu.setup import PLAIN, CpuSetup
from .engine import Engine

if TYPE_CHECKING:
    import torch

    Device = torch.device | str  # ``cpu`` as a word where torch may not be installed


def load_original(version: Version, form: str, device: "Device", setup: CpuSetup = PLAIN) -> Engine:
    """The FP32 original as an engine; ``form`` is ``torch``, ``onnx`` or ``live``, ``setup`` how a CPU is used."""
    return _loaded(version, form, "original", "fp32", device, setup)


def load_half(version: Version, form: str, device: "Device", setup: CpuSetup = PLAIN) -> Engine:
    """The half as an engine; whether it may serve is not decided here. ``setup`` as for the original."""
    return _loaded(version, form, "half", version.manifest["half"], device, setup)


def _loaded(
    version: Version, form: str, part: str, precision: str, device: "Device", setup: CpuSetup
) -> Engine:
    if form == "onnx":
        return _onnx_engine(version, f"{part}.onnx", precision, device, setup)
    import torch

    if form == "live":
        from .live_engine import load_live

        return load_live(version, precision, torch.device(device), setup)
    from .torch_engine import load_program_engine

    return load_program_engine(version, f"{part}.pt2", torch.device(device), setup)


def _onnx_engine(version: Version, name: str, precision: str, device: "Device", setup: CpuSetup) -> Engine:
    """Weights beside the file (one of 2 GB and more) are checked too, but ONNX Runtime finds them by their path."""
    from .onnx_engine import OnnxEngine

    beside = f"{name}.data"
    if version.has(beside):
        version.file(beside)
        return OnnxEngine(version.file(name), precision, device, setup)
    with version.opened(name) as source:
        return OnnxEngine(source, precision, device, setup)
