"""Live parity: a share of a half's live requests is answered by its FP32 original as well, and compared.

The gate's third rule for each request: max|C − R| ≤ max_error_u·u·S. One request over the limit may be an input that no
sample is like; after it every request is checked for a while. Several over the limit among the last ones are drift.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

from ....models.spec.spec import ModelSpec
from ...batching.interface import Answer, Submit
from .comparison import AnswerComparison, Scale
from .rules import TrialRules
from .shadow_comparator import Copying, ShadowComparator
from .split import Spread

OnDrift = Callable[[dict[str, Any]], None]


class Drift(Copying):
    """Stands in front of a half's batcher. ``on_drift`` is called once, with the numbers, on ``judge``."""

    def __init__(
        self, spec: ModelSpec, foreground: Submit, original: Submit, scale: Scale, rules: TrialRules, judge: Executor,
        on_drift: OnDrift,
    ) -> None:  # fmt: skip
        self.comparison = AnswerComparison(spec, scale)
        self._rules = rules
        self._spread = Spread(rules.parity_sample)
        super().__init__(foreground, ShadowComparator(original, judge, self._compare), self._suspects)
        self._recent: deque[bool] = deque(maxlen=rules.drift_of)
        self._suspicious = 0  # how many of the next requests are all checked
        self._lock = threading.Lock()
        self._on_drift: OnDrift | None = on_drift
        self.over = 0

    def _suspects(self) -> bool:
        """True if the next request is to be checked."""
        return self._suspicious > 0 or self._spread.takes()

    def _compare(self, half: Answer, original: Answer) -> None:
        worst = self.comparison.take(original.outputs, half.outputs)
        is_over = not worst <= 1.0
        with self._lock:
            self._recent.append(is_over)
            self._suspicious = self._rules.drift_of if is_over else max(self._suspicious - 1, 0)
            self.over += is_over
            sentence = self._on_drift if sum(self._recent) >= self._rules.drift_over else None
            if sentence is not None:
                self._on_drift = None
        if sentence is not None:
            sentence(self.numbers() | {"worst_of_limit": worst})

    @property
    def dropped(self) -> int:
        return self._comparator.dropped

    def numbers(self) -> dict[str, Any]:
        """The figures, as JSON."""
        with self._lock:
            recent = list(self._recent)
        return {
            "share": self._rules.parity_sample,
            "checked": self._comparator.asked,
            "dropped": self._comparator.dropped,
            "failed": self._comparator.failed,
            "over_limit": self.over,
            "recent_over": sum(recent),
            "recent": len(recent),
            "fell_back_at": f"{self._rules.drift_over} of the last {self._rules.drift_of}",
            "outputs": self.comparison.to_json(),
        }
