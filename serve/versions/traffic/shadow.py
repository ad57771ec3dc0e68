"""A share of the answered requests is answered by another version too, and the answers are compared."""

from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np

from ...batching.interface import Answer, Submit
from .comparison import AnswerComparison, Scale
from .loaded_version import LoadedVersion
from .shadow_comparator import Copying, ShadowComparator
from .split import Spread


class Shadow:
    """``scale`` is that of the active version: its answers are the reference."""

    def __init__(self, loaded: LoadedVersion, percent: float, scale: Scale, judge: Executor) -> None:
        self.loaded = loaded
        self.percent = percent
        self.comparison = AnswerComparison(loaded.spec, scale)
        self._batcher = loaded.behind(loaded.prepared)
        self.comparator = ShadowComparator(self._batcher, judge, self._compare)

    def _compare(self, _: Sequence[np.ndarray], answer: Answer, shadow: Answer) -> None:
        self.comparison.take(answer.outputs, shadow.outputs)

    def end(self) -> None:
        self.loaded.forget(self._batcher)

    def behind(self, front: Submit) -> Submit:
        """``front``, with a share of its answered requests copied to the shadow."""
        return Copying(front, self.comparator, Spread(self.percent / 100).takes)

    def numbers(self) -> dict[str, Any]:
        """The figures, as JSON."""
        return {
            "version": self.loaded.number,
            "percent": self.percent,
            "compared": self.comparator.asked,
            "dropped": self.comparator.dropped,
            "failed": self.comparator.failed,
            "outputs": self.comparison.to_json(),
        }
