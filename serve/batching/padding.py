"""Batches of a few fixed sizes: a batch is filled up with copies of one of its own rows.

A device that has run a shape before runs it faster (cuDNN's choice of kernels, and later CUDA graphs). Copies, not
zeros: on a row of zeros a model may divide by zero. Lengths are not filled up: without a mask that the model reads,
more tokens would change the answer.
"""

from collections.abc import Sequence

import numpy as np

Parts = Sequence[Sequence[np.ndarray]]  # per input, the arrays that are joined along the first axis


def largest_within(buckets: Sequence[int], rows: int) -> int:
    """The most rows to run at once where ``rows`` are allowed: the largest bucket, or all of them."""
    return max([bucket for bucket in buckets if bucket <= rows], default=rows)


def filled_rows(buckets: Sequence[int], rows: int, most: int) -> int:
    """The number of rows to which a batch of ``rows`` is filled up, where ``most`` are allowed."""
    for bucket in buckets:
        if rows <= bucket:
            return bucket if bucket <= most else rows
    return rows


def filled(parts: Parts, missing: int) -> Parts:
    """The rows of ``parts`` and ``missing`` more, copies of the first row."""
    if missing <= 0:
        return parts
    return [[*part, np.repeat(part[0][:1], missing, axis=0)] for part in parts]


def rows_between(parts: Parts, start: int, stop: int) -> Parts:
    """Some of the rows of a batch, as views."""
    taken = []
    for part in parts:
        at, found = 0, []
        for array in part:
            low, high = max(start - at, 0), min(stop - at, len(array))
            if low < high:
                found.append(array[low:high])
            at += len(array)
        taken.append(found)
    return taken
