"""The sections of a report about the plan: the same sections for every back end."""

from typing import Any

from ..gate.curve import Curve, Tap, divergence_curve
from ..gate.diagnosis import diagnosed
from ..gate.parity import UNIT_ROUNDOFF
from ..gate.verdict import ParityReport
from ..graph.backend import Graph
from ..graph.traffic import Traffic, worth
from ..prove import ReferenceRun, floor_report
from ..search.delta_debugging import Found
from ..sections import (
    casts_section,
    profile_section,
    recommendation_section,
    search_section,
    weights_section,
)


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

    def original(tap: Tap) -> object:
        return settled.original(tap)(settled.example)

    def half(tap: Tap) -> object:
        return settled.half(observe=tap)(settled.example)

    return divergence_curve(settled.nodes(), original, half, UNIT_ROUNDOFF[settled.precision.dtype])


def with_diagnosis(settled: Graph, report: ParityReport, reference_run: ReferenceRun) -> ParityReport:
    """The report with the floor, and range or precision where it is a refusal."""
    if settled.precision.level == "O0":
        return report
    first = None if report.passed else curve(settled).first
    floor = floor_report(reference_run, report.dtype, settled.half(floor=True))
    return diagnosed(report, floor, first and first.to_json())
