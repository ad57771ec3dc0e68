"""Whole numbers and booleans that come from a step: a rounding, a sign, a cast to integers, a comparison, a
quantisation, or a choice (argmax, topk) whose index is computed with further.

Where the original's own value lies within 4u·S of the step, another precision may land on its other side: a near tie,
as of an index that is given out as it is (`ties.py`). S is the largest magnitude of the values before the step, over
all real judged samples. What the original then answers is asked of it: the results of the step are changed where they
are near, and the rest of the graph runs. A half may answer that, or what lies between; behind a choice, whose next
index may stand for any other number, nothing between. Such elements are counted, and their share has a limit
(``max_flips``).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from ...models.errors import ExportFailed
from ...models.spec.spec import UNIT_ROUNDOFF, ModelSpec
from ..inputs.samples import Samples
from ..policy.classes import Trait, has
from ..question import Arrays, answers_or_refusal
from .divergence import largest
from .ties import MARGIN_U, Choice, Ties, lines_along

V = TypeVar("V")  # a value of an ONNX file, by its name, or a node of a captured program
# Another result of a step → the answers of the run that goes on with it.
Rest = Callable[[np.ndarray], Arrays]
# A step, what it reads, its result, and the rest of the run behind it.
See = Callable[[V, Sequence[np.ndarray], np.ndarray, Rest], None]

CHOOSES = "choose"  # an operation whose result is the index that a comparison chose, in any kind of graph
_SEEN_AT_ONCE = 2**22  # values of choices that are compared together
_ROWS_AT_ONCE = 64  # of a batch in which ties are looked for
_NEXT = (1, -1, 2, -2)  # the other indices of a near choice, by their place in the order of the values
_ROUNDS = {"round": np.rint, "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "quantize": np.rint}
_ROUNDS |= dict.fromkeys(("sign", "sgn"), np.sign) | {"fix": np.trunc}
_ROUNDS |= {"heaviside": lambda values: np.heaviside(values, 1.0)}
_CASTS = ("cast", "to", "_to_copy", "type_as")
_KINDS = {
    CHOOSES: CHOOSES,
    "bucketize": "bucketize",
    "searchsorted": "bucketize",
    "quantizelinear": "quantize",
}
_KINDS |= dict.fromkeys((*_CASTS, "signbit", "logical_not"), "trunc")
# Beside what moves or selects numbers. Of whole numbers these give whole numbers, or multiples of one.
_STAYS_WHOLE = {*_CASTS, "mul", "sign", "sgn", "reducesum", "sum", "getitem", "identity", "onehot"}
_SELECTS = (Trait.MOVES, Trait.COPIES, Trait.SELECTS, Trait.ADDS, Trait.DIVIDES)


@dataclass(frozen=True, slots=True)
class Made(Generic[V]):
    """The operation that makes a value. ``op`` is empty for an input of the model; ``inputs`` are values that are no
    constants; ``is_whole``: the type of the value has integers or booleans."""

    op: str
    inputs: tuple[V, ...]
    is_whole: bool


def steps_behind(
    output: V, made: Callable[[V], Made[V]], known: dict[V, dict[V, str]] | None = None
) -> dict[V, str]:
    """The steps (value → kind) that decide the whole numbers of an output. None where it has other numbers, and none
    behind what chooses among several boxes (NonMaxSuppression). ``known``: those of other values, found so far."""
    known = {} if known is None else known
    if output not in known:
        known[output] = _steps_behind(output, made, known)
    return known[output]


def _steps_behind(output: V, made: Callable[[V], Made[V]], known: dict[V, dict[V, str]]) -> dict[V, str]:
    found, seen, left = dict[V, str](), set[V](), [output]
    while left:
        value = left.pop()
        if value in seen:
            continue
        seen.add(value)
        one = made(value)
        if one.op and not one.inputs:
            continue  # a constant
        if kind := _kind(one, made, known):
            found[value] = kind
        elif one.is_whole and one.op.lower() not in _KINDS and not has(one.op, Trait.COMPARES):
            left += [each for each in one.inputs if made(each).is_whole]
        elif one.is_whole or has(one.op, *_SELECTS) or one.op.lower() in _STAYS_WHOLE:
            left += one.inputs
        else:
            return {}
    return found


def _kind(one: Made[V], made: Callable[[V], Made[V]], known: dict[V, dict[V, str]]) -> str:
    """The kind of step that makes a value; empty where none does, or where it reads whole numbers already."""
    op = one.op.lower()
    if op in _ROUNDS:
        kind = "" if one.is_whole else op
        if op not in _STAYS_WHOLE:
            return kind
    else:
        kind = "compare" if has(one.op, Trait.COMPARES) else _KINDS.get(op, "")
        kind = kind if one.is_whole else ""
    floats = [each for each in one.inputs if not made(each).is_whole]
    return kind if kind and not all(steps_behind(each, made, known) for each in floats) else ""


@dataclass(slots=True)
class Steps(Generic[V]):
    """Finds near ties at steps by running the original once more, only where an output differs.

    ``outputs``: the steps of each output that has some. ``run`` runs the original on some inputs and shows each step;
    ``judging``: the inputs of all real judged samples, of which S is asked at the first difference.
    """

    outputs: Mapping[str, Mapping[V, str]]
    run: Callable[[Arrays, See[V]], None]
    u: float
    judging: Callable[[], Iterable[Arrays]]
    scales: dict[V, float] = field(default_factory=dict)

    def tolerated(self, inputs: Arrays, reference: Arrays, candidate: Arrays) -> dict[str, np.ndarray]:
        """The elements of each output in which the candidate may differ: what ``Trial.ties`` takes."""
        odd = [name for name in self.outputs if self._differs(reference[name], candidate.get(name))]
        if not odd:
            return {}
        try:
            if not self.scales:
                for each in self.judging():
                    self.run(each, self._measure)
            sides = self._sides(inputs, {name: reference[name] for name in odd})
        except ExportFailed:  # ONNX Runtime does not run a node of the file alone
            return {}
        return {name: sides[name].hold(candidate[name], self._slack(reference[name])) for name in odd}

    def _measure(self, step: V, values: Sequence[np.ndarray], result: np.ndarray, rest: Rest) -> None:
        scale = max(map(largest, values[:2] if self._kind(step) == "compare" else values[:1]))
        self.scales[step] = max(self.scales.get(step, 0.0), scale)

    def _sides(self, inputs: Arrays, odd: Arrays) -> dict[str, "_Sides"]:
        """The possible answers of the original for each output, by the sides of the steps on which its values land."""
        sides = {name: _Sides(array) for name, array in odd.items()}

        def see(step: V, values: Sequence[np.ndarray], result: np.ndarray, rest: Rest) -> None:
            asked = [name for name in odd if step in self.outputs[name]]
            kind, margin = self._kind(step), MARGIN_U * self.u * self.scales.get(step, 0.0)
            for changed in other_sides(kind, values, result, margin) if asked else ():
                came = answers_or_refusal(lambda _, one=changed: dict(rest(one)), {})
                if isinstance(came, Exception):
                    continue
                for name in asked:
                    if came[name].shape == odd[name].shape:
                        sides[name].add(kind, came[name])

        self.run(inputs, see)
        return sides

    def _kind(self, step: V) -> str:
        return next(steps[step] for steps in self.outputs.values() if step in steps)

    def _slack(self, reference: np.ndarray) -> float:
        return MARGIN_U * self.u * largest([reference]) if reference.dtype.kind == "f" else 0.0

    def _differs(self, mine: np.ndarray, other: np.ndarray | None) -> bool:
        if other is None or mine.shape != other.shape:
            return False
        if mine.dtype.kind != "f":
            return not np.array_equal(mine, other)
        return not bool((np.abs(mine - other.astype(np.float64)) <= self._slack(mine)).all())


@dataclass(frozen=True, slots=True)
class NearTies:
    """Says which elements of an output a half may answer otherwise (`question.TieTolerance`): those that a comparison
    of scores chose (``choices``), and those that come from a step (``steps``)."""

    choices: Ties | None
    steps: Steps | None

    @property
    def stepped(self) -> frozenset[str]:
        """The outputs that come from a step. The share of their near ties has a limit."""
        return frozenset(self.steps.outputs if self.steps else ())

    def __call__(self, inputs: Arrays, reference: Arrays, candidate: Arrays) -> dict[str, np.ndarray]:
        found = self.choices.tolerated(inputs, reference, candidate) if self.choices else {}
        return found | (self.steps.tolerated(inputs, reference, candidate) if self.steps else {})


def near_ties(
    tied: Sequence[str], choices: Callable[[Arrays], Mapping[str, Choice]] | None,
    stepped: Mapping[str, Mapping[V, str]], run: Callable[[Arrays, See[V]], None],
    spec: ModelSpec, dtype: str, judging: Samples,
) -> NearTies | None:  # fmt: skip
    """The near ties of a model; None where no output can differ by one. ``tied`` and ``choices``: those of `Ties`;
    ``stepped`` and ``run``: those of `Steps`."""
    rows, u = min(spec.max_batch_size, _ROWS_AT_ONCE) if spec.batched else 0, UNIT_ROUNDOFF[dtype]

    def asked() -> Iterator[Arrays]:
        return (arrays for _, arrays in judging.batches(rows))

    ties = Ties(tied, choices, u, asked) if choices and tied else None
    steps = Steps(stepped, run, u, asked) if stepped else None
    return NearTies(ties, steps) if ties or steps else None


def other_sides(
    kind: str, values: Sequence[np.ndarray], result: np.ndarray, margin: float
) -> Iterator[np.ndarray]:
    """The result of a step where values nearer than ``margin`` land above it, and where they land below it.

    ``values``: what the step reads; of a choice the scores and their axis. Nothing where no value is near, or where the
    step reads whole numbers."""
    if values[0].dtype.kind != "f" or (kind == "quantize" and values[1].size != 1):
        return
    with np.errstate(invalid="ignore", over="ignore"):
        if kind == "compare":
            near = np.abs(values[0].astype(np.float64) - values[1].astype(np.float64)) < margin
            sides = [np.where(near, other, result) for other in (np.True_, np.False_)]
        elif kind == CHOOSES:
            sides = _next_indices(values[0], int(values[1]), result, margin)
        elif kind == "bucketize":
            first = _bucket(values[1], values[0])
            moved = [_bucket(values[1], values[0] + by) - first for by in (margin, -margin)]
            sides = [(result + by).astype(result.dtype) for by in moved]
        elif result.dtype.kind == "b":  # whether a number is zero, or negative
            sides = [np.where(np.abs(values[0]) < margin, ~result, result)]
        else:
            sides = [_moved(kind, values, result, by) for by in (margin, -margin)]
    for side in sides:
        if not np.array_equal(side, result, equal_nan=side.dtype.kind == "f"):
            yield side


def _bucket(edges: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """The places of the numbers among the edges; where these have several lines, each among the edges of its line."""
    if edges.ndim == 1:
        return np.searchsorted(edges, numbers)
    lines = zip(edges.reshape(-1, edges.shape[-1]), numbers.reshape(-1, numbers.shape[-1]), strict=True)
    return np.stack([np.searchsorted(*line) for line in lines]).reshape(numbers.shape)


def _moved(kind: str, values: Sequence[np.ndarray], result: np.ndarray, by: float) -> np.ndarray:
    """The result where every value is moved ``by`` a number: one more or one less than ``result`` at most (a sign may
    be the other one), and within its type. What is no whole number stays as it is."""
    quantizes, most = kind == "quantize", 2 if _ROUNDS[kind] is np.sign else 1
    size = values[1].reshape(-1)[0] if quantizes else 1
    zero = values[2].astype(np.float64) if quantizes and len(values) > 2 else 0.0
    ends = np.iinfo(result.dtype) if result.dtype.kind in "iu" else None
    value, own = (values[0] / size).astype(np.float64), result.astype(np.float64)

    def of(way: float) -> np.ndarray:
        found = _ROUNDS[kind](value + way / float(size)) + zero
        return found if ends is None else np.clip(found, ends.min, ends.max)

    moved = np.clip(of(by), own - most, own + most)
    is_step = (own == np.rint(own)) & (of(-abs(by)) <= own) & (own <= of(abs(by)))
    side = result.copy()
    np.copyto(side, moved, where=is_step & (moved != own), casting="unsafe")
    return side


def _next_indices(scores: np.ndarray, axis: int, chosen: np.ndarray, margin: float) -> list[np.ndarray]:
    """The indices of the values that come next in order, above and below, where they are near those of ``chosen``."""
    rows, lines = lines_along(scores, chosen, axis)
    lines, own = lines.reshape(-1), chosen.reshape(-1).astype(np.int64)
    near = _with_near_others(rows, lines, own, margin)
    values, each = rows[lines[near]].astype(np.float64), np.arange(near.size)
    order = np.argsort(values, axis=1, kind="stable")
    place, last = (order == own[near, None]).argmax(axis=1), rows.shape[1] - 1
    sides = []
    for away in _NEXT:
        other = order[each, np.clip(place + away, 0, last)]
        is_near = np.abs(values[each, own[near]] - values[each, other]) < margin
        is_near &= (place + away >= 0) & (place + away <= last)
        side = own.copy()
        side[near[is_near]] = other[is_near]
        sides.append(side.reshape(chosen.shape).astype(chosen.dtype))
    return sides


def _with_near_others(rows: np.ndarray, lines: np.ndarray, own: np.ndarray, margin: float) -> np.ndarray:
    """The places of the indices in ``own`` beside whose value another one of its line lies: few, of many pixels."""
    found = np.zeros(own.size, bool)
    step = max(_SEEN_AT_ONCE // rows.shape[1], 1)
    for start in range(0, own.size, step):
        values, mine = rows[lines[start : start + step]], own[start : start + step, None]
        distances = np.abs(values - np.take_along_axis(values, mine, axis=1))
        found[start : start + step] = (distances < margin).sum(axis=1) > 1
    return np.flatnonzero(found)


class _Sides:
    """The answers that the original may give for one output: ``reference``, what lies between the results of steps, and
    what choices lead to."""

    def __init__(self, reference: np.ndarray) -> None:
        self._reference = reference
        self._low = self._high = reference
        self._chosen: list[np.ndarray] = []

    def add(self, kind: str, answer: np.ndarray) -> None:
        if kind == CHOOSES:
            self._chosen.append(answer)
        else:
            self._low, self._high = np.minimum(self._low, answer), np.maximum(self._high, answer)

    def hold(self, candidate: np.ndarray, slack: float) -> np.ndarray:
        """The elements in which the original may answer otherwise, and in which the candidate is one of these answers.
        Numbers count as equal within ``slack``."""
        low, high, mine = self._low, self._high, self._reference
        if mine.dtype.kind == "f":
            low, high = low.astype(np.float64) - slack, high.astype(np.float64) + slack
        held = (high - low > 2 * slack if slack else low != high) & (low <= candidate) & (candidate <= high)
        for other in self._chosen:
            if mine.dtype.kind == "f":
                held |= (_distance(other, mine) > slack) & (_distance(other, candidate) <= slack)
            else:
                held |= (other != mine) & (other == candidate)
        return held


def _distance(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return np.abs(one.astype(np.float64) - other)
