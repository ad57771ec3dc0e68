"""The state of the active version that lasts longer than one batch: its engines' limits, and whether it works.

To divide a failed batch takes up to twice as many runs as it has requests. For an engine that fails on everything that
would be so for every batch. So after a few batches in which no request was answered, a failed batch is divided only
if the engine still answers a request that it answered before.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...models.spec.spec import ModelSpec
from .ceiling import Ceiling
from .engine_runner import EngineRunner, Fault, Item, Run
from .interface import PreparedVersion
from .rescue import Mended, Rescue, TimedItem

_NOTHING: Mapping[int, Mended] = {}
_SUSPICIOUS = 3  # batches in a row in which no request was answered
# The time to find the failing requests of a batch; four times the batch's own time if that is more.
_PATIENCE_NS = 10_000_000_000


@dataclass(slots=True, eq=False)
class Probe:
    """Inputs that no caller waits for: one row that was answered before, or those of a check."""

    arrays: Sequence[np.ndarray]
    rows: int = 1
    alone: bool = False


class Condition:
    """One per active version, used on the device thread. ``lost`` is called once, with the reason, where the device is
    gone."""

    def __init__(
        self,
        spec: ModelSpec,
        prepared: PreparedVersion,
        clock: Callable[[], int],
        lost: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.prepared = prepared
        self.ceiling = prepared.ceiling if prepared.ceiling is not None else Ceiling()
        self.runner = EngineRunner(spec, prepared.engine, clock, self.ceiling)
        self._rescue = (
            Rescue(EngineRunner(spec, prepared.original, clock, Ceiling()))
            if prepared.original is not None
            else None
        )
        self.lost: str | None = None
        self._notify_lost = lost
        self._unanswered = 0
        self._known = Probe(prepared.probe) if prepared.probe is not None else None
        self._one_size = all(dim.fixed for tensor in spec.inputs for dim in tensor.shape[1:])
        self.note_ceiling()

    def worth_dividing(self) -> bool:
        """True if some of a failed batch's requests may succeed without the others.

        As long as no request is known to work, they may: one request must not make the others of its batch fail.
        """
        if self._unanswered < _SUSPICIOUS or self._known is None:
            return True
        return not isinstance(self.runner.run([self._known]).result, Fault)

    def mended(
        self, items: Sequence[TimedItem], outputs: list[np.ndarray], took_ns: int
    ) -> Mapping[int, Mended]:
        """Rows of a half's ``outputs`` that are not finite are replaced, in place, by the original's, where there is
        one."""
        if self._rescue is None or self._rescue.all_well(outputs):
            return _NOTHING
        return self._rescue.mend(items, outputs, self.runner.clock() + self.patience_ns(took_ns))

    def of_the_original(self, item: TimedItem) -> Run[TimedItem] | None:
        """The original's run of an item that a half refused; None where no original is loaded."""
        return None if self._rescue is None else self._rescue.instead(item)

    def patience_ns(self, took_ns: int) -> int:
        """Nanoseconds for the search for the failing requests of a batch that took ``took_ns``."""
        return max(_PATIENCE_NS, 4 * took_ns)

    def answered(self, item: Item) -> None:
        """A batch was answered; ``item`` is one of its requests."""
        self._unanswered = 0
        if self._known is None:
            batched = self.runner.spec.batched
            self._known = Probe([(array[:1] if batched else array).copy() for array in item.arrays])

    def nobody_answered(self) -> None:
        self._unanswered += 1

    def device_lost(self, reason: str) -> str:
        """From now on nothing is run. Gives the message that all requests get."""
        if self.lost is None:
            self.lost = f"device {self.prepared.engine.device} is lost: {reason}; restart the server"
            self._notify_lost(self.lost)
        return self.lost

    def note_ceiling(self) -> None:
        """Form no larger batches than the device has memory for, where all rows have one size."""
        most = self.ceiling.smallest
        if most and self._one_size:
            self.prepared.useful_rows = min(self.prepared.useful_rows or most, most)
