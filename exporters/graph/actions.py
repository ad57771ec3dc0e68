"""The two decisions that a precision plan records for a node.

`Action` is the dtype in which the node reads its inputs; `Kept` says that the node stays in FP32, and why.
"""

from dataclasses import dataclass
from enum import Enum

from ...models.files.json_fields import JsonFields


class Action(Enum):
    """The dtype in which a node reads its floating inputs (float64 is never cast, as in autocast)."""

    HALF = "half"
    FP32 = "fp32"
    FP32_DTYPE = "fp32 by dtype argument"
    FP32_BACK = "fp32, result back to half"
    WIDEST = "widest input"
    FIRST = "as its first input"
    INPUT = "as its inputs"


@dataclass(frozen=True, slots=True)
class Kept(JsonFields):
    """A node that the policy would run in half and the plan keeps in FP32. ``source``: the file name and line of the
    module's code that it was traced from; empty for a node of a file and for a module of the live form."""

    node: str
    op: str
    reason: str
    evidence: str = ""
    source: str = ""
