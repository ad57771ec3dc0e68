"""The protocol of a back end: one FP32 graph, ready to be planned, and its halves.

The back ends are `torch/program_graph.py` (torch.fx) and `onnx/precision/file_graph.py` (ONNX). A back end says which
nodes may be half, runs a half under a plan and writes it; `plan/` decides.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np

from ...models.folder.package import Precision
from ...models.spec.spec import ModelSpec
from ..inputs.samples import Samples
from ..policy.operations import Operations
from ..question import Answers, Arrays, TieTolerance
from .actions import Kept

Observe = Callable[[str, np.ndarray], None]  # node, a floating result of it


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node that is half and may be kept in FP32; ``reason``: why it may be in danger, empty where nothing says so."""

    node: str
    op: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A node of a graph. ``inputs``: the nodes whose results it reads, those of the graph around a body included.
    ``reads_input``: true if it is an input of the model, or reads one."""

    name: str
    op: str
    inputs: tuple[str, ...]
    reads_input: bool = False


def computed_from(
    nodes: Sequence[GraphNode], makers: Mapping[str, str], outputs: Collection[str]
) -> set[str]:
    """The nodes that these outputs are computed from. ``makers``: the node of each output.

    A node whose result nobody reads counts as well, with all that it reads: it is written into another, or stands in a
    body. So does one that writes into its input, as torch names it, for others may read it there.
    """
    read = {name for node in nodes for name in node.inputs} | {*makers.values()}
    found = {makers[name] for name in outputs if name in makers}
    for node in reversed(nodes):
        if node.name in found or node.name not in read or node.op.endswith("_"):
            found.update((node.name, *node.inputs))
    return found


def not_shown(outputs: Collection[str]) -> str:
    """The reason why a node stays in FP32 that these outputs are computed from."""
    names = ", ".join(f"'{name}'" for name in sorted(outputs))
    return f"the judged samples cannot tell whether {names} would be equal"


# The reason why a node stays in FP32 whose error no sample shows.
NEVER_RUN = (
    "no sample makes it compute a number: it is in a branch that no sample takes, in a loop that runs zero times, or "
    "reads rows that no sample has; with samples that reach it, it may be half"
)


class Graph(Protocol):
    """One FP32 graph with a level's rules applied: what the planner works on."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def precision(self) -> Precision: ...

    @property
    def kept(self) -> Sequence[Kept]:
        """Nodes that the rules keep in FP32, each for its reason."""
        ...

    def operations(self) -> Operations:
        """The number of operations of one execution."""
        ...

    @property
    def repairs(self) -> Sequence[Mapping[str, Any]]:
        """The exact rewrites that were done before planning: rows of the report."""
        ...

    @property
    def example(self) -> Arrays:
        """A batch of one to three samples."""
        ...

    def original(self, observe: Observe | None = None) -> Answers:
        """The FP32 graph as a function. ``observe``: sees every floating result."""
        ...

    def exact(self) -> Answers:
        """The FP32 graph evaluated another way: in FP64, or with its sums in another order."""
        ...

    def tie_tolerance(self, samples: Samples) -> TieTolerance | None:
        """Finds the integers that may differ because their scores tie; None where the model gives no such integers."""
        ...

    def candidates(self) -> Sequence[Candidate]:
        """The candidates, the most suspicious first."""
        ...

    def has_half(self, kept: Collection[str] = ()) -> bool:
        """True if any node is half when the nodes ``kept`` are in FP32 as well."""
        ...

    def half(
        self, kept: Collection[str] = (), *, floor: bool = False, observe: Observe | None = None
    ) -> Answers:
        """The half with the nodes ``kept`` in FP32 as well, every half value rounded to half.

        ``floor``: rounded to half's mantissa with FP32's exponent. ``observe``: sees every floating result.
        """
        ...

    def repaired(self) -> Self | None:
        """The graph with exact repairs of values that overflow; None where there is nothing to repair."""
        ...

    def settled(self, kept: Sequence[Kept]) -> Self:
        """The graph with the nodes ``kept`` in FP32 as well and its casts placed: its ``half`` is the one written."""
        ...

    def nodes(self) -> Sequence[GraphNode]:
        """The nodes in the order in which they run."""
        ...

    def profile(self) -> Mapping[str, Any]:
        """The range of every node's result on the planning samples: `ranges.profile.Profile.to_json`."""
        ...

    def weights(self) -> Sequence[Mapping[str, Any]]:
        """The error of rounding each constant that is read in half: rows of `autocast.ledger.Ledger.to_json`."""
        ...
