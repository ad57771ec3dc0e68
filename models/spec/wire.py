"""A smaller datatype on the wire than in the model: ``value · scale + offset``, applied where the model runs.

Computed in FP32 (FP64 for an FP64 model) and rounded once to the model's datatype: the same numbers as if the caller
had computed them and sent the larger datatype (`engines/wire_widening.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import BadFolder
from .datatypes import DATATYPES, Datatype


@dataclass(frozen=True, slots=True)
class Wire:
    """The datatype that requests carry in place of the model's. A picture input has its scale and offset in its
    entry."""

    datatype: str
    scale: float = 1.0
    offset: float = 0.0

    @property
    def type(self) -> Datatype:
        return DATATYPES[self.datatype]

    def to_json(self) -> dict[str, Any]:
        return {"datatype": self.datatype, "scale": self.scale, "offset": self.offset}

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
