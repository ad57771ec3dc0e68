"""Every batch size is run once before the version serves; sizes that the device has no memory for are left out."""

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch

from ....models.engines.engine import Engine
from ....models.engines.faults import give_back_cached_memory, out_of_memory
from ....models.engines.memory import free_cuda_bytes, rows_that_fit
from ....models.engines.wire_widening import as_sent
from ....models.errors import BadRequest
from ....models.order.lacking_memory import causes
from ....models.spec.buckets import buckets_of
from ....models.spec.spec import ModelSpec
from ...batching.ceiling import Ceiling
from ...batching.padding import Parts

logger = logging.getLogger("halfeven.batcher")
BatchOf = Callable[[int], Parts]  # that many rows of real samples (0: one sample of a model without a batch)
Call = Callable[[Callable[[], Any]], Any]  # runs something on the device's thread, between two batches


def warm(engine: Engine, spec: ModelSpec, batch_of: BatchOf, ceiling: Ceiling, call: Call) -> int:
    """Warm the engine up, smallest batch first, each in the model's datatypes and in those of the wire; gives the most
    rows that it may run (0: not batched).

    A batch that the device has no memory for lowers ``ceiling``, and the smaller ones serve. An error of the smallest
    batch is raised.
    """
    if not spec.batched:
        call(lambda: _warm_up(engine, spec, batch_of(0)))
        return 0
    sizes = buckets_of(spec, engine.device) or tuple(sorted({1, spec.max_batch_size}))
    size = row_elements(batch_of(sizes[0]))
    if engine.form != "onnx" and engine.device.startswith("cuda"):  # torch's allocator tells what was taken
        free = call(lambda: free_cuda_bytes(torch.device(engine.device)))
        fits = call(lambda: rows_that_fit(engine, batch_of, sizes, free))
        if fits < sizes[-1]:
            logger.warning(
                "'%s': %.3g GiB are free, enough for %d rows at once", spec.name, free / 2**30, fits
            )
            ceiling.lower(size, fits, keep=False)  # how much memory is free differs from start to start
    for rows in sizes:
        if rows > max(ceiling.rows(size), sizes[0]):
            break
        lacking = _memory_error(call, lambda rows=rows: _warm_up(engine, spec, batch_of(rows)))
        if lacking is None:
            continue
        call(give_back_cached_memory)
        alone = partial(engine.run, batch_of(rows))  # a batch, where there is no memory for one in every slot
        if engine.in_flight > 1 and _memory_error(call, alone) is None:
            continue
        if rows == sizes[0]:
            raise lacking
        call(give_back_cached_memory)
        logger.warning("'%s': there is no memory for %d rows at once", spec.name, rows)
        ceiling.lower(size, rows // 2)
        break
    return min(spec.max_batch_size, ceiling.rows(size) if ceiling.smallest else sys.maxsize)


def _warm_up(engine: Engine, spec: ModelSpec, parts: Parts) -> None:
    engine.warm_up(parts)
    sent = as_sent(spec, parts)
    if sent is not None:
        with suppress(BadRequest):  # clipped values may be no valid index; the batch has run all the same
            engine.warm_up(sent)


def _memory_error(call: Call, run: Callable[[], object]) -> Exception | None:
    """The error of a run that had too little memory. It keeps no frame of the run: they hold what was allocated, which
    would be missing for what is tried next."""
    try:
        call(run)
    except Exception as error:
        if not out_of_memory(error):
            raise
        for one in causes(error):
            one.__traceback__ = one.__context__ = None
        return error
    return None


def row_elements(parts: Sequence[Sequence[np.ndarray]]) -> int:
    """The elements of one row's inputs."""
    return sum(array.size // max(len(array), 1) for part in parts for array in part[:1])
