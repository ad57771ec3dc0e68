"""Measures which nodes cost most in half: by what each adds to the error of the answers.

Errors of many nodes add up, and no profile says which of them matter at the outputs. Independent errors add up by
their squares, so what nodes cost with nothing else in half predicts what they cost together: on a recogniser of 170
nodes the root of the sum of squares is 4.6u, the error of all of them 5.2u. A block of nodes is therefore measured
alone, and the costliest blocks are divided until the measurements are spent. A second measurement, with all before the
block in half too, finds operations that are half only if what they read is.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

BLOCKS = 20  # that the graph is divided into at first
MEASUREMENTS = 256
NEGLIGIBLE = 0.02  # of the error of all blocks: what costs less is not divided
MARKED = 1.5  # times another error: a smaller difference may be chance

ErrorOf = Callable[[Sequence[str]], float]  # of the answers with only these nodes in half, in any unit


@dataclass(frozen=True, slots=True)
class _Block:
    """A block of nodes. ``before``: the nodes ahead of the block that are in half with it; ``base``: their error."""

    nodes: tuple[str, ...]
    before: tuple[str, ...]
    base: float
    cost: float

    @property
    def density(self) -> float:
        """The part of the sum of squared errors that each node of the block takes away if kept in FP32, on average."""
        return self.cost * self.cost / len(self.nodes)


def by_measured_error(
    order: Sequence[str], error_of: ErrorOf, affordable: Callable[[], bool] = lambda: True
) -> list[str]:
    """The nodes, those first of which an FP32 node takes most error away; blocks stay together.

    ``order``: in which they run. ``error_of``: their root mean square, which adds up where a maximum does not;
    infinite where an answer is not finite. It is asked `MEASUREMENTS` times at most, and no more once ``affordable``
    is false. Deterministic.
    """
    left = MEASUREMENTS

    def measured(nodes: Sequence[str]) -> float:
        nonlocal left
        left -= 1
        return error_of(nodes)

    blocks = _swept(_parts(order, max(1, math.ceil(len(order) / BLOCKS))), measured)
    while left > 1 and affordable():
        total = math.sqrt(sum(block.cost**2 for block in blocks if math.isfinite(block.cost)))
        divisible = [block for block in blocks if len(block.nodes) > 1 and block.cost > NEGLIGIBLE * total]
        if not divisible:
            break
        worst = max(divisible, key=lambda block: block.cost)
        place = blocks.index(worst)
        blocks[place : place + 1] = _divided(worst, measured)
    return [node for block in sorted(blocks, key=lambda one: -one.density) for node in block.nodes]


def _parts(nodes: Sequence[str], size: int) -> list[tuple[str, ...]]:
    return [tuple(nodes[start : start + size]) for start in range(0, len(nodes), size)]


def _swept(parts: Sequence[tuple[str, ...]], error_of: ErrorOf) -> list[_Block]:
    """The parts measured one after the other; what makes an answer infinite does not stay in half for the next."""
    found = list[_Block]()
    before, base = (), 0.0
    for nodes in parts:
        alone, joint = error_of(nodes), error_of((*before, *nodes))
        added = _added(joint, base)
        behind = added > MARKED * alone
        found.append(_Block(nodes, before, base, added) if behind else _Block(nodes, (), 0.0, alone))
        if math.isfinite(joint):
            before, base = (*before, *nodes), joint
    return found


def _divided(block: _Block, error_of: ErrorOf) -> list[_Block]:
    """The two halves of a block. Where the block was measured behind the nodes before it, so is each half, and the
    second half is also behind the first, if the first gives finite answers."""
    found, before, base = list[_Block](), block.before, block.base
    for nodes in _parts(block.nodes, math.ceil(len(block.nodes) / 2)):
        error = error_of((*before, *nodes))
        found.append(_Block(nodes, before, base, _added(error, base) if before else error))
        if before and math.isfinite(error):
            before, base = (*before, *nodes), error
    return found


def _added(joint: float, base: float) -> float:
    return math.sqrt(joint * joint - base * base) if joint > MARKED * base else 0.0
