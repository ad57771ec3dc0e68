"""The planning driver: the nodes that stay in FP32, searched for where the level's rules alone do not pass.

One for every back end (`graph.backend.Graph`). The rules propose, the search finds the fewest more nodes that must be
FP32, each with a reason and evidence.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, TypeVar

from ..graph.actions import Kept
from ..graph.backend import Graph
from ..inputs.samples import Samples
from ..search.delta_debugging import FAILED, NOT_ASKED, NOT_NEEDED, Budget, Found, outcome, refined
from .aims import RETREATS, SEARCHED, SHARES, Aims, aims, largest_of, stricter
from .rehearsal import Rehearsal

BUDGET = Budget(evaluations=400, operations=1 << 40)  # about a minute of one core
NAMED = 12  # of the nodes that a refusal proposes to keep
RETREAT = "its error in half adds to that of the others"
TOO_CLOSE = "the proof without it and its like missed a limit"

G = TypeVar("G", bound=Graph)
Notify = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class CandidatePlan(Generic[G]):
    """A graph, repaired or not, and the nodes that stay in FP32: by rule, and ``searched`` by trial.

    ``found`` is None where nothing was searched for, or where nothing passes whatever is kept.
    """

    graph: G
    searched: tuple[Kept, ...] = ()
    found: Found | None = None

    @property
    def names(self) -> list[str]:
        return [kept.node for kept in self.searched]

    @property
    def kept(self) -> tuple[Kept, ...]:
        return (*self.graph.kept, *self.searched)


class Planner(Generic[G]):
    """Settles the plan of one graph; may be asked again, under stricter limits.

    ``search``: look for kept nodes at O3 too, which otherwise means exactly what was asked; None: at no level.
    ``why_failed``: the limit of the gate that the plan misses on the planning samples, where the search failed;
    empty otherwise.
    """

    def __init__(self, graph: G, planning: Samples, search: bool | None) -> None:
        self.graph, self._planning = graph, planning
        self.plan = CandidatePlan(graph)
        self.search = NOT_ASKED
        self.why_failed = ""
        level = graph.precision.level
        self._searches = search is not None and (level in ("O1", "O2") or (level == "O3" and search))
        self._settled = False

    def settle(self, share: float, notify: Notify) -> bool:
        """Plan for ``share`` of the gate's limits; whether that made another plan than before."""
        before, first = self.plan, not self._settled
        self._settled = True
        if not first and share == SEARCHED and self.search != NOT_NEEDED:
            return False  # it was searched for at this share before
        if self._searches and not self.graph.has_half():
            self.search = NOT_NEEDED
        elif self._searches and share in RETREATS:
            self.plan, self.why_failed = self._with_more(share, notify), ""
        elif self._searches:
            notify("rehearsing")
            spec, dtype = self.graph.spec, self.graph.precision.dtype
            self.plan = self._searched(aims(spec.parity, dtype, share), notify)
            self.search = outcome(self.plan.found)
            self.why_failed = self._rehearsal.why_it_misses(()) if self.search == FAILED else ""
        return first or self.plan.graph is not before.graph or self.plan.names != before.names

    def _searched(self, limits: Aims, notify: Notify) -> CandidatePlan[G]:
        """The plan that passes with the fewest nodes in FP32: with exact repairs where they save any."""
        plain = self._search(self.graph, self._rehearsal, limits, notify)
        if not plain.searched or plain.found is None:
            return plain
        exhausted = plain.found.exhausted
        if not exhausted and not self.graph.has_half(plain.names) and not self._rehearsal.floor_passes():
            # Rounding errs too much whatever its range: no set of nodes cures that, and nothing would be left in half.
            # The gate refuses the plan as it is, and names the override; where the judged samples pass by chance, the
            # original serves because of `why_failed`.
            return CandidatePlan(self.graph)
        if self._repaired is None:
            return plain
        notify("trying exact repairs")
        repaired = self._search(self._repaired, self._rehearsal_repaired, limits, notify)
        return repaired if repaired.found is not None and len(repaired.kept) < len(plain.kept) else plain

    def nearest(self, notify: Notify) -> str:
        """A sentence about the nearest plan that would pass, for a refusal; empty where none was looked for."""
        if not self._searches or not self.graph.has_half():
            return ""
        plan = self._with_more(SHARES[-1], notify)
        if not plan.graph.has_half(plan.names):
            return "no plan between this one and FP32 everywhere (--level O0) passes on the planning samples"
        count = len(plan.graph.candidates())
        return (
            "the nearest plan that passes on the planning samples keeps "
            f"{len(plan.names)} of {count} nodes in FP32: "
            + " ".join(f"--keep {name}" for name in plan.names[:NAMED])
            + (" …" if len(plan.names) > NAMED else "")
        )

    def _with_more(self, share: float, notify: Notify) -> CandidatePlan[G]:
        """The plan with the costliest other nodes in FP32 too, twice as many until ``share`` of the limits holds."""
        graph, names = self.plan.graph, self.plan.names
        rehearsal = self._rehearsal if graph is self.graph else self._rehearsal_repaired
        limits, largest = stricter(graph.spec.parity, graph.precision.dtype, share), largest_of(share)
        nodes = {one.node: one for one in graph.candidates()}
        others = [name for name in rehearsal.most_costly_first if name not in names]
        more = len(others) if share == RETREATS[-1] else 1
        while more < len(others) and not rehearsal.score([*names, *others[:more]], limits, largest).passed:
            more *= 2
        given = [nodes[name] for name in others[:more]]
        notify(f"the proof misses a limit: {len(given)} of {len(others)} more nodes stay in FP32")
        kept = (
            *self.plan.searched,
            *(Kept(one.node, one.op, one.reason or RETREAT, TOO_CLOSE) for one in given),
        )
        found = self.plan.found and replace(
            self.plan.found, kept=tuple(one.node for one in kept), minimal=False
        )
        return CandidatePlan(graph, kept, found)

    def _search(self, graph: G, rehearsal: Rehearsal, limits: Aims, notify: Notify) -> CandidatePlan[G]:
        """The fewest more nodes in FP32 that pass the rehearsal, each with reason and evidence."""
        candidates = graph.candidates()

        def reorder(names: Sequence[str]) -> Sequence[str]:
            notify(f"search: measuring which of {len(candidates)} nodes cost most in half")
            asked = set(names)
            return [name for name in rehearsal.most_costly_first if name in asked]

        def fails_unseen(names: Collection[str]) -> bool:
            notify("trying the plan on unseen samples")
            return rehearsal.find_counterexamples(names)

        rehearsal.leave_room_for(BUDGET.operations // 2)
        found = refined(
            [one.node for one in candidates],
            lambda names: rehearsal.score(
                names, limits.searched if names else limits.as_it_is, limits.largest
            ),
            fails_unseen,
            budget=BUDGET,
            notify=notify,
            spent=rehearsal.meter.spent,
            reorder=reorder,
        )
        if found is None:
            return CandidatePlan(graph)
        found = replace(found, unseen=rehearsal.counterexamples.tried)
        kept = tuple(
            Kept(one.node, one.op, one.reason or "found by search", _evidence(found, one.node))
            for one in candidates
            if one.node in found.kept
        )
        return CandidatePlan(graph, kept, found)

    @cached_property
    def _repaired(self) -> G | None:
        return self.graph.repaired()

    @cached_property
    def _rehearsal(self) -> Rehearsal:
        return Rehearsal(self.graph, self._planning)

    @cached_property
    def _rehearsal_repaired(self) -> Rehearsal:
        assert self._repaired is not None
        return Rehearsal(self._repaired, self._planning)


def _evidence(found: Found, name: str) -> str:
    score = found.certificate.get(name)
    if score is None:
        return "the search was exhausted before the model was tried without it"
    if not math.isfinite(score.error_u):
        return "without it: the answer is not finite"
    return f"without it: error {score.error_u:.3g}u ({score.reason.partition(': expected')[0]})"
