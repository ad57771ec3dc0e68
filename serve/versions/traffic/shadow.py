"""A share of the answered requests is put to another version too, and the answers are compared."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any

import numpy as np

from ...batching.interface import NO_TERMS, Answer, Submit, Terms
from .comparison import Comparison, Scale
from .loaded_version import Lane
from .shadow_comparator import Understudy
from .split import Spread


class Shadow:
    """``scale`` is that of the version on duty: its answers are the reference."""

    def __init__(self, lane: Lane, percent: float, scale: Scale, judge: Executor) -> None:
        self.lane = lane
        self.percent = percent
        self.comparison = Comparison(lane.spec, scale)
        self._batcher = lane.behind(lane.duty)
        self._understudy = Understudy(self._batcher, judge, self._compare)

    def _compare(self, answer: Answer, shadow: Answer) -> None:
        self.comparison.take(answer.outputs, shadow.outputs)

    def end(self) -> None:
        self.lane.forget(self._batcher)

    def behind(self, front: Submit) -> Submit:
        """``front``, with a share of its answers handed on."""
        return _Copying(front, self._understudy, Spread(self.percent / 100))

    @property
    def dropped(self) -> int:
        return self._understudy.dropped

    @property
    def failed(self) -> int:
        return self._understudy.failed

    def numbers(self) -> dict[str, Any]:
        """What was seen, as JSON."""
        return {
            "version": self.lane.number,
            "percent": self.percent,
            "compared": self._understudy.asked,
            "dropped": self._understudy.dropped,
            "failed": self._understudy.failed,
            "outputs": self.comparison.to_json(),
        }


class _Copying:
    def __init__(self, front: Submit, understudy: Understudy, spread: Spread) -> None:
        self._front, self._understudy, self._spread = front, understudy, spread

    def submit(
        self, arrays: Sequence[np.ndarray], rows: int, terms: Terms = NO_TERMS
    ) -> asyncio.Future[Answer]:
        future = self._front.submit(arrays, rows, terms)
        if self._spread.takes():
            future.add_done_callback(partial(self._understudy.hear, arrays, rows))
        return future
