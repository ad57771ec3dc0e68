"""The device that a setting names (``auto``, ``cpu`` or ``cuda:N``), checked against the devices of this machine."""

from typing import TYPE_CHECKING

from ..errors import BadSetting

if TYPE_CHECKING:
    import torch


def device_name(word: str) -> str:
    """The name of that device, as torch writes it; torch is not asked about a CPU. Where it is not installed, ``auto``
    is the CPU: it brings what ONNX files need on other devices. Raises as `resolve_device`."""
    try:
        return word if word == "cpu" else str(resolve_device(word))
    except ModuleNotFoundError:
        if word == "auto":
            return "cpu"
        raise


def resolve_device(word: str) -> "torch.device":
    """``auto`` is the first CUDA device if there is one. Raises BadSetting naming the devices that there are."""
    import torch

    if word == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(word)
    except RuntimeError:
        raise BadSetting(f"device {word!r}: expected auto, cpu or cuda:N") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise BadSetting(f"device {word!r}: expected auto, cpu or cuda:N")
    index = device.index or 0
    if index >= torch.cuda.device_count():
        raise BadSetting(
            f"device {word!r}: this machine has {torch.cuda.device_count()} CUDA devices "
            f"(torch {torch.__version__}); run `halfeven doctor` to see what is missing"
        )
    return torch.device("cuda", index)
