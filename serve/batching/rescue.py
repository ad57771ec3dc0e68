"""Rows that a half answered with NaN or infinity are answered by the FP32 original, and only those rows.

FP16 ends at 65,504: values far from every sample can overflow it where FP32 has an answer. Where the original's answer
is not finite either, it is sent: then it is the model's own answer.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import ml_dtypes
import numpy as np

from .engine_runner import EngineRunner, Fault, Item, Run

logger = logging.getLogger("halfeven.batcher")
# Below this BLAS works on the calling thread alone: its pool would fight torch's for the cores.
_SMALL = 8192
_INFINITY_BITS = {np.dtype(np.float16): 0x7C00, np.dtype(ml_dtypes.bfloat16): 0x7F80}


class TimedItem(Item, Protocol):
    """An item that may have a deadline."""

    @property
    def deadline_ns(self) -> int: ...


@dataclass(slots=True, frozen=True)
class Mended:
    """The rescue of one item: the rows answered again, or the fault; ``late``: its deadline had passed."""

    rows: int = 0
    took_ns: int = 0
    fault: Fault | None = None
    late: bool = False


@dataclass(slots=True, eq=False)
class _Torn:
    """The rows of one item that have to be run again. ``where``: their places in the batch."""

    arrays: Sequence[np.ndarray]
    rows: int
    alone: bool
    index: int
    where: np.ndarray


class Rescue:
    """The original beside a half. ``futile`` counts the rows that the original could not make finite either."""

    def __init__(self, original: EngineRunner) -> None:
        self._original = original
        self._floats = [index for index, spec in enumerate(original.spec.outputs) if spec.type.is_float]
        self.futile = 0

    def all_well(self, outputs: list[np.ndarray]) -> bool:
        """True if every element of every output is finite."""
        return all(map(all_finite, [outputs[index] for index in self._floats]))

    def instead(self, item: TimedItem) -> Run[TimedItem]:
        """Run one item with the original because the half has no answer to it at all."""
        return self._original.run([item])

    def mend(
        self, items: Sequence[TimedItem], outputs: list[np.ndarray], until_ns: int
    ) -> Mapping[int, Mended]:
        """Replace the rows of ``outputs`` that are not finite, in place; gives by item index what was done.

        An item whose ``deadline_ns`` (0: none) has passed is not run again. ``until_ns`` bounds the search for an item
        that makes the original fail.
        """
        torn = self._torn(items, outputs)
        now_ns = self._original.clock()
        late = [one for one in torn if 0 < items[one.index].deadline_ns <= now_ns]
        mended = {one.index: Mended(late=True) for one in late}
        left = [one for one in torn if one.index not in mended]
        if left:
            for run in self._original.isolated(self._original.run(left), until_ns):
                if isinstance(run.result, list):
                    self._replace(outputs, run.items, run.result)
                fault = run.result if isinstance(run.result, Fault) else None
                for one in run.items:
                    mended[one.index] = Mended(one.rows, run.took_ns, fault)
        return mended

    def _torn(self, items: Sequence[Item], outputs: Sequence[np.ndarray]) -> list[_Torn]:
        if not self._original.spec.batched:
            return [_Torn(items[0].arrays, items[0].rows, items[0].alone, 0, np.zeros(0, np.intp))]
        bad = non_finite_rows([outputs[index] for index in self._floats])
        torn, start = [], 0
        for index, item in enumerate(items):
            own = bad[(bad >= start) & (bad < start + item.rows)]
            if own.size:
                arrays = [array[own - start] for array in item.arrays]
                torn.append(_Torn(arrays, int(own.size), item.alone, index, own))
            start += item.rows
        return torn

    def _replace(self, outputs: list[np.ndarray], torn: Sequence[_Torn], found: list[np.ndarray]) -> None:
        before = self.futile
        if not self._original.spec.batched:
            outputs[:] = found
            self.futile += not self.all_well(found)
        else:
            where = np.concatenate([one.where for one in torn])
            for index, output in enumerate(outputs):
                if not output.flags.writeable:
                    outputs[index] = output = output.copy()
                output[where] = found[index]
            self.futile += non_finite_rows([found[index] for index in self._floats]).size
        if self.futile and not before:
            logger.warning(
                "'%s': the FP32 original is not finite either where its half is not: these answers are the model's "
                "own, and each costs a second run. Where that is usual, serve it in FP32 (level = 'O0')",
                self._original.spec.name,
            )


def all_finite(array: np.ndarray) -> bool:
    """True if no element is NaN or infinite, as cheaply as numpy can tell.

    The sum of squares of FP32 is finite only if every element is; where it overflows, they are looked at.
    Half types, which numpy computes with element by element, are compared as integers.
    """
    size = array.size
    if array.dtype == np.float32 and 0 < size <= _SMALL and math.isfinite(np.vdot(array, array)):
        return True
    if size == 0:
        return True
    if (infinity := _INFINITY_BITS.get(array.dtype)) is not None:
        return bool(np.maximum.reduce(array.view(np.uint16) & 0x7FFF, axis=None) < infinity)
    return bool(np.isfinite(array).all())


def non_finite_rows(outputs: Sequence[np.ndarray]) -> np.ndarray:
    """The indices along the first axis where any of the outputs has an element that is not finite."""
    bad = np.zeros(len(outputs[0]), np.bool_)
    for output in outputs:
        bad |= ~np.isfinite(output.reshape(len(output), -1)).all(axis=1)
    return np.flatnonzero(bad)
