"""Samples on which FP32 itself decides otherwise as soon as it adds up in another order: they choose no plan.

A box that overlaps another one by almost exactly the threshold is chosen or not by the last bit. No node that is kept
in FP32 cures that, and a search that is asked such a sample ends with none in half.
"""

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from ..question import Answers, Arrays
from .batched import Batch


def without_near_ties(several: Iterable[Batch], all_kept: Callable[[], Answers]) -> Iterator[Batch]:
    """The batches without the questions to which the program with every node in FP32, made by ``all_kept``, gives other
    integers than the whole. It is not made where the whole gives no integers.
    """
    half: Answers | None = None
    for batch in several:
        if not any(map(_decided, batch.questions[0].reference.values())):
            yield batch
            continue
        half = half or all_kept()
        same = tuple(one for one, answers in batch.answers(half) if _same_decisions(one.reference, answers))
        if same:
            yield Batch(same)


def _same_decisions(whole: Arrays, other: Arrays) -> bool:
    return all(np.array_equal(array, other[name]) for name, array in whole.items() if _decided(array))


def _decided(array: np.ndarray) -> bool:
    return array.dtype.kind != "f"
