"""Chooses which of the lengths that wait share a batch. A place is one position of one row, for example a token.

Each batch costs something by itself, so that few batches are cheaper. But a row is filled up to the longest row of its
batch, so that many batches have fewer places.
"""

from collections.abc import Sequence
from math import inf
from operator import le

# The cost of a batch beside its places, in places of one row. On a CPU it is about 110 for a BERT of two blocks of 128,
# 200 for two of 64, fewer for larger ones. Simulated with costs of 20 to 220, 50 was within 6 % of the cost itself.
BATCH_PLACES = 50


def cheapest_batch(
    index: int, rows: Sequence[int], sizes: Sequence[tuple[int, ...]], most: Sequence[int]
) -> range:
    """The groups that share a batch with that of this ``index`` where all that wait are run as cheaply as possible.

    Each group has so many ``rows``, whose axes have these ``sizes``, ascending; a batch as long as that group has at
    most ``most`` rows. A batch has neighbouring groups and is as long as the last of them, in every axis; only a group
    alone may have more rows than fit. A batch costs `BATCH_PLACES` and the places of its rows, filled-up ones included.
    """
    # The cost of the groups before each, and the place where the last batch among them begins.
    costs, firsts = [0.0], list[int]()
    for last, longest in enumerate(sizes):
        together, places, cheapest, first = 0, sum(longest), inf, last
        for start in range(last, -1, -1):
            together += rows[start]
            if start < last and (together > most[last] or not all(map(le, sizes[start], longest))):
                break
            cost = costs[start] + BATCH_PLACES + together * places
            if cost < cheapest:
                cheapest, first = cost, start
        costs.append(cheapest)
        firsts.append(first)
    last = len(rows) - 1
    while firsts[last] > index:
        last = firsts[last] - 1
    return range(firsts[last], last + 1)
