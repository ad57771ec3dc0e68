"""The Open Inference Protocol's datatype names and their numpy and torch dtypes.

Source: Open Inference Protocol, "Tensor Data Types" (BF16 as in Triton's binary tensor extension).
torch is imported where one of its dtypes is asked for: a process that reads a training file has no need of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from ..errors import BadFolder
from ..files.json_fields import JsonFields

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Datatype:
    """One wire name with its little-endian numpy dtype and its torch dtype."""

    name: str
    numpy: np.dtype
    torch_name: str

    @property
    def torch(self) -> "torch.dtype":
        import torch

        return getattr(torch, self.torch_name)

    @property
    def itemsize(self) -> int:
        return self.numpy.itemsize

    @property
    def is_float(self) -> bool:
        return self.name[:2] in ("FP", "BF")


DATATYPES: dict[str, Datatype] = {
    name: Datatype(name, np.dtype(scalar).newbyteorder("<"), torch_name)
    for name, scalar, torch_name in (
        ("BOOL", np.bool_, "bool"),
        ("UINT8", np.uint8, "uint8"),
        ("UINT16", np.uint16, "uint16"),
        ("UINT32", np.uint32, "uint32"),
        ("UINT64", np.uint64, "uint64"),
        ("INT8", np.int8, "int8"),
        ("INT16", np.int16, "int16"),
        ("INT32", np.int32, "int32"),
        ("INT64", np.int64, "int64"),
        ("FP16", np.float16, "float16"),
        ("BF16", ml_dtypes.bfloat16, "bfloat16"),
        ("FP32", np.float32, "float32"),
        ("FP64", np.float64, "float64"),
    )
}

_BY_NUMPY = {datatype.numpy: name for name, datatype in DATATYPES.items()}


def name_of(dtype: np.dtype) -> str:
    """The wire name of a numpy dtype, or the dtype's own name where the protocol has none."""
    return _BY_NUMPY.get(dtype.newbyteorder("<"), str(dtype))


@dataclass(frozen=True, slots=True)
class Wire(JsonFields):
    """The smaller datatype that requests carry in place of the model's: ``value · scale + offset``, applied where the
    model runs. A picture input has its scale and offset in its entry.

    Computed in FP32 (FP64 for an FP64 model) and rounded once to the model's datatype: the same numbers as if the
    caller had computed them and sent the larger datatype (`engines/wire_widening.py`).
    """

    datatype: str
    scale: float = 1.0
    offset: float = 0.0

    @property
    def type(self) -> Datatype:
        return DATATYPES[self.datatype]

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | None) -> "Wire | None":
        return None if data is None else cls(data["datatype"], data["scale"], data["offset"])

    def check(self, datatype: str) -> None:
        """Raises BadFolder where the model's ``datatype`` is not wider, or does not have every value of the wire's."""
        wide = DATATYPES[datatype]
        fitting = [name for name, narrow in DATATYPES.items() if _fits(narrow, wide)]
        if self.datatype not in fitting:
            raise BadFolder(
                f"wire_datatype = {self.datatype!r} does not fit datatype {datatype}: expected a smaller one whose "
                f"every value it holds ({', '.join(fitting) or 'there is none'})"
            )
        if not wide.is_float and (self.scale, self.offset) != (1.0, 0.0):
            raise BadFolder(
                f"wire_scale and wire_offset make fractions, and datatype {datatype} has none: leave them out"
            )


def _fits(narrow: Datatype, wide: Datatype) -> bool:
    if "BOOL" in (narrow.name, wide.name):
        return False
    return narrow.itemsize < wide.itemsize and np.can_cast(narrow.numpy, wide.numpy, "safe")
