"""Ranges of every FP32 value of the whole over calibration samples, and which half nodes they make suspicious.

Integers are not magnitudes: only FP32 values are looked at, one at a time, as the whole runs.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from ..policy.classes import Trait, has
from .graph import FLOAT, ForeignProgram
from .oracle import Oracle

LARGEST = {"fp16": 65504.0, "bf16": 3.3895313892515355e38}
SMALLEST = {"fp16": 2.0**-24, "bf16": 2.0**-133}
SENTINEL = 1e9  # what is as large is not a number but a mark, as in the gate
_GUARDED = ("Sqrt", "Div", "Log", "Reciprocal", "Pow", "ReduceL2", "LpNormalization")


@dataclass(frozen=True, slots=True)
class Range:
    """``largest`` finite magnitude, ``smallest`` non-zero one (inf where there is none), share under half's least.

    ``numel``: elements, of the largest batch. ``highest`` finite number, with its sign.
    """

    largest: float = 0.0
    smallest: float = float("inf")
    vanishing: float = 0.0
    infinite: bool = False
    numel: int = 0
    highest: float = float("-inf")

    def joined(self, other: "Range") -> "Range":
        return Range(
            max(self.largest, other.largest),
            min(self.smallest, other.smallest),
            max(self.vanishing, other.vanishing),
            self.infinite or other.infinite,
            max(self.numel, other.numel),
            max(self.highest, other.highest),
        )


def range_of(array: np.ndarray, dtype: str) -> Range:
    size = np.abs(array[np.isfinite(array) & (array != 0)])
    infinite = not bool(np.isfinite(array).all())
    highest = float(array.max(initial=-np.inf, where=np.isfinite(array)))
    if not size.size:
        return Range(infinite=infinite, numel=array.size, highest=highest)
    lost = float((size < SMALLEST[dtype] / 2).mean())
    return Range(float(size.max()), float(size.min()), lost, infinite, array.size, highest)


def profile(
    program: ForeignProgram, batches: Iterable[Mapping[str, np.ndarray]], dtype: str
) -> dict[str, Range]:
    """Value → range over all batches; constants have theirs too."""
    ranges = {
        name: range_of(array, dtype) for name, array in program.weights.items() if program.is_float(name)
    }

    def observe(name: str, array: np.ndarray, type_: int) -> None:
        if type_ == FLOAT:
            ranges[name] = ranges.get(name, Range()).joined(range_of(array, dtype))

    oracle = Oracle(program.model, program.weights, observe=observe)
    for inputs in batches:
        oracle.run(inputs)
    return ranges


def suspicion(node: NodeProto, ranges: Mapping[str, Range], dtype: str) -> float:
    """How likely half is to harm a node: overflow first, then what vanishes, then large angles and guards."""
    around = [ranges[name] for name in (*node.input, *node.output) if name in ranges]
    if not around:
        return 0.0
    largest, lost = max(item.largest for item in around), max(item.vanishing for item in around)
    score = float(np.log2(1 + largest)) / 16
    if largest > LARGEST[dtype]:
        score += 100.0
    if lost > 0:
        score += 50.0 + 10.0 * lost
    if has(node.op_type, Trait.PERIODIC) and largest > 8:
        score += 40.0 + largest / 1e4
    if node.op_type in _GUARDED:
        score += 10.0
    return score
