"""Finds the nodes that are likely to go wrong in half, and why, from a profile alone, most suspicious first.

The list gives the order of the search and the reasons in the report; which nodes stay in FP32 is found by trial
(`search/delta_debugging.py`).
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from ..policy.classes import Trait, has
from .divisions import Guard
from .ranges import Limits, NodeProfile, Profile, Range

_HEADROOM = 4.0  # the gate also tries real samples times 4
_LOST_BITS = 3.0  # a difference 2⁻³ of its terms errs by 8u where the gate allows 4u
_LONG = 4096  # elements of a sum
_LARGE_ARGUMENT = 64.0  # half's step there is 2⁻⁴


class Suspicion(NamedTuple):
    """A node whose result, or whose computation on its inputs, is in danger in half; larger scores first."""

    node: str
    score: float
    reason: str


def suspicion(profile: Profile) -> list[Suspicion]:
    """The suspicions, at most one for each op, its gravest; ties in the graph's order. Harmless ops have none.

    Inputs and weights have no entry of their own: the ops that read them have.
    """
    worst: dict[str, Suspicion] = {}
    found = [entry for node in profile.nodes.values() for entry in _of_node(profile, node)]
    for entry in [*found, *(entry for guard in profile.guards for entry in _of_guard(profile, guard))]:
        if entry.node in profile.nodes and profile.nodes[entry.node].op in ("placeholder", "get_attr"):
            continue
        if entry.score > 0.0 and (entry.node not in worst or entry.score > worst[entry.node].score):
            worst[entry.node] = entry
    order = {name: place for place, name in enumerate(profile.nodes)}
    return sorted(worst.values(), key=lambda entry: (-entry.score, order.get(entry.node, 0)))


def _of_node(profile: Profile, node: NodeProfile) -> Iterator[Suspicion]:
    limits = profile.limits
    for score, reason in _of_range(node.range, limits):
        yield Suspicion(node.node, score, f"{reason} in {node.node}")
    for read in node.reads:
        for score, reason in _of_range(profile.nodes[read].range, limits):
            yield Suspicion(node.node, score - 15.0, f"{reason} in {read}, which it reads")
    if node.scores > limits.largest / _HEADROOM:
        yield Suspicion(node.node, 60.0, f"scores may reach {node.scores:.3g} inside {node.node}")
    yield from _of_argument(profile, node)
    yield from _of_difference(profile, node)
    if node.reduces >= _LONG:
        score = math.log2(node.reduces)
        yield Suspicion(node.node, score, f"{node.node} sums {node.reduces} elements into one")


def _of_range(held: Range, limits: Limits) -> Iterator[tuple[float, str]]:
    """The faults of a tensor in half, gravest first."""
    excess = held.largest / limits.largest
    if held.over:
        reason = f"overflow: largest magnitude {held.largest:.2g}, half ends at {limits.largest:g},"
        yield min(100.0 + math.log2(excess) + 20.0 * held.share(held.over), 140.0), reason
    elif excess > 1.0 / _HEADROOM:
        yield 40.0, f"near overflow: largest magnitude {held.largest:.2g}, half ends at {limits.largest:g},"
    if max(-held.sentinel_lowest, held.sentinel_highest) > limits.largest:
        sentinel = held.sentinel_lowest or held.sentinel_highest
        yield 85.0, f"overflow: {sentinel:.3g} (a mask?), half ends at {limits.largest:g},"
    if held.under_smallest:
        lost = held.share(held.under_smallest)
        reason = f"underflow: {lost:.2g} of the non-zero elements are under half's {limits.smallest:.2g}"
        yield 10.0 + 80.0 * lost, reason
    if (weak := held.share(held.under_normal)) > 0.01:
        yield 5.0 + 40.0 * weak, f"{weak:.2g} of the non-zero elements are under half's {limits.normal:.2g}"


def _of_argument(profile: Profile, node: NodeProfile) -> Iterator[Suspicion]:
    """Functions that turn an absolute error of a large argument into a relative one of their result."""
    periodic = has(node.op, Trait.PERIODIC)
    if not (periodic or has(node.op, Trait.EXPONENTIAL)) or not node.reads:
        return
    largest = profile.nodes[node.reads[0]].range.largest
    if largest <= _LARGE_ARGUMENT:
        return
    step = _step(largest, profile)
    base = 70.0 if periodic else 30.0
    score = base + min(4.0 * math.log2(step / 2**-4), 40.0)
    reason = f"argument of {node.op} reaches {largest:.4g}: half's step there is {step:g}"
    yield Suspicion(node.node, score, reason)
    yield Suspicion(node.reads[0], score - 1.0, f"gives {node.node} its argument: {reason}")


def _step(magnitude: float, profile: Profile) -> float:
    """The distance of neighbouring numbers in half at a magnitude."""
    mantissa = -math.log2(profile.limits.smallest / profile.limits.normal)
    return 2.0 ** (math.floor(math.log2(magnitude)) - mantissa)


def _of_difference(profile: Profile, node: NodeProfile) -> Iterator[Suspicion]:
    """A sum far smaller than its terms, of which mostly their rounding is left; and a term lost beside a larger one."""
    if not has(node.op, Trait.ADDS) or not node.reads:
        return
    terms = [profile.nodes[read].range.largest for read in node.reads]
    left, largest = node.range.largest, max(terms)
    if 0.0 < left < largest * 2.0**-_LOST_BITS:
        bits = math.log2(largest / left)
        what = f"cancellation: {node.node} leaves {left:.2g} of terms as large as {largest:.2g}"
        yield Suspicion(node.node, 20.0 + 3.0 * bits, f"{what}, {bits:.0f} bits are lost")
        for read in node.reads:
            yield Suspicion(read, 18.0 + 3.0 * bits, f"{what}, of which {read} is one")
    elif 0.0 < min(terms) < _step(largest, profile) / 2.0:
        reason = (
            f"absorption: {node.node} adds {min(terms):.2g} to {largest:.2g}, where half's step is larger"
        )
        yield Suspicion(node.node, 15.0, reason)


def _of_guard(profile: Profile, guard: Guard) -> Iterator[Suspicion]:
    coarse = abs(guard.in_half - guard.constant) > 2**-8 * guard.constant
    if not coarse:
        return
    held = profile.range(guard.guarded)
    needed = (
        held is None or held.zeros > 0 or held.smallest < max(2**10 * guard.constant, profile.limits.smallest)
    )
    score = (95.0 if needed else 30.0) if guard.vanishes else 25.0
    fate = "vanishes in half" if guard.vanishes else f"is {guard.in_half:.3g} in half"
    what = f"guard {guard.constant:g} in {guard.node} {fate}"
    yield Suspicion(guard.node, score, what)
    for reader in guard.readers:
        yield Suspicion(reader, score - 2.0, f"{what}, and {reader} relies on it")
