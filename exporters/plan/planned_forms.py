"""The common part of the makers of programs and of ONNX files (`proof.maker.Maker`): a graph that is planned."""

from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from ...models.folder.package import Precision
from ..gate.curve import Curve, divergence_curve
from ..gate.diagnosis import diagnosed
from ..gate.parity import UNIT_ROUNDOFF
from ..gate.verdict import ParityReport
from ..graph.backend import Graph, Observe
from ..graph.traffic import Half, Traffic, why_not_half, worth
from ..inputs.samples import Samples
from ..proof.maker import Notify
from ..proof.prove import ReferenceRun, floor_report
from ..proof.subject import Subject
from ..report.sections import (
    casts_section,
    profile_section,
    recommendation_section,
    search_section,
    weights_section,
)
from ..search.delta_debugging import NOT_ASKED, Found
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
    _floor: ParityReport | None = field(default=None, init=False)  # of `settled`: the same for every form

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
        self._floor = None
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

    def keep_outputs(self, names: frozenset[str]) -> None:
        self.subject = replace(self.subject, fp32_outputs=names)

    def nearest(self, notify: Notify) -> str:
        return self.planner.nearest(notify) if self.planner else ""

    def why_failed(self) -> str:
        return self.planner.why_failed if self.planner else ""

    def facts(self) -> dict[str, Any]:
        return {
            **self.half.facts(),
            "search": self.planner.search if self.planner else NOT_ASKED,
            **({"original_because": why} if (why := self.subject.original_because or self.because) else {}),
        }

    def findings(self, reference_run: ReferenceRun) -> dict[str, Any]:
        assert self.planner is not None
        return findings(self.settled, self.planner.plan.found, self.traffic())

    def diagnosed(self, report: ParityReport, reference_run: ReferenceRun) -> ParityReport:
        """The report with the floor, and range or precision where it is a refusal."""
        if self.settled.precision.level == "O0":
            return report
        if self._floor is None:
            self._floor = floor_report(reference_run, report.dtype, self.settled.half(floor=True))
        first = None if report.passed else curve(self.settled).first
        return diagnosed(report, self._floor, first and first.to_json())


def findings(settled: Graph, found: Found | None, traffic: Traffic) -> dict[str, Any]:
    """Sections by name. ``settled``: the graph whose half was written; ``found``: by the search, if there was any."""
    if settled.precision.level == "O0":
        return {}
    ops = {kept.node: kept.op for kept in settled.kept}
    sections = {
        "repairs": list(settled.repairs),
        "search": found and search_section(found, ops),
        "profile": profile_section(settled.profile()),
        "weights": weights_section(settled.weights()),
        "casts": casts_section(traffic.casts, traffic.bytes_before),
        "curve": curve(settled).to_json(),
        "recommendation": recommendation_section(worth(traffic.saved, traffic.cast)),
    }
    return {name: section for name, section in sections.items() if section}


def curve(settled: Graph) -> Curve:
    """The half's error at every node, on the example."""

    def original(tap: Observe) -> object:
        return settled.original(tap)(settled.example)

    def half(tap: Observe) -> object:
        return settled.half(observe=tap)(settled.example)

    return divergence_curve(settled.nodes(), original, half, UNIT_ROUNDOFF[settled.precision.dtype])
