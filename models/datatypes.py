"""The Open Inference Protocol's datatype names and their numpy and torch dtypes.

Source: Open Inference Protocol, "Tensor Data Types" (BF16 as in Triton's binary tensor extension).
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Datatype:
    """One wire name with its little-endian numpy dtype and its torch dtype."""

    name: str
    numpy: np.dtype
    torch: torch.dtype

    @property
    def itemsize(self) -> int:
        return self.numpy.itemsize

    @property
    def is_float(self) -> bool:
        return self.torch.is_floating_point


DATATYPES: dict[str, Datatype] = {
    name: Datatype(name, np.dtype(scalar).newbyteorder("<"), torch_dtype)
    for name, scalar, torch_dtype in (
        ("BOOL", np.bool_, torch.bool),
        ("UINT8", np.uint8, torch.uint8),
        ("UINT16", np.uint16, torch.uint16),
        ("UINT32", np.uint32, torch.uint32),
        ("UINT64", np.uint64, torch.uint64),
        ("INT8", np.int8, torch.int8),
        ("INT16", np.int16, torch.int16),
        ("INT32", np.int32, torch.int32),
        ("INT64", np.int64, torch.int64),
        ("FP16", np.float16, torch.float16),
        ("BF16", ml_dtypes.bfloat16, torch.bfloat16),
        ("FP32", np.float32, torch.float32),
        ("FP64", np.float64, torch.float64),
    )
}

_BY_NUMPY = {datatype.numpy: name for name, datatype in DATATYPES.items()}


def name_of(dtype: np.dtype) -> str:
    """The wire name of a numpy dtype, or the dtype's own name where the protocol has none."""
    return _BY_NUMPY.get(dtype.newbyteorder("<"), str(dtype))
