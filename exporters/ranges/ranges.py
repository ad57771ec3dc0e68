"""The magnitudes of a tensor, gathered chunk by chunk, the limits of a half, and the profile of a graph: the magnitudes
of each node's result, and the nodes that are likely to go wrong in half.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from ..gate.divergence import SENTINEL
from ..policy.classes import Trait, has
from ..policy.weights import NUMPY_HALVES
from .divisions import Guard

_COUNTS = ("count", "zeros", "non_finite", "sentinels", "under_smallest", "under_normal", "over")
_CHUNK = 1 << 18  # elements; a megabyte stays in the cache for the passes over it


@dataclass(frozen=True, slots=True)
class Limits:
    """The range of a half: its largest number, its smallest normal one and its smallest at all."""

    largest: float
    normal: float
    smallest: float

    @classmethod
    def of(cls, half: str) -> "Limits":
        """The limits of ``fp16`` or ``bf16``."""
        info = ml_dtypes.finfo(NUMPY_HALVES[half])
        normal = float(info.smallest_normal)
        return cls(float(info.max), normal, normal * float(info.eps))


@dataclass(frozen=True, slots=True)
class Range:
    """The range of a tensor over all samples. ``lowest`` to ``highest`` and all magnitudes leave out sentinels
    and numbers that are not finite; ``smallest`` (non-zero) and ``largest`` are 0 where there was no number.

    Of non-zero elements: ``under_smallest`` are 0 in half (or nearly: under 2⁻²⁴ for FP16), ``under_normal``
    (2⁻¹⁴) have lost precision, ``over`` are beyond half's largest. ``numel``: elements of the largest tensor.
    """

    count: int = 0
    zeros: int = 0
    non_finite: int = 0
    sentinels: int = 0
    sentinel_lowest: float = 0.0
    sentinel_highest: float = 0.0
    lowest: float = 0.0
    highest: float = 0.0
    smallest: float = 0.0
    under_smallest: int = 0
    under_normal: int = 0
    over: int = 0
    numel: int = 0

    @property
    def largest(self) -> float:
        return max(self.highest, -self.lowest)

    @property
    def extreme(self) -> float:
        """The largest finite magnitude, sentinels included."""
        return max(self.largest, -self.sentinel_lowest, self.sentinel_highest)

    @property
    def infinite(self) -> bool:
        return self.non_finite > 0

    def holds_only(self, sentinel: float) -> bool:
        """True if there were only zeros and one mask value (below zero)."""
        if self.non_finite or self.highest > 0.0 or self.sentinel_highest > 0.0:
            return False
        lows = {self.lowest, -self.smallest, self.sentinel_lowest, self.sentinel_highest}
        return lows <= {0.0, float(np.float32(sentinel))} and not (self.sentinels and self.largest)

    def joined(self, other: "Range") -> "Range":
        """The range of both tensors together."""
        if not (self.count and other.count):
            return self if self.count else other
        mine, others = asdict(self), asdict(other)
        sums = {name: mine[name] + others[name] for name in _COUNTS}
        least = {name: min(mine[name], others[name]) for name in ("sentinel_lowest", "lowest")}
        most = {name: max(mine[name], others[name]) for name in ("sentinel_highest", "highest", "numel")}
        smallest = min(filter(None, (self.smallest, other.smallest)), default=0.0)
        return Range(**sums, **least, **most, smallest=smallest)

    def share(self, count: int) -> float:
        """``count`` as a share of the finite non-zero elements that are no sentinels."""
        numbers = self.count - self.zeros - self.non_finite - self.sentinels
        return count / numbers if numbers else 0.0

    def to_json(self) -> dict[str, Any]:
        shares = {
            name: self.share(getattr(self, name)) for name in ("under_smallest", "under_normal", "over")
        }
        return asdict(self) | {"largest": self.largest, "shares": shares}


@dataclass(slots=True)
class RangeCollector:
    """Gathers a Range. ``of``: the tensor that this one is a view of; it is not measured again."""

    limits: Limits
    of: "RangeCollector | None" = None
    counts: dict[str, int] = field(default_factory=dict)
    lowest: float = math.inf
    highest: float = -math.inf
    smallest: float = math.inf
    sentinel_lowest: float = math.inf
    sentinel_highest: float = -math.inf
    numel: int = 0

    @property
    def seen(self) -> bool:
        return self.of.seen if self.of is not None else bool(self.counts)

    @np.errstate(invalid="ignore")  # NaN is counted
    def add(self, array: np.ndarray) -> None:
        self.numel = max(self.numel, array.size)
        flat = array.reshape(-1)
        for start in range(0, max(flat.size, 1), _CHUNK):
            self._add(flat[start : start + _CHUNK].astype(np.float32, copy=False))

    def _count(self, name: str, number: int | np.integer) -> None:
        self.counts[name] = self.counts.get(name, 0) + int(number)

    def _add(self, chunk: np.ndarray) -> None:
        self._count("count", len(chunk))
        if not len(chunk):
            return
        low, high = float(chunk.min()), float(chunk.max())
        if not max(-low, high) < SENTINEL:
            chunk = self._ordinary(chunk)
            if not len(chunk):
                return
            low, high = float(chunk.min()), float(chunk.max())
        self.lowest, self.highest = min(self.lowest, low), max(self.highest, high)
        magnitude = np.abs(chunk)
        if max(-low, high) > self.limits.largest:
            self._count("over", np.count_nonzero(magnitude > self.limits.largest))
        self._add_small(magnitude)

    def _ordinary(self, chunk: np.ndarray) -> np.ndarray:
        finite = chunk[np.isfinite(chunk)]
        self._count("non_finite", len(chunk) - len(finite))
        is_mask = np.abs(finite) >= SENTINEL
        if len(masks := finite[is_mask]):
            self._count("sentinels", len(masks))
            self.sentinel_lowest = min(self.sentinel_lowest, float(masks.min()))
            self.sentinel_highest = max(self.sentinel_highest, float(masks.max()))
        return finite[~is_mask]

    def _add_small(self, magnitude: np.ndarray) -> None:
        is_small = magnitude < self.limits.normal
        small = magnitude[is_small]
        numbers = small[small > 0.0]
        self._count("zeros", len(small) - len(numbers))
        self._count("under_normal", len(numbers))
        self._count("under_smallest", np.count_nonzero(numbers < self.limits.smallest))
        if not len(numbers):
            numbers = magnitude if not len(small) else magnitude[~is_small]
        if len(numbers):
            self.smallest = min(self.smallest, float(numbers.min()))

    def range(self) -> Range:
        if self.of is not None:
            return self.of.range()
        ends = (self.sentinel_lowest, self.sentinel_highest, self.lowest, self.highest, self.smallest)
        names = ("sentinel_lowest", "sentinel_highest", "lowest", "highest", "smallest")
        found = {name: end if math.isfinite(end) else 0.0 for name, end in zip(names, ends, strict=True)}
        return replace(Range(**self.counts, numel=self.numel), **found)


@dataclass(frozen=True, slots=True)
class NodeProfile:
    """One node. ``reads``: the floating tensors it reads, in order. ``reduces``: the longest sum behind one
    element of its result. ``scores``: a bound of the scores inside a fused attention (|q|·|k|·scale)."""

    node: str
    op: str
    reads: tuple[str, ...]
    range: Range
    reduces: int = 1
    scores: float = 0.0

    def to_json(self) -> dict[str, Any]:
        rest = {"node": self.node, "op": self.op, "reads": list(self.reads), "reduces": self.reduces}
        return rest | {"scores": self.scores, "range": self.range.to_json()}


@dataclass(frozen=True, slots=True)
class Profile:
    """``nodes``: qualified name (`walk`) → its profile, in the graph's order; only nodes that ran. ``half``:
    ``fp16`` or ``bf16``. ``never_ran``: the operations that gave no number on any sample."""

    half: str
    batches: int
    nodes: Mapping[str, NodeProfile]
    guards: tuple[Guard, ...] = ()
    never_ran: tuple[str, ...] = ()

    @property
    def limits(self) -> Limits:
        return Limits.of(self.half)

    def range(self, name: str) -> Range | None:
        node = self.nodes.get(name)
        return None if node is None else node.range

    def to_json(self) -> dict[str, Any]:
        return {
            "half": NUMPY_HALVES[self.half].name,
            "batches": self.batches,
            "nodes": [node.to_json() for node in self.nodes.values()],
            "guards": [guard.to_json() for guard in self.guards],
        }


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
    """The nodes that are likely to go wrong in half, and why, from a profile alone, most suspicious first: the order of
    the search and the reasons in the report. Which nodes stay in FP32 is found by trial (`search/delta_debugging.py`).

    At most one suspicion for each op, its gravest; ties in the graph's order. Harmless ops have none.

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
