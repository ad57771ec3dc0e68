"""Leaves out samples for which the FP32 model itself gives other integers when its sums are added in another order.

Example: two boxes overlap by almost exactly the threshold of a NonMaxSuppression, so that the last bit of FP32 decides
whether the second box is chosen. To keep nodes in FP32 does not help there, and a search that must pass such a sample
leaves no node in half.
"""

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from ..question import Answers, Arrays
from .batched import Batch


def without_near_ties(several: Iterable[Batch], all_kept: Callable[[], Answers]) -> Iterator[Batch]:
    """The batches without such questions: the program with every node kept in FP32 gives other integers than the original.

    ``all_kept`` makes that program. It is not called for a model without integer outputs.
    """
    half: Answers | None = None
    for batch in several:
        if not any(map(_decided, batch.questions[0].reference.values())):
            yield batch
            continue
        half = half or all_kept()
        same = tuple(
            one
            for one, answers in batch.answers(half)
            if not isinstance(answers, Exception) and _same_decisions(one.reference, answers)
        )
        if same:
            yield Batch(same)


def _same_decisions(original: Arrays, other: Arrays) -> bool:
    return all(np.array_equal(array, other[name]) for name, array in original.items() if _decided(array))


def _decided(array: np.ndarray) -> bool:
    return array.dtype.kind != "f"
