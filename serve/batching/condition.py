"""What is known about the active version for longer than one batch: its engines' limits, and whether it works.

An engine that fails on everything would cost twice as many runs as a batch has requests, for every batch and for ever.
So after a few batches of which nobody was answered, a failed one is divided only if the engine still answers a
request that it answered before.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...models.spec import ModelSpec
from .ceiling import Ceiling
from .engine_runner import EngineRunner, Fault, Item, Run
from .interface import PreparedVersion
from .rescue import Mended, Rescue, Timed

_NOTHING: Mapping[int, Mended] = {}
_SUSPICIOUS = 3  # batches in a row of which nobody was answered
_PATIENCE_NS = (
    10_000_000_000  # to find the guilty of one batch, or four times the batch's own time if that is more
)


@dataclass(slots=True, eq=False)
class _Probe:
    """One row that was answered before."""

    arrays: Sequence[np.ndarray]
    rows: int = 1
    alone: bool = False


class Condition:
    """One per active version, on the device thread. ``lost`` is called once with the reason if its device is gone."""

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
            Rescue(EngineRunner(spec, prepared.whole, clock, Ceiling()))
            if prepared.whole is not None
            else None
        )
        self.lost: str | None = None
        self._notify_lost = lost
        self._unanswered = 0
        self._known = _Probe(prepared.probe) if prepared.probe is not None else None
        self._one_size = all(dim.fixed for tensor in spec.inputs for dim in tensor.shape[1:])
        self.note_ceiling()

    def worth_dividing(self) -> bool:
        """Whether some of a failed batch's requests may succeed without the others.

        As long as nothing is known to work they may: a poisonous request never fails the others in its batch.
        """
        if self._unanswered < _SUSPICIOUS or self._known is None:
            return True
        return not isinstance(self.runner.run([self._known]).result, Fault)

    def mended(self, items: Sequence[Timed], outputs: list[np.ndarray], took_ns: int) -> Mapping[int, Mended]:
        """What is not finite in a half's ``outputs`` is answered by the whole, in place, where there is one."""
        if self._rescue is None or self._rescue.all_well(outputs):
            return _NOTHING
        return self._rescue.mend(items, outputs, self.runner.clock() + self.patience_ns(took_ns))

    def of_the_whole(self, item: Timed) -> Run[Timed] | None:
        """The whole's run of an item that a half refused; None where no whole stands by."""
        return None if self._rescue is None else self._rescue.instead(item)

    def patience_ns(self, took_ns: int) -> int:
        """How long the guilty of a batch that took so long may be looked for."""
        return max(_PATIENCE_NS, 4 * took_ns)

    def answered(self, item: Item) -> None:
        """Somebody of a batch was answered: this is one of them."""
        self._unanswered = 0
        if self._known is None:
            batched = self.runner.spec.batched
            self._known = _Probe([(array[:1] if batched else array).copy() for array in item.arrays])

    def nobody_answered(self) -> None:
        self._unanswered += 1

    def device_lost(self, reason: str) -> str:
        """From now on nothing is run; the words that everybody gets."""
        if self.lost is None:
            self.lost = f"device {self.prepared.engine.device} is lost: {reason}; restart the server"
            self._notify_lost(self.lost)
        return self.lost

    def note_ceiling(self) -> None:
        """Let batches of what has one size be formed no larger than the device has memory for."""
        most = self.ceiling.smallest
        if most and self._one_size:
            self.prepared.useful_rows = min(self.prepared.useful_rows or most, most)
