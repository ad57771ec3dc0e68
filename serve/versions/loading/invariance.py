"""An answer may depend on the size of its batch: how much is measured on the device that serves, and published.

Libraries choose other kernels for other sizes, which sum in another order. The difference is rounding, and most
callers never see it; a caller that must not see it may ask for ``deterministic`` answers.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np

from ....exporters.gate.parity import UNIT_ROUNDOFF
from ....models.spec.spec import ModelSpec
from ...batching.padding import Parts, rows_between

BUDGET_S = 0.3
_SAMPLES = 4  # whose answers are compared
_POWER = {2.0**-11: "2^-11", 2.0**-8: "2^-8", 2.0**-24: "2^-24"}


def batch_invariance(
    spec: ModelSpec,
    run: Callable[[Parts], Sequence[np.ndarray]],
    batch_of: Callable[[int], Parts],
    sizes: Sequence[int],
    precision: str,
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.perf_counter,
) -> str:
    """The largest difference between a sample's answer alone and in a batch, in words for people.

    It is given in u·S, the parity gate's unit: u is the precision's unit roundoff, S the largest magnitude of that
    output among the samples. Smaller ``sizes`` come first; sizes that the budget does not reach are left out. Empty
    for a model that is not batched or gives no floating outputs.
    """
    floats = [index for index, output in enumerate(spec.outputs) if output.type.is_float]
    sizes = sorted(size for size in sizes if size > 1)
    if not spec.batched or not floats or not sizes:
        return ""
    unit = UNIT_ROUNDOFF.get(precision, 2.0**-24)
    began = clock()
    samples = batch_of(min(_SAMPLES, sizes[-1]))
    alone: list[list[np.ndarray]] = []
    for row in range(len(samples[0][0])):
        if not alone or 4 * (clock() - began) < budget_s:
            alone.append(_wide(run(rows_between(samples, row, row + 1)), floats))
    count = len(alone)
    worst, measured = 0.0, 1
    for size in sizes:
        spent = clock() - began
        if measured > 1 and spent + spent * size / (measured + count) > budget_s:
            break
        together = _wide(run(batch_of(size)), floats)
        worst = max([worst, *(_error(alone, together, row) for row in range(min(count, size)))])
        measured = size
    found = "the same bits" if worst == 0.0 else f"within {worst / unit:.3g} u·S"
    return f"{found} alone and in batches of up to {measured} (u = {_POWER[unit]})"


def _wide(outputs: Sequence[np.ndarray], floats: Sequence[int]) -> list[np.ndarray]:
    return [outputs[index].astype(np.float64) for index in floats]


def _error(alone: Sequence[list[np.ndarray]], together: list[np.ndarray], row: int) -> float:
    """The largest difference of one sample's outputs, each divided by its S; infinite where only one is finite."""
    errors = [0.0]
    for index, output in enumerate(together):
        mine, theirs = alone[row][index][0], output[row]
        finite = np.isfinite(mine)
        if not np.array_equal(finite, np.isfinite(theirs)):
            return np.inf
        largest = max(np.abs(one[index][np.isfinite(one[index])]).max(initial=0.0) for one in alone)
        difference = np.abs(mine - theirs, where=finite, out=np.zeros_like(mine)).max(initial=0.0)
        errors.append(float(difference / largest) if largest else float(difference > 0) * np.inf)
    return max(errors)
