"""Live parity: a share of a half's live requests is answered by its FP32 original as well, and compared.

The gate's third rule for each request: max|C − R| ≤ max_error_u·u·S. One request over the limit may be an input that no
sample is like; after it every request is checked for a while. Several over the limit among the last ones are drift.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np

from ....models.engines.wire_widening import Widening
from ....models.spec.spec import ModelSpec
from ...batching.interface import Answer, Submit
from .comparison import AnswerComparison, Scale
from .rules import TrialRules
from .shadow_comparator import Copying, ShadowComparator
from .split import Spread

OnDrift = Callable[[dict[str, Any]], None]
Keep = Callable[[Sequence[np.ndarray]], None]  # takes inputs on which a half erred by more than its limit
_KEPT_OF_A_REQUEST = 4  # rows


class Drift(Copying):
    """Stands in front of a half's batcher. ``on_drift`` is called once, with the numbers, on ``judge``; ``keep`` with
    the worst rows of each request over the limit."""

    def __init__(
        self, spec: ModelSpec, foreground: Submit, original: Submit, scale: Scale, rules: TrialRules, judge: Executor,
        on_drift: OnDrift, keep: Keep | None = None,
    ) -> None:  # fmt: skip
        self.comparison = AnswerComparison(spec, scale)
        self._rules = rules
        self._spread = Spread(rules.parity_sample)
        super().__init__(foreground, ShadowComparator(original, judge, self._compare), self._suspects)
        self._recent: deque[bool] = deque(maxlen=rules.drift_of)
        self._suspicious = 0  # how many of the next requests are all checked
        self._lock = threading.Lock()
        self._on_drift: OnDrift | None = on_drift
        self._keep, self._is_batched = keep, spec.batched
        self.over = 0

    def _suspects(self) -> bool:
        """True if the next request is to be checked."""
        return self._suspicious > 0 or self._spread.takes()

    def _compare(self, arrays: Sequence[np.ndarray], half: Answer, original: Answer) -> None:
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
        if is_over and self._keep is not None:  # last: writing must not delay the original
            rows = worst_rows(half.outputs, original.outputs) if self._is_batched else slice(None)
            self._keep([array[rows] for array in arrays])

    def numbers(self) -> dict[str, Any]:
        """The figures, as JSON."""
        with self._lock:
            recent = list(self._recent)
        return {
            "share": self._rules.parity_sample,
            "checked": self.comparator.asked,
            "dropped": self.comparator.dropped,
            "failed": self.comparator.failed,
            "over_limit": self.over,
            "recent_over": sum(recent),
            "recent": len(recent),
            "fell_back_at": f"{self._rules.drift_over} of the last {self._rules.drift_of}",
            "outputs": self.comparison.to_json(),
        }


def worst_rows(half: Sequence[np.ndarray], original: Sequence[np.ndarray]) -> np.ndarray:
    """The indices of the rows whose answers differ most, `_KEPT_OF_A_REQUEST` at most. The differences of each output
    are divided by its largest finite one."""
    worst = np.zeros(len(original[0]))
    for one, other in zip(half, original, strict=True):
        distance = _distances(one, other).reshape(len(worst), -1)
        finite = distance[np.isfinite(distance)].max(initial=0.0)
        worst = np.maximum(worst, distance.max(axis=1, initial=0.0) / (finite or 1.0))
    return np.sort(np.argsort(-worst, kind="stable")[:_KEPT_OF_A_REQUEST])


def _distances(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """|one − other|: infinite where one of them alone is no number, and everywhere where their shapes differ."""
    if one.shape != other.shape:
        return np.full((*other.shape[:1], 1), np.inf)
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.abs(one.astype(np.float64) - other)
    equal = (one == other) | ((one != one) & (other != other))  # a NaN differs from itself
    return np.where(equal, 0.0, np.nan_to_num(distance, nan=np.inf))


def as_samples(spec: ModelSpec, arrays: Sequence[np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
    """Each input of a request, laid out as a sample in the model's datatypes. ``spec``: the version's own, whose wire
    datatypes the ``arrays`` have, in the order of its inputs."""
    wide = {
        tensor.name: array if tensor.wire is None else Widening.of(tensor, spec.batched).numpy(array)
        for tensor, array in zip(spec.inputs, arrays, strict=True)
    }
    for row in range(len(arrays[0]) if spec.batched else 1):
        yield {name: array[row : row + 1] if spec.batched else array[None] for name, array in wide.items()}
