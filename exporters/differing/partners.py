"""Finds for each tensor of program or file A the corresponding tensor of B."""

from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .first_difference import Side


def partners(a: "Side", b: "Side") -> dict[str, str]:
    """Maps tensors of A to tensors of B: in two programs, results of the same operation in the same order between reads
    of the same weights; otherwise tensors of the same name. Outputs correspond by their order."""
    if a.steps and b.steps:
        found = _in_order(a, b)
    else:
        theirs = {node.name for node in b.nodes}
        found = {node.name: node.name for node in a.nodes if node.name in theirs}
    if len(a.outputs) == len(b.outputs):
        found |= dict(zip(a.outputs.values(), b.outputs.values(), strict=True))
    return found


def _in_order(a: "Side", b: "Side") -> dict[str, str]:
    weights = _weights(a) & _weights(b)
    keys = [_keys(side, weights) for side in (a, b)]
    blocks = SequenceMatcher(None, keys[0], keys[1], autojunk=False).get_matching_blocks()
    return {
        a.steps[block.a + place][0]: b.steps[block.b + place][0]
        for block in blocks
        for place in range(block.size)
    }


def _weights(side: "Side") -> frozenset[str]:
    return frozenset[str]().union(*(weights for _, _, weights in side.steps))


def _keys(side: "Side", known: frozenset[str]) -> Sequence[tuple[str, frozenset[str]]]:
    """Each operation with the last weights that were read: layers that are alike are told apart by them."""
    found, last = list[tuple[str, frozenset[str]]](), frozenset[str]()
    for _, op, weights in side.steps:
        last = weights & known or last
        found.append((op, last))
    return found
