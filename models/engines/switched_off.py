"""Features that are switched off on a device, because the selftest found them wrong there; the plain way is used.

The settings are the process's, by device: those of a store are taken before its versions are loaded.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CUDA_GRAPHS = "CUDA graphs"
TWO_IN_FLIGHT = "two batches in flight"
PINNED_STAGING = "pinned staging"
TORCH_HALF = "torch half"
ONNX_HALF = "onnx half"
DEVICE = "device"  # there is no plain way: nothing is served from it
FEATURES = (CUDA_GRAPHS, TWO_IN_FLIGHT, PINNED_STAGING, TORCH_HALF, ONNX_HALF, DEVICE)

_off: dict[str, Mapping[str, str]] = {}  # by device: feature → reason


def switch_off(device: "torch.device", off: Mapping[str, str]) -> None:
    """From now on these features (name → reason) are off on the device, and all others are on."""
    _off[str(device)] = dict(off)


def features_off(device: "torch.device") -> Mapping[str, str]:
    """The features that are off on the device, each with its reason."""
    return _off.get(str(device), {})


def is_off(feature: str, device: "torch.device") -> bool:
    return feature in features_off(device)


@contextmanager
def only_off(device: "torch.device", *features: str) -> Iterator[None]:
    """Exactly these features are off within the block."""
    before = _off.get(str(device), {})
    switch_off(device, dict.fromkeys(features, "the selftest tries without it"))
    try:
        yield
    finally:
        switch_off(device, before)
