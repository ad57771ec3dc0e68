"""The precision plan settled: the lists propose, the profile suspects, the search finds what must stay FP32."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from ...models.engines.arrays import to_torch
from ...models.program import duplicate, runnable, walk
from ...models.spec import ParityLimits
from ..autocast.composites import open_composites
from ..autocast.dtypes import Dtypes
from ..autocast.emulation import Emulation, Tap, half_rounding, mantissa_rounding
from ..autocast.kernels import keep_without_kernel
from ..autocast.ledger import Ledger, weigh
from ..autocast.placement import Placed, place
from ..autocast.plan import Kept, PrecisionPlan, make_plan, op_name
from ..autocast.policy import CUDA, Rule
from ..autocast.rewrite import HalfProgram
from ..autocast.traffic import cast_map, saved_bytes, worth
from ..gate.curve import Curve, divergence_curve
from ..gate.parity import UNIT_ROUNDOFF
from ..inputs.samples import Samples
from ..maker import SHARES, Say
from ..ranges.profile import Profile, profile
from ..ranges.repairs import Repair, apply
from ..ranges.repairs import candidates as repairable
from ..ranges.sentinels import rewrite_sentinels
from ..ranges.suspicion import Suspicion, suspicion
from ..search.delta_debugging import NOT_ASKED, Budget, Found, Score, outcome
from ..search.lessons import NOT_ALL, taught
from ..search.ranking import head_first
from ..sections import (
    casts_section,
    profile_section,
    recommendation_section,
    search_section,
    weights_section,
)
from ..subject import Subject
from .rehearsal import MAX_SAMPLES, ROWS, Rehearsal, stricter

BUDGET = Budget(evaluations=400, operations=1 << 41)  # about two minutes of one core
CPU = torch.device("cpu")


@dataclass(slots=True)
class Course:
    """One way to go: a prepared whole (repaired or not), its plan before any search, and its rehearsal."""

    module: GraphModule
    plan: PrecisionPlan
    ledger: Ledger
    rehearsal: Rehearsal
    repairs: tuple[Repair, ...]
    found: Found | None = None

    @property
    def kept(self) -> int:
        return len(self.plan.kept)


class Planner:
    """Settles the plan of one subject; may be asked again, under stricter limits."""

    def __init__(self, subject: Subject, planning: Samples, example: Sequence[Tensor], say: Say) -> None:
        self._subject, self._planning, self._example = subject, planning, example
        self.profile: Profile | None = None
        self.course: Course | None = None
        self.placed: Placed | None = None
        self.module = runnable(subject.exported)
        self.plan = make_plan(self.module, subject.precision)
        self._settled = False
        self.search = NOT_ASKED
        if subject.precision.level == "O0":
            return
        say("profiling")
        open_composites(self.module, CUDA)
        self.profile = profile(self.module, _batches(subject, planning), self.plan.dtype)
        masks = rewrite_sentinels(self.module, self.profile)
        self._start = self.course = self._course(self.module, masks.repairs, masks.keep)
        self._keep = masks.keep
        self.plan = self._start.plan

    def settle(self, share: float, say: Say) -> bool:
        """Plan for ``share`` of the gate's limits; whether that made another plan than before."""
        before, first = self.plan, not self._settled
        self._settled = True
        if self.course is None:
            return first
        subject = self._subject
        if subject.search or subject.precision.level in ("O1", "O2"):
            say("rehearsing")
            self.course = self._searched(share, say)
            self.search = outcome(self.course.found)
        elif not first:
            return False
        outputs = [tensor.type.torch for tensor in subject.spec.outputs]
        self.placed = place(self.course.module, self.course.plan, self._example, outputs)
        self.module, self.plan = self.course.module, self.placed.plan
        return first or self.plan.actions != before.actions

    def emulation(self, floor: bool = False, tap: Tap | None = None) -> Emulation:
        """The half program under the plan, without half kernels; ``floor``: with FP32's range."""
        rounding = (mantissa_rounding if floor else half_rounding)(self.plan.dtype)
        return Emulation(self.module, self._dtypes(self.plan), rounding, tap)

    def curve(self) -> Curve:
        """How far every node of the half is from the whole's, on the example."""
        nothing = self._dtypes(make_plan(self.module, replace(self._subject.precision, level="O0", keep=())))
        rounding, inputs = half_rounding(self.plan.dtype), self._example

        def whole(tap: Tap) -> object:
            return Emulation(self.module, nothing, rounding, tap).run(*[tensor.clone() for tensor in inputs])

        def half(tap: Tap) -> object:
            return self.emulation(tap=tap).run(*[tensor.clone() for tensor in inputs])

        return divergence_curve(self.module, whole, half, UNIT_ROUNDOFF[self.plan.precision.dtype])

    def findings(self, half: HalfProgram) -> dict[str, Any]:
        """Sections of the report: what the plan rests on."""
        if self.course is None or self.profile is None or self.placed is None:
            return {}
        casts = cast_map(half.program)
        ops = {kept.node: kept.op for kept in self.plan.kept}
        found = {
            "repairs": [repair.to_json() for repair in self.course.repairs],
            "search": self.course.found and search_section(self.course.found, ops),
            "profile": profile_section(self.profile.to_json()),
            "weights": weights_section(self.course.ledger.to_json()),
            "casts": casts_section(casts, self.placed.bytes_before),
            "curve": self.curve().to_json(),
            "recommendation": recommendation_section(
                worth(saved_bytes(half.program), sum(cast.bytes for cast in casts))
            ),
        }
        return {name: section for name, section in found.items() if section}

    def _dtypes(self, plan: PrecisionPlan) -> Dtypes:
        assert self.course is not None
        return self.course.rehearsal.dtypes(plan)

    def _course(self, module: GraphModule, repairs: tuple[Repair, ...], keep: Sequence[Kept]) -> Course:
        subject, example = self._subject, self._example
        plan = make_plan(module, subject.precision).keeping(keep)
        plan = keep_without_kernel(module, plan, example, CPU, onnx="onnx" in subject.forms)
        ledger, plan = weigh(module, plan, example)
        rehearsal = Rehearsal(module, subject.spec, subject.precision.dtype, self._planning, example)
        return Course(module, plan, ledger, rehearsal, repairs)

    def _searched(self, share: float, say: Say) -> Course:
        """The course that passes with the fewest nodes in FP32: exact repairs first, where they save any."""
        assert self.profile is not None
        start, suspects = self._start, suspicion(self.profile)
        spec, dtype = self._subject.spec, self._subject.precision.dtype
        # the lists alone are good enough at the limit; what a search finds lies close to its limit by nature
        limits = (
            stricter(spec.parity, dtype, share / SHARES[0]),
            stricter(spec.parity, dtype, share),
        )
        plain = _with_search(start, limits, suspects, say)
        exhausted = plain.found is not None and plain.found.exhausted
        nothing_half = plain.kept > start.kept and not _any_half(plain)
        if nothing_half and not exhausted and self._is_too_fine(start):
            return start  # nothing would be left in half: the gate refuses it, and names the override
        proposals = repairable(start.module, self.profile) if plain.kept > start.kept else []
        if not proposals:
            return plain
        say(f"trying {len(proposals)} exact repairs")
        module = duplicate(start.module)
        for repair in proposals:
            apply(module, repair)
        repaired = self._course(module, (*start.repairs, *proposals), self._keep)
        repaired = _with_search(repaired, limits, suspects, say)
        return repaired if repaired.found is not None and repaired.kept < plain.kept else plain

    def _is_too_fine(self, start: Course) -> bool:
        """Whether rounding alone, with FP32's range, errs more than the gate allows: no set of nodes cures that."""
        return not start.rehearsal.report(start.plan, self._subject.spec.parity, floor=True).passed


def _any_half(course: Course) -> bool:
    dtypes = course.rehearsal.dtypes(course.plan)
    return any(dtypes.is_half(name) for name in dtypes.out)


def _with_search(
    course: Course, limits: tuple[ParityLimits, ParityLimits], suspects: Sequence[Suspicion], say: Say
) -> Course:
    plan, found = search(course.module, course.plan, course.rehearsal, limits, suspects, say, BUDGET)
    return Course(course.module, plan, course.ledger, course.rehearsal, course.repairs, found)


def search(
    module: GraphModule,
    plan: PrecisionPlan,
    rehearsal: Rehearsal,
    limits: tuple[ParityLimits, ParityLimits],
    suspects: Sequence[Suspicion],
    say: Say,
    budget: Budget = BUDGET,
) -> tuple[PrecisionPlan, Found | None]:
    """The plan with the fewest more nodes in FP32 that passes the rehearsal, each with reason and certificate.

    ``limits``: for the plan as it is, and for what is found. ``suspects``: most suspicious first. ``Found`` is
    None where not even keeping all nodes helps.
    """
    nodes = dict(walk(module))
    allowed = _candidates(module, plan, rehearsal)
    reasons = {suspect.node: suspect.reason for suspect in reversed(suspects)}
    order = [suspect.node for suspect in suspects if suspect.node in set(allowed)]
    order = list(dict.fromkeys([*order, *allowed]))

    def keeping(names: frozenset[str]) -> PrecisionPlan:
        return plan.keeping([Kept(name, op_name(nodes[name]), "") for name in names])

    def judge(names: frozenset[str]) -> Score:
        return rehearsal.score(keeping(names), limits[1] if names else limits[0])

    lesson = taught(
        order,
        judge,
        lambda names: rehearsal.learn(keeping(frozenset(names))),
        budget=budget,
        say=say,
        spent=rehearsal.meter.spent,
    )
    if not lesson.equal:
        say(NOT_ALL)
    found = lesson.found and replace(lesson.found, neighbours=rehearsal.lessons.asked)
    if found is None or not found.kept:
        return plan, found
    kept = [
        Kept(name, op_name(nodes[name]), reasons.get(name, "found by search"), _witness(found, name))
        for name in order
        if name in found.kept
    ]
    return plan.keeping(kept), found


def _batches(subject: Subject, planning: Samples) -> Iterator[list[Tensor]]:
    rows = min(ROWS, subject.spec.max_batch_size) if subject.spec.batched else 0
    for _, arrays in planning.take(slice(0, MAX_SAMPLES)).batches(rows):
        yield [to_torch(arrays[tensor.name].copy()) for tensor in subject.spec.inputs]


def _candidates(module: GraphModule, plan: PrecisionPlan, rehearsal: Rehearsal) -> list[str]:
    """The nodes that touch half by the policy, in the graph's order; products, which gain most by half, last."""
    dtypes, already = rehearsal.dtypes(plan), {kept.node for kept in plan.kept}
    touching = [
        (name, node)
        for name, node in walk(module)
        if name in plan.actions and name not in already and dtypes.touches_half(name) and _may_be_kept(node)
    ]
    products = {name for name, node in touching if _is_product(node)}
    return sorted(head_first(rehearsal.spec, [name for name, _ in touching]), key=products.__contains__)


def _may_be_kept(node: Node) -> bool:
    """Not one that changes its input: a cast would be a copy, and the change would be lost."""
    return isinstance(node.target, OpOverload) and not node.target._schema.is_mutable


def _is_product(node: Node) -> bool:
    assert isinstance(node.target, OpOverload)
    return CUDA.rule(node.target) is Rule.LOWER


def _witness(found: Found, name: str) -> str:
    score = found.certificate.get(name)
    if score is None:
        return "the search was exhausted before the model was tried without it"
    if not math.isfinite(score.error_u):
        return "without it: the answer is not finite"
    return f"without it: error {score.error_u:.3g}u ({score.reason.partition(': expected')[0]})"
