"""The protocol between the road and one kind of model (captured program, ONNX file, live module): `Maker`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...models.store.store import Draft
from ..gate.verdict import ParityReport
from ..graph.original_graph import OriginalGraph
from ..inputs.samples import Samples
from .no_reference import Operation
from .prove import Answers, ReferenceRun, Taken

Notify = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Made:
    """One form: ``file`` in the draft, and its answers.

    ``taken``: the answers of each execution of the same half that the gate judges; none where nothing in it is half.
    ``serves``: the form as a function, as it will be served.
    """

    file: str
    serves: Answers
    taken: Sequence[Taken] = ()


class Maker(Protocol):
    """Plans one model and makes its forms. The road calls `reference_run`, `write`, `plan`, then `make`.

    What is answered here is the answer of a maker without a graph, whose form is all that is written.
    """

    @property
    def row_operations(self) -> int:
        """An estimate of the operations for one row of the original (`policy/operations.py`); 0 where there is none."""
        return 0

    def original(self) -> Answers:
        """The FP32 original."""
        ...

    def operations_by_name(self) -> Sequence[Operation]:
        """The name and the operation of each node of the original; none where it has no graph."""
        return ()

    def original_graph(self) -> OriginalGraph | None:
        """The FP32 original as a graph whose run can be changed at a node; None where it has no graph."""
        return None

    def reference_run(self, judging: Samples) -> ReferenceRun:
        """The FP32 original's answers to the judging samples."""
        ...

    def plan(self, planning: Samples, share: float, notify: Notify) -> bool:
        """Decide what is half, to pass ``share`` of the gate's limits on ``planning``; gives whether the plan
        changed."""
        ...

    def serve_original(self, because: str) -> None:
        """Make nothing half, whatever the level that was asked for and what was planned before."""
        ...

    def keep_outputs(self, names: frozenset[str]) -> None:
        """Keep in FP32 all that these outputs are computed from; asked only of a maker with a graph."""

    def why_failed(self) -> str:
        """The limit of the gate that the plan misses on the samples that chose it, where no set of kept nodes passes
        there; empty otherwise."""
        return ""

    def nearest(self, notify: Notify) -> str:
        """A sentence about the nearest plan that would pass, for a refusal; may be empty."""
        return ""

    def write(self, draft: Draft) -> None:
        """Write the original and the files that all forms share."""

    def make(self, name: str, draft: Draft, reference_run: ReferenceRun) -> Made:
        """Write one form. Raises CannotConvert where it cannot be made."""
        ...

    def diagnosed(self, report: ParityReport, reference_run: ReferenceRun) -> ParityReport:
        """The report with the floor and, for a refusal, with the diagnosis (range or precision)."""
        return report

    def facts(self) -> dict[str, Any]:
        """Facts of the half for each form: nodes, half_nodes, kept, casts, bytes, …, and ``search``.

        ``search``: `search.delta_debugging.outcome`. ``original_because``, why the maker decides on the original.
        ``choosing``, where a node chooses by comparing: a sentence about it (`onnx/forms.py`).
        """
        ...

    def plan_json(self) -> dict[str, Any]:
        """The contents of ``precision.json``."""
        ...

    def findings(self, reference_run: ReferenceRun) -> dict[str, Any]:
        """The sections of the report beyond the gate, by name."""
        return {}
