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
Compare = Callable[[Answer, Answer], None]  # the caller's answer, the second version's


class ShadowComparator:
    """``background``: the second version's queue. ``compare`` runs on ``judge``, one request after another."""

    def __init__(self, background: Submit, judge: Executor, compare: Compare) -> None:
        self._background = background
        self._judge = judge
        self._compare = compare
        # Three counts with one writer each: the event loop's, the event loop's, the judge's.
        self._begun = 0
        self._given_up = 0
        self._judged_so_far = 0
        self._pending_bytes = 0
        self.asked = 0
        self.dropped = 0
        self.failed = 0

    @property
    def pending(self) -> int:
        return self._begun - self._given_up - self._judged_so_far

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
        self._pending_bytes += size
        future.add_done_callback(partial(self._came, answer, size))

    def _came(self, answer: Answer, size: int, future: asyncio.Future[Answer]) -> None:
        self._pending_bytes -= size
        if future.cancelled() or future.exception() is not None:
            self._given_up += 1
            self.failed += 1
            return
        try:
            self._judge.submit(self._judged, answer, future.result())
        except RuntimeError:  # the server is shutting down
            self._given_up += 1

    def _judged(self, answer: Answer, other: Answer) -> None:
        try:
            self._compare(answer, other)
            self.asked += 1
        except Exception:
            self.failed += 1
            logger.exception("two answers could not be compared; a mistake of ours, please report it")
        finally:
            self._judged_so_far += 1


class Copying:
    """Stands in front of ``front``: those of its answered requests for which ``takes`` says so are put to the second
    version of ``comparator`` too."""

    def __init__(self, front: Submit, comparator: ShadowComparator, takes: Callable[[], bool]) -> None:
        self._front, self._comparator, self._takes = front, comparator, takes

    def submit(
        self, arrays: Sequence[np.ndarray], rows: int, terms: Terms = NO_TERMS
    ) -> asyncio.Future[Answer]:
        future = self._front.submit(arrays, rows, terms)
        if self._takes():
            future.add_done_callback(partial(self._comparator.hear, arrays, rows))
        return future
