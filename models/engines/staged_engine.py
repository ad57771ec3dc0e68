"""The part that the engines of torch and of ONNX Runtime share. Needs no torch: ONNX files run on a CPU without it."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np

from .engine import BRIEF_SECONDS, Engine, InBackground

if TYPE_CHECKING:
    from .staging import Staging

_LONG_SECONDS, _MOST_RUNS = 50 * BRIEF_SECONDS, 10  # to tell whether a batch is brief
_COPIED_UNDER_LOCK = 500  # elements: NPY_BEGIN_THREADS_THRESHOLDED in numpy's copies


class StagedEngine(Engine):
    """An engine whose batches are staged for a device other than a CPU."""

    _staging: "Staging | None" = None

    def warm_up(self, parts: Sequence[Sequence[np.ndarray]]) -> None:
        """Run a few times, on a device other than a CPU in every slot; on a CPU with one thread also find out whether
        that takes longer than to wake a thread."""
        if self._staging is not None:
            run_in_every_slot(self, parts)
            return
        self.run(parts)
        if self.device == "cpu" and self.setup.threads == 1:
            self.brief = is_brief(lambda: self.run(parts))

    def _staged(self, staging: "Staging", parts: Sequence[Sequence[np.ndarray]]) -> InBackground:
        staged = staging.launch(parts)
        self.assemble_ns = staging.assemble_ns
        return staged


def run_in_every_slot(engine: Engine, parts: Sequence[Sequence[np.ndarray]]) -> None:
    """Run the batch as often as the engine takes it ahead, all at once: each slot gets its memory."""
    with ExitStack() as under_way:  # each is waited for, also where one fails
        for _ in range(engine.in_flight):
            under_way.callback(engine.launch(parts).wait)


def is_brief(run: Callable[[], object]) -> bool:
    """True if one of a few runs takes less than `BRIEF_SECONDS`: other programs may make the others longer.

    A batch of which two runs in a row take `_LONG_SECONDS` is not run again.
    """
    was_long = False
    for _ in range(_MOST_RUNS):
        began_s = time.perf_counter()
        run()
        taken_s = time.perf_counter() - began_s
        if taken_s < BRIEF_SECONDS:
            return True
        if was_long and taken_s >= _LONG_SECONDS:
            return False
        was_long = taken_s >= _LONG_SECONDS
    return False


def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The parts joined along the first axis in new memory: a request's own bytes are never written to.

    numpy releases Python's lock once for each part of more than 500 elements, and waits for it again; under load
    that took longer than all of the copying. Bytes are joined without releasing the lock.
    """
    if len(parts) == 1:
        return parts[0].copy()
    first = parts[0]
    if first.size <= _COPIED_UNDER_LOCK:
        return np.concatenate(parts)
    memory = bytearray().join([np.ascontiguousarray(part).view(np.uint8) for part in parts])  # type: ignore[list-item]
    return np.frombuffer(memory, first.dtype).reshape(-1, *first.shape[1:])
