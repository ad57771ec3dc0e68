"""Finds the axis that the batch has in a shape that an exported program writes out for one row."""

from collections.abc import Sequence
from math import prod


def place_of_batch(sizes: Sequence[int], in_front: int) -> int | None:
    """The axis that the batch has in a shape of one row, so many elements in front of it; None where it would be cut.

    An axis of size 1, else one that it is merged with. Between two axes it goes to the second, as the heads of an
    attention, but not to the last one: those are the features.
    """
    outer = [prod(sizes[:axis]) for axis in range(len(sizes) + 1)]
    starting = [axis for axis in range(len(sizes)) if outer[axis] == in_front]
    if of_one := [axis for axis in starting if sizes[axis] == 1]:
        return of_one[0]
    if starting and (starting[0] < len(sizes) - 1 or starting[0] == 0):
        return starting[0]
    if in_front == 0:
        return None
    inside = (
        a for a in range(len(sizes)) if outer[a] and in_front % outer[a] == 0 and outer[a + 1] % in_front == 0
    )
    return next(inside, None)
