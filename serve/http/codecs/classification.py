"""The classification extension: the best K classes of an output, as ``value:index[:label]``.

Source: Triton's classification extension. Values have six decimals where they are fractions, as C++ ``to_string``
writes them; the best comes first, equal ones in the order of their index, NaN last.
"""

from collections.abc import Sequence
from math import prod

import numpy as np

from ....models.errors import BadRequest
from ....models.spec.spec import TensorSpec
from ..limits.request_limits import DEFAULTS

MAX_VALUES = DEFAULTS.ranked_results
MAX_SCORES = DEFAULTS.ranked_scores


def classify(array: np.ndarray, tensor: TensorSpec, most: int, batched: bool) -> tuple[list[int], list[str]]:
    """Shape ``[batch, k]`` (``[k]`` where not batched), k = min(most, classes), and its elements in a row.

    A class is an element of the output's row, whatever its shape. Raises BadRequest beyond `MAX_VALUES` or
    `MAX_SCORES`.
    """
    rows = array.shape[0] if batched else 1
    classes = prod(array.shape[1:] if batched else array.shape)
    count = min(most, classes)
    if rows * count > MAX_VALUES:
        raise BadRequest(
            f"output '{tensor.name}': the {count} best of {rows} rows are {rows * count} classification results; "
            f"at most {MAX_VALUES} are given in one answer: ask for fewer, or take the scores"
        )
    if rows * classes > MAX_SCORES:
        raise BadRequest(
            f"output '{tensor.name}': class result not available for {rows * classes} elements; at most "
            f"{MAX_SCORES} are ranked for one answer: send fewer rows, or take the scores"
        )
    scores = array.reshape(rows, classes)
    if tensor.type.is_float:
        scores = scores.astype(np.float64)
    order = _best(scores, count)
    text = _texts(np.take_along_axis(scores, order, 1).ravel(), order.ravel(), tensor.labels)
    return [rows, count] if batched else [count], text


def _best(scores: np.ndarray, count: int) -> np.ndarray:
    """Indices of the ``count`` largest of each row, descending: int64 [rows, count]."""
    ranked = np.where(np.isnan(scores), -np.inf, scores) if scores.dtype.kind == "f" else scores
    best = [_best_of(row, count) for row in ranked] if count else []
    return np.array(best, np.int64).reshape(len(scores), count)


def _best_of(row: np.ndarray, count: int) -> np.ndarray:
    """Only the elements that reach the ``count``-th largest value are sorted."""
    least = np.partition(row, -count)[-count]
    near = np.flatnonzero(row >= least)
    # Descending with ties by index, for unsigned integers too: an ascending stable order of the mirrored candidates.
    return near[::-1][np.argsort(row[near[::-1]], kind="stable")[::-1]][:count]


def _texts(values: np.ndarray, indices: np.ndarray, labels: Sequence[str]) -> list[str]:
    form = "%f:%d" if values.dtype.kind == "f" else "%d:%d"
    pairs = [form % pair for pair in zip(values.tolist(), indices.tolist(), strict=True)]
    if not labels:
        return pairs
    names = [f":{labels[index]}" if index < len(labels) else "" for index in indices.tolist()]
    return [pair + name for pair, name in zip(pairs, names, strict=True)]


def bytes_tensor(texts: Sequence[str]) -> bytes:
    """Text as BYTES elements on the binary wire: a little-endian u32 length before each."""
    encoded = [text.encode() for text in texts]
    return b"".join([part for item in encoded for part in (len(item).to_bytes(4, "little"), item)])
