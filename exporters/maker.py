"""How one kind of model becomes its forms: what the road asks of a captured program, a file, a live module."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..models.store import Draft
from .gate.verdict import ParityReport
from .inputs.samples import Samples
from .prove import Answers, ReferenceRun, Taken

Notify = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Made:
    """One form, written: ``file`` in the draft, and how it answers.

    ``taken``: one for each execution of the same half that the gate is to judge; none where nothing in it is
    half. ``serves``: as it will be served.
    """

    file: str
    serves: Answers
    taken: Sequence[Taken] = ()


class Maker(Protocol):
    """How one kind of model becomes its forms."""

    @property
    def row_operations(self) -> int:
        """An estimate for one row of the whole (`operations.py`)."""
        ...

    def reference_run(self, judging: Samples) -> ReferenceRun:
        """The FP32 original's answers to the judging samples."""
        ...

    def plan(self, planning: Samples, share: float, notify: Notify) -> bool:
        """Settle what is half, to pass ``share`` of the gate's limits on ``planning``; whether that changed it."""
        ...

    def nearest(self, notify: Notify) -> str:
        """A sentence about the nearest plan that would pass, for a refusal; may be empty."""
        ...

    def write(self, draft: Draft) -> None:
        """The original and whatever all forms share."""
        ...

    def make(self, name: str, draft: Draft, reference_run: ReferenceRun) -> Made:
        """Write one form. Raises CannotConvert where it cannot be made."""
        ...

    def diagnosed(self, report: ParityReport, reference_run: ReferenceRun) -> ParityReport:
        """The report with the floor, and range or precision where it is a refusal."""
        ...

    def facts(self) -> dict[str, Any]:
        """What each form shows of the half: nodes, half_nodes, kept, casts, bytes, …, and ``search``.

        ``search``: `delta_debugging.outcome`.
        """
        ...

    def plan_json(self) -> dict[str, Any]:
        """What ``precision.json`` holds."""
        ...

    def findings(self, reference_run: ReferenceRun) -> dict[str, Any]:
        """What the report shows beyond the gate: sections by name."""
        ...
