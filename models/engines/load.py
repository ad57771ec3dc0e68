"""From a version on disk to an engine on a device: the only place that knows which kinds there are."""

import torch
from safetensors.torch import load_file
from torch.export import ExportedProgram

from ..archive import load_program
from ..errors import DamagedFile
from ..store import Version
from .engine import Engine
from .live_engine import load_live
from .onnx_engine import OnnxEngine
from .torch_engine import TorchEngine


def whole_program(version: Version) -> ExportedProgram:
    """The FP32 original with its weights. Raises DamagedFile naming the file."""
    weights = version.file("weights.safetensors")
    try:
        state = load_file(weights)
    except Exception as error:
        raise DamagedFile(f"{weights} is not a safetensors file: {error}") from error
    return load_program(version.file("whole.pt2"), state)


def load_whole(version: Version, form: str, device: torch.device) -> Engine:
    """The FP32 original as an engine; ``form`` is ``torch``, ``onnx`` or ``live``."""
    if form == "live":
        return load_live(version, "fp32", device)
    if form == "onnx":
        return OnnxEngine(version.file("whole.onnx"), "fp32", device)
    return TorchEngine(whole_program(version), "fp32", device)


def load_half(version: Version, form: str, device: torch.device) -> Engine:
    """The half as an engine; whether it may serve is not decided here."""
    precision = version.manifest["half"]
    if form == "live":
        return load_live(version, precision, device)
    if form == "onnx":
        return OnnxEngine(version.file("half.onnx"), precision, device)
    return TorchEngine(load_program(version.file("half.pt2")), precision, device)
