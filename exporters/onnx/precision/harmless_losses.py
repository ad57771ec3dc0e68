"""At O3: which constants are brought into half's range, and which casts of integers go to half at once.

A constant that guards a division from zero need not be exact but must not vanish, whatever the samples show: it becomes
half's least number. One that stands for infinity becomes half's largest.
"""

from collections.abc import Iterator, Mapping

import numpy as np
from onnx import NodeProto

from ...policy.classes import Trait, has
from ...ranges.guards import reaches_a_division
from ...ranges.ranges import Range
from ..reading.graph import FLOAT, FLOATING, ForeignProgram, attribute
from .op_lists import Rule

COUNTS = {"fp16": 512.0, "bf16": 64.0}  # half holds all integers up to four times as many


def guards_a_division(name: str, readers: Mapping[str, list[NodeProto]]) -> bool:
    """Whether a constant is only added or chosen, and the result is a divisor."""

    def reading(result: str) -> Iterator[tuple[str, str, bool]]:
        for node in readers.get(result, []):
            divides = has(node.op_type, Trait.DIVIDES) and result in node.input[1:]
            for output in node.output:
                yield output, node.op_type, divides or node.op_type == "Reciprocal"

    nodes = readers.get(name, [])
    added = all(has(node.op_type, Trait.ADDS, Trait.FLOORS) for node in nodes)
    return added and any(reaches_a_division(node.output[0], reading) for node in nodes)


def replaces_infinity(name: str, program: ForeignProgram, readers: Mapping[str, list[NodeProto]]) -> bool:
    """Whether a constant is the largest FP32 number and replaces infinities, as in nan_to_num."""
    array = program.weights[name]
    makers = {output: node for node in program.nodes for output in node.output}
    return bool((np.abs(array) == np.finfo(np.float32).max).all()) and all(
        node.op_type == "Where" and name != node.input[2] and _asks_for_infinity(node.input[0], makers)
        for node in readers.get(name, [])
    )


def _asks_for_infinity(name: str, makers: Mapping[str, NodeProto]) -> bool:
    node = makers.get(name)
    if node is None or node.op_type != "And":
        return node is not None and node.op_type == "IsInf"
    return any(_asks_for_infinity(each, makers) for each in node.input)


def narrow_casts(
    program: ForeignProgram, rules: Mapping[str, Rule], ranges: Mapping[str, Range], dtype: str
) -> Iterator[NodeProto]:
    """Casts of small integers (masks, counts, flags) to float, which may go to half directly."""
    for node in program.nodes:
        if node.op_type != "Cast" or rules.get(node.name) is not Rule.AS_IS or attribute(node, "to") != FLOAT:
            continue
        seen = ranges.get(node.output[0])
        counts = program.types.get(node.input[0]) not in FLOATING
        if counts and seen and not seen.infinite and seen.extreme <= COUNTS[dtype]:
            yield node
