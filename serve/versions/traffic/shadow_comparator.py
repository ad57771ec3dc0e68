"""Puts an answered request to a second version when the device is idle, and compares the two answers.

The caller has its answer by then. A request that cannot be put soon is dropped and counted: comparing never slows
serving down.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial

import numpy as np

from ....models.errors import HalfevenError
from ...batching.interface import NO_TERMS, Answer, Submit, Terms

logger = logging.getLogger("halfeven.versions")
MOST_PENDING = 16  # requests
MOST_PENDING_BYTES = 64 * 2**20  # of their inputs
# A comparison is given the request's inputs, the caller's answer and the second version's.
Compare = Callable[[Sequence[np.ndarray], Answer, Answer], None]


class ShadowComparator:
    """``background``: the second version's queue. ``compare`` runs on ``judge``, one request after another."""

    def __init__(self, background: Submit, judge: Executor, compare: Compare) -> None:
        self._background = background
        self._judge = judge
        self._compare = compare
        # Three counts of requests, and of their bytes, have one writer each: the event loop, the event loop, the judge.
        self._begun = self._begun_bytes = 0
        self._given_up = self._given_up_bytes = 0
        self._judged_so_far = self._judged_bytes = 0
        self.asked = 0
        self.dropped = 0
        self.failed = 0

    @property
    def pending(self) -> int:
        return self._begun - self._given_up - self._judged_so_far

    @property
    def _pending_bytes(self) -> int:
        return self._begun_bytes - self._given_up_bytes - self._judged_bytes

    def hear(self, arrays: Sequence[np.ndarray], rows: int, answered: asyncio.Future[Answer]) -> None:
        """Put the request if it was answered: a callback of the request's future, on the event loop."""
        if not answered.cancelled() and answered.exception() is None:
            # The request is put in the next iteration of the loop: the caller, which is woken after this callback,
            # comes first.
            asyncio.get_running_loop().call_soon(self.ask, arrays, rows, answered.result())

    def ask(self, arrays: Sequence[np.ndarray], rows: int, answer: Answer) -> None:
        """Put the request to the second version. On the event loop."""
        size = sum(array.nbytes for array in arrays)
        if self.pending >= MOST_PENDING or self._pending_bytes + size > MOST_PENDING_BYTES:
            self.dropped += 1
            return
        try:
            future = self._background.submit(arrays, rows)
        except HalfevenError:  # its queue is full, or it is being unloaded
            self.dropped += 1
            return
        self._begun += 1
        self._begun_bytes += size
        future.add_done_callback(partial(self._came, arrays, size, answer))

    def _came(
        self, arrays: Sequence[np.ndarray], size: int, answer: Answer, future: asyncio.Future[Answer]
    ) -> None:
        if future.cancelled() or future.exception() is not None:
            self._give_up(size)
            self.failed += 1
            return
        try:
            self._judge.submit(self._judged, arrays, size, answer, future.result())
        except RuntimeError:  # the server is shutting down
            self._give_up(size)

    def _give_up(self, size: int) -> None:
        self._given_up += 1
        self._given_up_bytes += size

    def _judged(self, arrays: Sequence[np.ndarray], size: int, answer: Answer, other: Answer) -> None:
        try:
            self._compare(arrays, answer, other)
            self.asked += 1
        except Exception:
            self.failed += 1
            logger.exception("two answers could not be compared; a mistake of ours, please report it")
        finally:
            self._judged_so_far += 1
            self._judged_bytes += size


class Copying:
    """Stands in front of ``front``: those of its answered requests for which ``takes`` says so are put to the second
    version of ``comparator`` too."""

    def __init__(self, front: Submit, comparator: ShadowComparator, takes: Callable[[], bool]) -> None:
        self._front, self.comparator, self._takes = front, comparator, takes

    def submit(
        self, arrays: Sequence[np.ndarray], rows: int, terms: Terms = NO_TERMS
    ) -> asyncio.Future[Answer]:
        future = self._front.submit(arrays, rows, terms)
        if self._takes():
            future.add_done_callback(partial(self.comparator.hear, arrays, rows))
        return future
