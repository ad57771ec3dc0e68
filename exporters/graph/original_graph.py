"""The protocol of an FP32 original whose run can be changed at a node (`OriginalGraph`); both back ends have it.

`ProgramOriginal` (`torch/forms.py`) and `FileOriginal` (`onnx/forms.py`) implement it; `proof/planted_faults.py` plants
faults with it, and `proof/no_reference.py` finds the node where FP32's own noise is born.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from ..question import Answers, Arrays
from .backend import GraphNode, Observe

# Another result of a node → the answers of the run that goes on with it.
Rest = Callable[[np.ndarray], Arrays]
# A node, its floating result, and the rest of the run behind it.
Visit = Callable[[str, np.ndarray, Rest], None]


class OriginalGraph(Protocol):
    """An FP32 model as a graph."""

    def nodes(self) -> Sequence[GraphNode]:
        """The nodes in the order in which they run; those of bodies are left out by `watched`."""
        ...

    def makers(self) -> Mapping[str, str]:
        """The node that gives each output; an output that no node gives is left out."""
        ...

    def watched(self, inputs: Arrays, visit: Visit) -> Arrays:
        """The answers of one run. ``visit`` sees every floating result when it is made; what runs before it is not run
        again for the rest behind it."""
        ...

    def as_served(self, observe: Observe) -> Answers:
        """The graph as it is served. ``observe``: sees every floating result."""
        ...

    def otherwise(self, observe: Observe) -> Answers:
        """The graph evaluated another way: in FP64, or with its sums in another order."""
        ...
