"""The number of rows that fit into a device's memory, found by running small batches and measuring their memory."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from .engine import Engine
from .faults import give_back_cached_memory, out_of_memory

Parts = Sequence[Sequence[np.ndarray]]
_KEPT_FREE = 0.1  # of the free memory: fragments, cuDNN's workspaces, the next batch's inputs
_LARGE_ENOUGH = 8  # rows: fewer would measure what a run takes in any case


def rows_that_fit(
    engine: Engine,
    batch: Callable[[int], Parts],
    buckets: Sequence[int],
    free_bytes: int,
    peak_bytes: Callable[[Engine, Parts], int] | None = None,
) -> int:
    """The largest bucket whose batch fits into ``free_bytes`` less a reserve; the smallest if even that may not fit.

    Two batches are run, the smallest and one of about eight rows, or of as many as there is memory for; memory is taken
    to be linear in the rows.
    ``buckets`` are ascending; ``peak_bytes`` measures it (by default with `cuda_peak_bytes`).
    """
    measure = peak_bytes or cuda_peak_bytes
    low = buckets[0]
    enough = next((rows for rows in buckets[1:] if rows >= _LARGE_ENOUGH), buckets[-1])
    at_low = _measured(measure, engine, batch(low))
    if at_low is None:
        return low
    high, at_high = low, at_low
    for rows in [rows for rows in reversed(buckets) if low < rows <= enough]:
        if (taken := _measured(measure, engine, batch(rows))) is not None:
            high, at_high = rows, taken
            break
    if high == low and low < enough:
        return low
    per_row = max(at_high - at_low, 0) / max(high - low, 1)
    room = free_bytes * (1 - _KEPT_FREE) - at_low
    return max([rows for rows in buckets if per_row * (rows - low) <= room], default=low)


def _measured(measure: Callable[[Engine, Parts], int], engine: Engine, parts: Parts) -> int | None:
    """None where the device ran out of memory."""
    try:
        return measure(engine, parts)
    except Exception as error:
        if not out_of_memory(error):
            raise
    # The memory is given back after the `except` block: inside of it the error still keeps what the run allocated.
    give_back_cached_memory()
    return None


def cuda_peak_bytes(engine: Engine, parts: Parts) -> int:
    """Bytes that batches take of the CUDA device at their peak, one in every slot, beyond those taken before."""
    device = torch.device(engine.device)
    engine.warm_up(parts)  # the first run of a shape also allocates what stays
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    engine.warm_up(parts)
    return torch.cuda.max_memory_allocated(device) - before


def free_cuda_bytes(device: torch.device) -> int:
    """Bytes that an engine may still take: free on the device, or kept unused by torch's allocator."""
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held
