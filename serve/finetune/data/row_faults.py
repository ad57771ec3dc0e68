"""The rows of a training file that cannot be learnt from, and why: they are left out where the job says so.

A number whose square is infinite in FP32 makes any variance infinite: BatchNorm's running statistics for good, and
LayerNorm's output zero. Neither the loss nor a gradient need show it.
"""

from collections.abc import Mapping

import numpy as np

from ....exporters.inputs.samples import TARGET
from ....models.errors import BadSamples
from ....models.spec.datatypes import DATATYPES, name_of
from ....models.spec.spec import ModelSpec
from ....models.spec.value_range import ValueRange
from ..judging.judging_metrics import classifies
from ..training.loop.setting_names import MOST_SHARE, most_quarantined

LARGEST = float(np.sqrt(np.finfo(np.float32).max))  # 1.8e19


def row_faults(
    spec: ModelSpec, tensors: Mapping[str, np.ndarray], ignored: int | None = None, masked: bool = False
) -> dict[int, str]:
    """Row → what is wrong with it. Tensors that do not fit as a whole are left to the checks of the file.

    Raises BadSamples where more than a tenth of the rows is bad.
    """
    found: dict[int, str] = {}
    for name, bad, words in _faults(spec, tensors, ignored, masked):
        for row in np.flatnonzero(bad.reshape(len(bad), -1).any(1)).tolist() if bad.size else ():
            found.setdefault(row, f"'{name}': {words}")
    rows = max((len(array) for array in tensors.values() if array.ndim), default=0)
    if len(found) > most_quarantined(rows):
        row, words = next(iter(found.items()))
        raise BadSamples(
            f"{len(found)} of {rows} rows cannot be learnt from (row {row}: {words}): at most {MOST_SHARE:.0%} of them "
            "are left out; correct the file"
        )
    return dict(sorted(found.items()))


def without(tensors: Mapping[str, np.ndarray], rows: Mapping[int, str]) -> dict[str, np.ndarray]:
    """The tensors without these rows."""
    return {
        name: np.delete(array, list(rows), axis=0) if array.ndim else array for name, array in tensors.items()
    }


def _ranges(spec: ModelSpec, tensors: Mapping[str, np.ndarray]) -> list[ValueRange | None]:
    """The range of each input's values; the tensors are not checked yet."""
    arrays = [tensors[tensor.name] for tensor in spec.inputs if tensor.name in tensors]
    first = 0 if spec.batched else 1
    if [array.ndim for array in arrays] == [first + len(tensor.shape) for tensor in spec.inputs]:
        return spec.ranges(arrays, first)
    return [tensor.range for tensor in spec.inputs]


def _faults(spec: ModelSpec, tensors: Mapping[str, np.ndarray], ignored: int | None, masked: bool):  # type: ignore[no-untyped-def]
    """(tensor, its bad elements with the rows first, the fault)."""
    values = {TARGET + tensor.name for tensor in spec.outputs if not classifies(tensor)}
    for name, array in tensors.items():
        known = name_of(array.dtype) in DATATYPES
        if array.ndim and array.size and known and DATATYPES[name_of(array.dtype)].is_float:
            finite = np.isfinite(array) | (np.isnan(array) & (masked and name in values))
            yield name, ~finite, "NaN or infinity"
            large = np.abs(array, where=finite, out=np.zeros_like(array)) > LARGEST
            yield name, large, f"a number above {LARGEST:.2g}, whose square is infinite"
    for tensor, valid in zip(spec.inputs, _ranges(spec, tensors), strict=True):
        array = tensors.get(tensor.name)
        if valid is not None and array is not None and array.ndim and array.dtype.kind in "iu":
            yield tensor.name, valid.outside(array), f"a value outside of {valid}"
    for tensor in spec.outputs:
        array = tensors.get(name := TARGET + tensor.name)
        if array is None or not classifies(tensor) or array.ndim == 0 or array.dtype.kind not in "iu":
            continue
        last = tensor.shape[-1] if tensor.shape else None
        most = last.minimum if last is not None and last.fixed else np.iinfo(np.int64).max
        bad = (array < 0) | (array >= most)
        if ignored is not None:
            bad &= array != ignored
        yield name, bad, f"a class outside of 0..{most - 1}"
