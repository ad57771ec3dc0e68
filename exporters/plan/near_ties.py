"""Samples on which FP32 itself decides otherwise as soon as it adds up in another order: they choose no plan.

A box that overlaps another one by almost exactly the threshold is chosen or not by the last bit. No node that is kept
in FP32 cures that, and a search that is asked such a sample ends with none in half.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from ..question import Answers, Arrays
from .batched import Batch


def without_near_ties(several: Iterable[Batch], all_kept: Answers) -> Iterator[Batch]:
    """The batches without the questions to which ``all_kept``, the program with every node in FP32, gives other
    integers than the whole. It is not asked where the whole gives no integers.
    """
    for batch in several:
        if not any(map(_decided, batch.questions[0].reference.values())):
            yield batch
            continue
        same = tuple(
            one for one, answers in batch.answers(all_kept) if _same_decisions(one.reference, answers)
        )
        if same:
            yield Batch(same)


def _same_decisions(whole: Arrays, other: Arrays) -> bool:
    return all(np.array_equal(array, other[name]) for name, array in whole.items() if _decided(array))


def _decided(array: np.ndarray) -> bool:
    return array.dtype.kind != "f"
