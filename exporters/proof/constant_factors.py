"""Finds how small multiplications with constants make a node's result on its way to the answers. A LayerScale of 1e-8
makes a branch harmless for every sample; a gate that is as small on these samples may be open on others."""

from collections.abc import Mapping

import numpy as np

from ..graph.original_graph import OriginalGraph, Rest
from ..policy.classes import class_of
from ..question import Arrays


def constant_factors(original: OriginalGraph, inputs: Arrays) -> dict[str, float]:
    """By node the largest factor, at most 1, by which multiplications with constants change its result on any way to
    the answers. ``inputs``: of a run that shows how large the constants are."""
    nodes, ends = original.nodes(), {*original.makers().values()}
    shown = _shown_factors(original, inputs)
    found = dict.fromkeys((node.name for node in nodes), 0.0)
    read = {name for node in nodes for name in node.inputs}
    for node in reversed(nodes):
        # A result that nobody reads is written into another, or ends a body.
        if node.name in ends or node.name not in read:
            found[node.name] = 1.0
        for name in node.inputs:
            found[name] = max(found[name], found[node.name] * shown.get(node.name, 1.0))
    return found


def _shown_factors(original: OriginalGraph, inputs: Arrays) -> dict[str, float]:
    """By multiplication with a constant the largest magnitude of the constant, at most 1."""
    scaled, found, held = _scaled_by_constants(original), dict[str, float](), dict[str, np.ndarray]()
    sources = {*scaled.values()}

    def see(name: str, result: np.ndarray, rest: Rest) -> None:
        if name in sources:
            held.setdefault(name, result)
        source = held.get(scaled.get(name, ""))
        if source is None or source.shape != result.shape or np.array_equal(result, source * source):
            return  # a square is no multiplication with a constant
        if np.any(source):
            ratios = np.divide(np.abs(result), np.abs(source), where=source != 0, out=np.zeros_like(source))
            found[name] = min(float(ratios.max()), 1.0)

    original.watched(inputs, see)
    return found


def _scaled_by_constants(original: OriginalGraph) -> Mapping[str, str]:
    """By each multiplication of one computed result with what depends on no input: the node of that result."""
    computed, found = set[str](), dict[str, str]()
    for node in original.nodes():
        operands = [name for name in node.inputs if name in computed]
        if operands or node.reads_input:
            computed.add(node.name)
        if class_of(node.op).name == "multiplication" and len(operands) == 1 and not node.reads_input:
            found[node.name] = operands[0]
    return found
