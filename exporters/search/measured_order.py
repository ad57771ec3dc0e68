"""Which nodes cost most in half, measured: blocks of the graph by what they add to the error of the answers.

Errors of many nodes add up, and no profile says which of them matter at the outputs. A block is measured twice: with
nothing else in half, where other errors do not hide it, and with all before it in half, because many operations are
half only if what they read is. The worst blocks are divided until the measurements are spent.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

BLOCKS = 20  # that the graph is divided into at first
DIVIDED = 10  # blocks, the worst at each time
MARKED = 1.5  # times the error of all before it: a smaller difference may be chance

ErrorOf = Callable[[Sequence[str]], float]  # of the answers with only these nodes in half, in any unit


@dataclass(frozen=True, slots=True)
class _Block:
    """``before``: the nodes ahead of it that were in half; ``base``: their error."""

    nodes: tuple[str, ...]
    before: tuple[str, ...]
    base: float
    cost: float

    @property
    def density(self) -> float:
        """Errors of independent blocks add up by their squares; so much of the sum a kept node takes away."""
        return self.cost * self.cost / len(self.nodes)


def by_measured_error(order: Sequence[str], error_of: ErrorOf) -> list[str]:
    """The nodes, those first of which an FP32 node takes most error away; blocks stay together.

    ``order``: in which they run. ``error_of``: infinite where an answer is not finite; it is asked
    2 · `BLOCKS` + 4 · `DIVIDED` times at most. Deterministic.
    """
    blocks = _swept(_parts(order, max(1, math.ceil(len(order) / BLOCKS))), (), 0.0, error_of)
    for _ in range(DIVIDED):
        divisible = [block for block in blocks if len(block.nodes) > 1 and block.cost > 0]
        if not divisible:
            break
        worst = max(divisible, key=lambda block: block.cost)
        halves = _parts(worst.nodes, math.ceil(len(worst.nodes) / 2))
        place = blocks.index(worst)
        blocks[place : place + 1] = _swept(halves, worst.before, worst.base, error_of)
    return [node for block in sorted(blocks, key=lambda one: -one.density) for node in block.nodes]


def _parts(nodes: Sequence[str], size: int) -> list[tuple[str, ...]]:
    return [tuple(nodes[start : start + size]) for start in range(0, len(nodes), size)]


def _swept(
    parts: Sequence[tuple[str, ...]], before: tuple[str, ...], base: float, error_of: ErrorOf
) -> list[_Block]:
    """The parts measured one after the other; what makes an answer infinite does not stay in half for the next."""
    found = list[_Block]()
    for nodes in parts:
        alone, joint = error_of(nodes), error_of((*before, *nodes))
        added = math.sqrt(joint * joint - base * base) if joint > MARKED * base else 0.0
        found.append(_Block(nodes, before, base, max(alone, added)))
        if math.isfinite(joint):
            before, base = (*before, *nodes), joint
    return found
