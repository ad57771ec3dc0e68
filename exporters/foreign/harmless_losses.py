"""At O3: which constants may lose their value in half, so that the search and not a rule decides about their readers.

The loss of a constant in half may be harmless: a gain of 1e-8 on a branch, an eps added to numbers of at least 1. A
constant that guards a division from zero need not be exact but must not vanish, whatever the samples show: it becomes
half's least number. A constant that guards a logarithm may be lost only where the numbers that it is added to were
never so small that it would matter in half.
"""

from collections.abc import Callable, Iterator, Mapping

import numpy as np
from onnx import NodeProto

from ..gate.parity import UNIT_ROUNDOFF
from ..ranges.ranges import Range
from .graph import FLOAT, FLOATING, ForeignProgram, attribute
from .op_lists import Rule, ops
from .weights import Entry

COUNTS = {"fp16": 512.0, "bf16": 64.0}  # half holds all integers up to four times as many
ADDED_OR_CHOSEN = ops("Add Sub Sum Max Clip")
_PASSES_ON = ADDED_OR_CHOSEN | ops("""
    Identity Reshape Flatten Squeeze Unsqueeze Transpose Expand Tile Slice Gather Concat Where Abs Sqrt Cast
    Mul ReduceSum ReduceMean ReduceMax ReduceMin
""")
_BREAKS_AT_ZERO = ops("Log Pow Softplus LpNormalization Acos Asin Atanh Acosh")


def may_be_lost(
    node: NodeProto,
    entry: Entry,
    readers: Mapping[str, list[NodeProto]],
    ranges: Mapping[str, Range],
    dtype: str,
) -> bool:
    """Whether the search may decide on a constant that half loses and that ``node`` reads.

    ``ranges``: of every value, on adversarial inputs as well.
    """
    if entry.saturated:
        return False
    if node.op_type not in ADDED_OR_CHOSEN or not _reaches(node, readers, _logarithm):
        return True
    return all(entry.largest <= UNIT_ROUNDOFF[dtype] / 2 * _least(ranges, name) for name in node.output)


def guards_a_division(name: str, readers: Mapping[str, list[NodeProto]]) -> bool:
    """Whether a constant is only added or chosen, and the result is a divisor."""
    nodes = readers.get(name, [])
    added = all(node.op_type in ADDED_OR_CHOSEN for node in nodes)
    return added and any(_reaches(node, readers, _division) for node in nodes)


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


def _least(ranges: Mapping[str, Range], name: str) -> float:
    return ranges[name].smallest if name in ranges else 0.0


def _division(node: NodeProto, name: str) -> bool:
    return node.op_type == "Reciprocal" or (node.op_type == "Div" and name in node.input[1:])


def _logarithm(node: NodeProto, name: str) -> bool:
    return node.op_type in _BREAKS_AT_ZERO


def _reaches(
    node: NodeProto,
    readers: Mapping[str, list[NodeProto]],
    breaks: Callable[[NodeProto, str], bool],
) -> bool:
    """Whether a node's result reaches such an op through ops that keep a zero a zero."""
    seen: set[str] = set()
    waiting = list(node.output)
    while waiting:
        if (name := waiting.pop()) in seen:
            continue
        seen.add(name)
        for reader in readers.get(name, []):
            if breaks(reader, name):
                return True
            if reader.op_type in _PASSES_ON:
                waiting += reader.output
    return False


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
