"""What makers of captured programs and of ONNX files have in common (`maker.Maker`): a graph that the planner plans."""

from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from ...models.package import Precision
from ..gate.verdict import ParityReport
from ..graph.backend import Graph
from ..graph.traffic import Half, Traffic, why_not_half
from ..inputs.samples import Samples
from ..maker import Notify
from ..prove import ReferenceRun
from ..search.delta_debugging import NOT_ASKED
from ..subject import Subject
from .findings import findings, with_diagnosis
from .planner import Planner

G = TypeVar("G", bound=Graph)
H = TypeVar("H", bound=Half)


@dataclass(slots=True)
class PlannedForms(Generic[G, H]):
    """``settled``: the graph as it was planned, and ``half`` as it is written. ``because``: why the original serves
    although something could be half."""

    subject: Subject
    planner: Planner[G] | None = field(default=None, init=False)
    settled: G = field(init=False)
    half: H = field(init=False)
    because: str = field(default="", init=False)

    def graph(self, precision: Precision, planning: Samples) -> G:
        """The original with the rules of ``precision`` applied."""
        raise NotImplementedError

    def written(self) -> H:
        """The half of ``settled``."""
        raise NotImplementedError

    def traffic(self) -> Traffic:
        """The bytes that the casts of ``half`` move."""
        raise NotImplementedError

    def plan(self, planning: Samples, share: float, notify: Notify) -> bool:
        precision = self.subject.precision
        if self.planner is None:
            notify("profiling")
            self.planner = Planner(self.graph(precision, planning), planning, self.subject.search)
        if not self.planner.settle(share, notify):
            return False
        notify("rewriting")
        plan = self.planner.plan
        self.settled = plan.graph.settled(plan.searched)
        self.half = self.written()
        self.because = why_not_half(self.half, self.traffic)
        if self.because:
            self.settled = self.graph(replace(precision, level="O0"), planning).settled(())
            self.half = self.written()
        return True

    def serve_original(self, because: str) -> None:
        self.subject, self.planner = self.subject.served_original(because), None

    def nearest(self, notify: Notify) -> str:
        return self.planner.nearest(notify) if self.planner else ""

    def facts(self) -> dict[str, Any]:
        half = self.half
        return {
            "nodes": half.nodes,
            "half_nodes": half.half_nodes,
            "fp32_by_policy": half.fp32_by_policy,
            "kept": [kept.to_json() for kept in half.kept],
            "casts": half.casts,
            "bytes": half.bytes,
            "bytes_fp32": half.bytes_fp32,
            "search": self.planner.search if self.planner else NOT_ASKED,
            **({"original_because": why} if (why := self.subject.original_because or self.because) else {}),
        }

    def findings(self, reference_run: ReferenceRun) -> dict[str, Any]:
        assert self.planner is not None
        return findings(self.settled, self.planner.plan.found, self.traffic())

    def diagnosed(self, report: ParityReport, reference_run: ReferenceRun) -> ParityReport:
        return with_diagnosis(self.settled, report, reference_run)
