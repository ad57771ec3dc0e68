"""The FP32 original answers as the file that it was read from, as ONNX Runtime runs that.

Reading a file inlines its functions, converts its opset and computes its constants. A fault of any of these would be in
the original and in the half alike, so that no comparison of those two would show it.
"""

from collections.abc import Iterable
from functools import cached_property
from itertools import islice

import numpy as np
from onnx import ModelProto

from ...models.spec.batch_axis import array_batch_back, array_batch_first
from ...models.spec.spec import ModelSpec
from ..question import Answers, Arrays
from .runtime import has_half, runtime_answers

# Answers that differ by at most this share of the output's largest number are alike: another order of sums differs far
# less, another operation more.
ALIKE = 1e-3
# A file with values in half may differ from its original in FP32 by this share of the output's largest number, because
# it rounds. A larger difference means that its answers depend on a rounding, as those of `x - half(x)` do.
ALIKE_IN_HALF = 0.05
ROWS = 8  # on which a note measures that difference


class AsGiven:
    """The file ``given`` beside ``original``, which was read from it; both have the tensors of ``spec``."""

    def __init__(self, given: ModelProto, spec: ModelSpec, original: Answers) -> None:
        self.spec, self.original, self.in_half = spec, original, has_half(given)
        self._given = given

    def difference(self, row: Arrays) -> str | None:
        """A sentence that says how the original's answer to the inputs ``row`` differs from that of the file; None
        where both answer alike.

        Where the file has values in half, which the original has in FP32, finite numbers may differ by `ALIKE_IN_HALF`.
        Also None where the two cannot be compared: the file is random, or ONNX Runtime does not run it as it is.
        """
        try:
            asked, again = self._answers(row), self._answers(row)
        except Exception:  # ONNX Runtime has no narrower one
            return None
        if not all(_alike(asked[name], again[name]) for name in asked):
            return None
        try:
            came = self.original(row)
        except Exception as error:
            return f"as it is read here it does not run ({str(error)[:200]})"
        for name, own in asked.items():
            if not (_alike_in_half if self.in_half else _alike)(own, came[name]):
                return f"as it is read here output '{name}' is not what ONNX Runtime gives of the file"
        return None

    def notes(self, rows: Iterable[Arrays]) -> list[str]:
        """The note on a file with values in half, whose own answers to ``rows`` are not those of the original; none
        where they are alike, and where ONNX Runtime does not run the file as it is."""
        share = 0.0
        try:
            for row in islice(rows, ROWS if self.in_half else 0):
                own, came = self._answers(row), self.original(row)
                share = max(share, *(_share(own[name], came[name]) for name in own))
        except Exception:  # ONNX Runtime has no narrower one
            return []
        if share <= ALIKE:
            return []
        return [
            "the half is compared with the file in FP32. The file itself rounds values to half, and differs from that "
            f"by {share:.2%} of the largest number"
        ]

    @cached_property
    def _run(self) -> Answers:
        return runtime_answers(self._given)

    def _answers(self, row: Arrays) -> Arrays:
        """The file's own answers, with the batch first."""
        inputs = {
            tensor.name: np.asarray(array_batch_back(row[tensor.name], tensor.batch_axis), order="C")
            for tensor in self.spec.inputs
        }
        came = self._run(inputs)
        return {
            tensor.name: array_batch_first(came[tensor.name], tensor.batch_axis)
            for tensor in self.spec.outputs
        }


def _alike(one: np.ndarray, other: np.ndarray) -> bool:
    if one.shape != other.shape:
        return False
    numbers, others = one.astype(np.float64), other.astype(np.float64)
    scale = float(np.abs(numbers[np.isfinite(numbers)]).max(initial=0.0))
    return bool(np.allclose(numbers, others, rtol=0.0, atol=ALIKE * scale, equal_nan=True))


def _alike_in_half(one: np.ndarray, other: np.ndarray) -> bool:
    """True if finite numbers differ by at most `ALIKE_IN_HALF`. Integers are not compared, because a rounding may turn
    one into the next, nor numbers that are infinite on one side, because half overflows where FP32 does not."""
    return _share(one, other) <= ALIKE_IN_HALF


def _share(one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference of two numbers that are finite on both sides, as a share of the largest of ``other``."""
    if one.dtype.kind not in "fV" or one.shape != other.shape:
        return 0.0
    numbers, others = one.astype(np.float64), other.astype(np.float64)
    finite = np.isfinite(numbers) & np.isfinite(others)
    scale = float(np.abs(others[finite]).max(initial=0.0))
    off = float(np.abs(numbers[finite] - others[finite]).max(initial=0.0))
    return off / scale if scale else float(off > 0)
