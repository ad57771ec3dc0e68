"""Measures the power of a proof: the share of planted faults that the gate would notice on the judged samples.

A fault of known size is added to the result of a node in a run of the FP32 original, the rest of the graph runs, and
the gate's own rules (`gate.parity.judge`) say whether such a half would be refused. Mutation testing asks the same of a
test suite (DeMillo, Lipton, Sayward, "Hints on test data selection", 1978).

What is not noticed is explained by more measurements. The result is made smaller, and the fault with it: a rest of the
graph that then answers far more than before was saturated by these samples. The fault is made larger: where the answers
err in proportion, the rest of the graph damps it. What neither explains counts as missed.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, takewhile
from typing import TypeVar

import numpy as np

from ...models.spec.spec import UNIT_ROUNDOFF
from ..gate.divergence import SENTINEL, largest
from ..gate.parity import judge
from ..gate.trial import Trial
from ..graph.backend import GraphNode
from ..graph.original_graph import OriginalGraph, Rest
from ..inputs.draws import raw_draws
from ..policy.classes import Trait, has
from ..question import Arrays, Question, answers_or_refusal, first_rows
from .constant_factors import constant_factors
from .power import (
    BYPASSED,
    DAMPED,
    DEAD,
    EXPONENT,
    FINE,
    NEAR,
    SATURATED,
    SIGN,
    STEP,
    UNEXPLAINED,
    Planted,
    Power,
)
from .prove import ReferenceRun, tried

T = TypeVar("T")
ROWS = 8  # of each run
ALL_ROWS = 64  # of the second measurement, of a proof that looks blind on `ROWS`
OPERATIONS, BYTES = 1 << 34, 1 << 28  # of one run, and of its inputs and answers: they bound its rows
MOST_NODES, LEAST_NODES, NODES_AGAIN = 48, 6, 6
# The least number of nodes that are asked of those that lead to a set of outputs alone, and the number of such sets:
# the smallest come first.
OF_OUTPUTS, MOST_SETS = 3, 16
MOST_PARTS = 16  # of an output
SHARE = 1.0  # of the operations of all questions of a proof; a conversion needs about fifteen times as many
SMALL = 1 << 33  # operations that are always granted
# A result of these is one of their inputs, exactly: a half errs there as much as in the node before, and no more.
_COMPUTE_NOTHING = (Trait.MOVES, Trait.SELECTS, Trait.SEES_SIZES)
_TAKEN = "getitem"  # one of the results of its input, in a captured program
SIZE = 8.0  # of the fine fault, in u of the largest magnitude of the node's result
RUNS = 2  # of the whole graph for each node: four faults, of which each runs half of it
FLIPPED = 0.01  # of the elements
SCALES = (1 / 2, 1 / 4, 1 / 16, 1 / 64)
# Shares of the allowed error. Below `SILENT` a fault is as good as gone; a saturated rest of the graph answers `LOUD`
# or more as soon as its signals are smaller, or `SILENT` or more where it had answered `NOTHING`. What answers more
# than `LOUD` may reach the limit on other samples: it is not called damped.
NOTHING, SILENT, LOUD = 1e-4, 1 / 32, 1 / 2
LARGER = (4, 16, 64, 256)  # times the fine fault, up to the largest magnitude of the node's result
IN_PROPORTION = 4.0  # the answers' error grows so many times as fast as the fault, or as slowly, at most


@np.errstate(all="ignore")  # what is planted may overflow
def measured_power(run: ReferenceRun, original: OriginalGraph, dtype: str, fine_alone: bool = False) -> Power:
    """Plant faults at a seeded choice of nodes, on the first few samples. Of the faults that these do not show some are
    asked on more of them: the most of a proof that looks blind, or else those that come closest to the limit.
    ``fine_alone``: no large faults are asked where a fine one is noticed."""
    plan = _Planting(run, original, dtype, fine_alone)
    chosen = plan.chosen()
    rows, all_rows = plan.rows(ROWS), plan.rows(ALL_ROWS)
    found = plan.planted(chosen, rows)
    alike = _samples_alike(run)
    power = Power(tuple(found.values()), rows, plan.alike, alike, plan.output_of)
    missed = [node for node in power.planted if node.why]
    if not missed or all_rows <= rows:
        return power
    if power.is_shown:
        some = sorted(missed, key=lambda node: -node.response)[:NODES_AGAIN]
    else:
        some = _spread([node for node in missed if node.is_blind] or missed, NODES_AGAIN)
    again = {node.node for node in some}
    found |= plan.planted([node for node in chosen if node.name in again], all_rows)
    asked = tuple(
        node for node in found.values() if power.is_shown or not node.is_blind or node.node in again
    )
    return replace(power, planted=asked, samples=all_rows)


@dataclass(slots=True)
class _Planting:
    run: ReferenceRun
    original: OriginalGraph
    dtype: str
    fine_alone: bool
    alike: frozenset[str] = field(init=False)
    factors: Mapping[str, float] = field(init=False)  # by node, of constants behind it
    outputs: Mapping[str, frozenset[str]] = field(init=False)  # that are computed from each node
    output_of: Mapping[str, str] = field(init=False)

    def __post_init__(self) -> None:
        parts, alike = _parts(self.original), _answers_alike(self.run, self.dtype)
        self.output_of = {part: output for part, (output, _) in parts.items()}
        self.alike = frozenset(part for part, output in self.output_of.items() if output in alike)
        self.outputs = _parts_by_node(self.original, parts)
        some = next(first_rows(self.run.bulk, self.rows(ROWS), self.run.spec.batched))
        self.factors = constant_factors(self.original, some.inputs)

    def rows(self, most: int) -> int:
        """The number of judged samples that are asked: fewer of a large model."""
        of_a_row = max((one.nbytes // max(len(one.samples), 1) for one in self.run.bulk), default=1)
        bound = min(OPERATIONS // max(self.run.row_operations, 1), BYTES // max(of_a_row, 1))
        return min(most, max(bound, 1), sum(len(question.samples) for question in self.run.bulk))

    def chosen(self) -> list[GraphNode]:
        """Nodes that compute something of the first judged sample, spread over the graph, as many as the budget
        allows."""
        computed = set[str]()
        for question in first_rows(self.run.bulk, 1, self.run.spec.batched):
            self.original.watched(
                question.inputs, lambda name, result, _: computed.add(name) if largest(result) else None
            )
        ops = {node.name: node.op for node in self.original.nodes()}
        nodes = [
            node
            for node in self.original.nodes()
            if node.name in computed
            and not has(ops[node.inputs[0]] if node.op == _TAKEN else node.op, *_COMPUTE_NOTHING)
        ]
        questions = (*self.run.small, *self.run.bulk, *self.run.adversarial, *self.run.perturbed)
        budget = max(SMALL, SHARE * sum(len(one.samples) for one in questions) * self.run.row_operations)
        of_a_node = self.rows(ROWS) * self.run.row_operations * RUNS
        chosen = _spread(nodes, max(LEAST_NODES, min(MOST_NODES, int(budget / max(of_a_node, 1)))))
        return self._with_some_of_each_output(nodes, {node.name for node in chosen})

    def _with_some_of_each_output(self, nodes: Sequence[GraphNode], chosen: set[str]) -> list[GraphNode]:
        """The chosen nodes, and more of those that lead to a few outputs alone where hardly any was chosen."""
        leading = dict[frozenset[str], list[str]]()
        for node in nodes:
            leading.setdefault(self.outputs[node.name], []).append(node.name)
        for several in sorted(leading.values(), key=lambda names: len(self.outputs[names[0]]))[:MOST_SETS]:
            if len(chosen.intersection(several)) < min(OF_OUTPUTS, len(several)):
                chosen.update(_spread(several, OF_OUTPUTS))
        return [node for node in nodes if node.name in chosen]

    def planted(self, chosen: Sequence[GraphNode], rows: int) -> dict[str, Planted]:
        """Plant faults at these nodes, on ``rows`` judged samples. Gives by the node's name what the gate noticed."""
        ops = {node.name: node.op for node in chosen}
        found = dict[str, Planted]()
        for question in first_rows(self.run.bulk, rows, self.run.spec.batched):
            answers = self.original.watched(question.inputs, lambda name, result, rest: None)
            self.original.watched(
                question.inputs, _Visit(self, replace(question, reference=answers), ops, found).see
            )
        return found


@dataclass(slots=True)
class _Visit:
    """Plants faults at nodes (name → operation) of one run, and joins what it finds to that of other runs."""

    planting: _Planting
    question: Question
    ops: Mapping[str, str]
    found: dict[str, Planted]
    seen: set[str] = field(default_factory=set)

    def see(self, name: str, result: np.ndarray, rest: Rest) -> None:
        if name in self.ops and name not in self.seen and largest(result):
            self.seen.add(name)  # a node may have several results
            outputs, factor = self.planting.outputs[name], self.planting.factors[name]
            node = _Node(self.planting, self.question, result, rest, outputs, factor)
            one = node.planted(name, self.ops[name])
            self.found[name] = self.found[name].joined(one) if name in self.found else one


@dataclass(slots=True)
class _Node:
    """One node in one run."""

    planting: _Planting
    question: Question
    result: np.ndarray
    rest: Rest
    outputs: frozenset[str]
    factor: float

    def planted(self, name: str, op: str) -> Planted:
        answers, u = self.question.reference, UNIT_ROUNDOFF[self.planting.dtype]
        loudest, (response, seen) = self.result, (0.0, False)
        for fine in _fine_faults(self.result, u):
            found = self._error(answers, fine)
            if found[1] or found[0] >= response:
                loudest, (response, seen) = fine, found
            if seen:
                break
        if seen and self.planting.fine_alone:
            return Planted(name, op, frozenset({FINE}), response, "", SIZE, self.outputs)
        large = zip((SIGN, EXPONENT), _large_faults(self.result), strict=True)
        noticed = {kind for kind, faulty in large if self._error(answers, faulty)[1]} | (
            {FINE} if seen else set()
        )
        if seen:
            return Planted(name, op, frozenset(noticed), response, "", SIZE, self.outputs)
        times, error, seen = self._larger(loudest, u)
        why = self._why(loudest, response, frozenset(noticed), error / max(times * response, NOTHING**2))
        seen_at_u = SIZE * times if seen else np.inf
        return Planted(name, op, frozenset(noticed), response, why, seen_at_u, self.outputs)

    def _larger(self, fine: np.ndarray, u: float) -> tuple[float, float, bool]:
        """The least of the larger faults that the gate notices, or the largest: as a multiple of the fine fault, with
        the error of its answers and whether the gate notices it."""
        times, error, seen = 1.0, 0.0, False
        for times in takewhile(lambda times: times * SIZE * u <= 1, LARGER):
            error, seen = self._error(self.question.reference, self.result + (fine - self.result) * times)
            if seen:
                break
        return times, error, seen

    def _why(self, fine: np.ndarray, response: float, noticed: frozenset[str], growth: float) -> str:
        """``growth``: of the answers' error with a larger fault, where 1 is in proportion."""
        loud = SILENT if response <= NOTHING else LOUD
        if response < SILENT and any(self._when_smaller(fine, scale) >= loud for scale in SCALES):
            return SATURATED
        if not (response > NOTHING or {SIGN, EXPONENT} <= noticed):
            alike = self.outputs & self.planting.alike
            return DEAD if alike else DAMPED if self._is_scaled_down(fine) else BYPASSED
        if self.outputs <= self.planting.alike:
            return DEAD
        if response <= LOUD and (response <= NOTHING or growth > IN_PROPORTION):
            return STEP
        if growth < 1 / IN_PROPORTION or response >= 1:
            return UNEXPLAINED
        return DAMPED if response <= LOUD else NEAR

    def _is_scaled_down(self, fine: np.ndarray) -> bool:
        """True if constants alone make the fault as small as it is: one that is so many times larger shows, and a still
        larger one in proportion."""
        if not 0 < self.factor <= NOTHING / SILENT:
            return self.factor == 0
        fault = (fine - self.result) / self.factor
        shown, more = (
            self._error(self.question.reference, self.result + times * fault)[0] for times in (1, 4)
        )
        return shown >= SILENT and 2 < more / shown < 8

    def _when_smaller(self, fine: np.ndarray, scale: float) -> float:
        held = np.abs(self.result) < SENTINEL
        original, half = (np.where(held, one * scale, one) for one in (self.result, fine))
        before = answers_or_refusal(lambda _: dict(self.rest(original)), {})
        if isinstance(before, Exception):
            return 0.0
        error, refused = self._error(before, half)
        return error if np.isfinite(error) else LOUD * refused

    def _error(self, answers: Arrays, faulty: np.ndarray) -> tuple[float, bool]:
        """The error of the outputs as a share of the allowed one, and whether the gate refuses it."""
        run = self.planting.run
        came = answers_or_refusal(lambda _: dict(self.rest(faulty)), {})
        trial = tried(self.question.samples, self.question.inputs, answers, came, run.tie_tolerance)
        report = judge(run.spec, self.planting.dtype, [trial], noise=run.noise)
        errors = [
            output.max_error_u / max(output.limit_u, 1e-30) for output in report.outputs if output.scale
        ]
        return max(errors, default=0.0), not report.passed


def _fine_faults(result: np.ndarray, u: float) -> Iterator[np.ndarray]:
    """The result with an error of one size, whose sign is drawn for each index of axis 1, and of the last axis: rounded
    weights err so, by the channel. Last for each element: where all keys of an attention err alike, its softmax takes
    the error out."""
    last = result.ndim - 1
    kept = [{min(1, last)}, {last}, set(range(result.ndim))]
    several = [one for place, one in enumerate(kept) if one not in kept[:place]]
    shapes = [[size if axis in axes else 1 for axis, size in enumerate(result.shape)] for axes in several]
    for shape, drawn in zip(shapes, raw_draws(result.size, *map(math.prod, shapes)), strict=True):
        signs = (drawn % 2).reshape(shape).astype(np.float32) * 2 - 1
        yield _held(result + signs * SIZE * u * largest(result), result)


def _large_faults(result: np.ndarray) -> Iterator[np.ndarray]:
    """The result with some signs flipped, and without its exponents. No element becomes larger than the largest: a size
    that is computed from it stays within reason."""
    (drawn,) = raw_draws(result.size, result.size)
    drawn = (drawn & 0xFFFFFF).reshape(result.shape).astype(np.float32) * 2.0**-24
    yield _held(np.where(drawn <= max(FLIPPED, float(drawn.min())), -result, result), result)
    yield _held(np.frexp(result)[0] * largest(result), result)


def _held(changed: np.ndarray, result: np.ndarray) -> np.ndarray:
    """The change, but for sentinels."""
    return np.where(np.abs(result) < SENTINEL, changed, result).astype(result.dtype)


def _spread(several: Sequence[T], most: int) -> list[T]:
    """Some of the several, at most ``most``: one of each stretch, by a seeded choice."""
    drawn = np.random.default_rng(0)
    parts = np.array_split(np.arange(len(several)), min(most, len(several)) or 1)
    return [several[int(drawn.choice(part))] for part in parts if len(part)]


def _parts(original: OriginalGraph) -> dict[str, tuple[str, str]]:
    """By its name each part of the answers: the output, and the node that computes it. What only places values (a
    concatenation) joins parts, of which one may show nothing beside others. More than `MOST_PARTS`, the steps of a loop
    that was written out, count as one."""
    nodes, found = {node.name: node for node in original.nodes()}, dict[str, tuple[str, str]]()
    for output, maker in original.makers().items():
        waiting, seen, ends = [maker], set[str](), list[str]()
        while waiting:
            node = nodes[waiting.pop()]
            if node.name in seen:
                continue
            seen.add(node.name)
            if node.op == _TAKEN or (has(node.op, Trait.MOVES) and not has(node.op, Trait.EMBEDDING)):
                waiting += node.inputs
            elif node.inputs:
                ends.append(node.name)
        if len(ends) > MOST_PARTS:
            ends = [maker]
        found |= {(f"{output} (from {end})" if len(ends) > 1 else output): (output, end) for end in ends}
    return found


def _parts_by_node(
    original: OriginalGraph, parts: Mapping[str, tuple[str, str]]
) -> dict[str, frozenset[str]]:
    """The parts of the answers that are computed from each node; all of them where none reads its result: it is written
    into one of its inputs."""
    nodes = original.nodes()
    found: dict[str, set[str]] = {node.name: set() for node in nodes}
    for part, (_, node) in parts.items():
        found[node].add(part)
    for node in reversed(nodes):
        for read in node.inputs:
            found[read] |= found[node.name]
    return {name: frozenset(some or parts) for name, some in found.items()}


def _answers_alike(run: ReferenceRun, dtype: str) -> frozenset[str]:
    """The outputs all of whose answers are the same, so that a half which mixes the samples up would pass."""
    trials = [Trial(one.samples, *pair) for one, pair in _beside_others(run, lambda one: one.reference)]
    report = judge(run.spec, dtype, trials, noise=run.noise)
    return frozenset(one.name for one in report.outputs if one.passed)


def _samples_alike(run: ReferenceRun) -> bool:
    """True if there are several samples, and all are the same."""
    pairs = list(_beside_others(run, lambda one: one.inputs))
    return bool(pairs) and all(
        np.array_equal(one[name], other[name]) for _, (one, other) in pairs for name in one
    )


def _beside_others(
    run: ReferenceRun, side: Callable[[Question], Arrays]
) -> Iterator[tuple[Question, tuple[Arrays, Arrays]]]:
    """One side of every question, beside that of other samples: of the row before, or of the next question where each
    has one row. Of a single sample its perturbed copies are such others."""
    alone = len({sample for one in run.bulk for sample in one.samples}) < 2
    asked = run.perturbed if alone else run.bulk
    several = [one for one in asked if len(one.samples) > 1] if run.spec.batched else []
    for one in several:
        yield one, (side(one), {name: np.roll(array, 1, 0) for name, array in side(one).items()})
    if not several:
        for one, other in pairwise(asked):
            yield one, (side(one), side(other))
