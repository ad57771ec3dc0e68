"""Decisions of the server itself about versions: made durable, logged, and written to the events.

The traffic split has been changed before; here the change is written to the store.
"""

import logging
import threading
from collections.abc import Iterable, Sequence

import numpy as np

from ....models.errors import Conflict, HalfevenError
from ..store_writer import Numbers, Role, StoreWriter
from .drift import as_samples
from .loaded_version import LoadedVersion

logger = logging.getLogger("halfeven.versions")
ALERTING = ("rolled_back", "canary_ended", "drift")  # docker/rules.yml has alerts for them
_LEVELS = {**dict.fromkeys((*ALERTING, "order_failed"), logging.WARNING), "not_ready": logging.ERROR}


class AutomaticDecisions:
    """Every method blocks for the disk and raises nothing: a full disk must not undo a decision that protects
    callers."""

    def __init__(self, writer: StoreWriter, device: str) -> None:
        self._writer = writer
        self._device = device
        self._lock = threading.Lock()
        self.counts: dict[tuple[str, str], int] = {}  # (model, kind) → how often

    def rolled_back(self, bad: LoadedVersion, good: LoadedVersion, why: str, numbers: Numbers) -> None:
        """Move the alias back to the version that serves again."""
        sentence = f"{bad} was rolled back to {good}: {why}"
        try:
            self._writer.put_back(bad.name, bad.number, good.number)
        except Conflict as error:
            sentence += f"; the store is not changed ({error})"
        except (HalfevenError, OSError) as error:
            sentence += f"; but the store still names {bad} ({error}): a restart would make it active again"
        self.record(bad.name, "rolled_back", sentence, {"from": bad.number, "to": good.number, **numbers})

    def canary_ended(self, bad: LoadedVersion, why: str, numbers: Numbers) -> None:
        sentence = self._ended("canary", bad, why)
        self.record(bad.name, "canary_ended", sentence, {"version": bad.number, **numbers})

    def shadow_ended(self, shadow: LoadedVersion, why: str) -> None:
        self.record(shadow.name, "shadow", self._ended("shadow", shadow, why))

    def _ended(self, role: Role, loaded: LoadedVersion, why: str) -> str:
        """End the order in the store. Gives the sentence that says so."""
        sentence = f"the {role} {loaded} was ended: {why}"
        try:
            self._writer.end_share(loaded.name, role, loaded.number)
        except (HalfevenError, OSError) as error:
            sentence += f"; but the order is still in the store ({error}): a restart would begin it again"
        return sentence

    def fell_back(self, loaded: LoadedVersion, reason: str, numbers: Numbers) -> None:
        """Note in the store that the half may not serve on this device before it is proven again."""
        sentence = f"{loaded} fell back from its half to its FP32 original: {reason}"
        try:
            self._writer.note_drift(loaded.name, loaded.number, self._device, reason)
        except (HalfevenError, OSError) as error:
            sentence += (
                f"; but that could not be noted in the store ({error}): a restart would try the half again"
            )
        self.record(loaded.name, "drift", sentence, {"version": loaded.number, **numbers})

    def keep_inputs(self, loaded: LoadedVersion, arrays: Sequence[np.ndarray], most: int) -> None:
        """Keep inputs on which the half drifted, ``most`` of a model in all. ``arrays``: as callers sent them."""
        try:
            for one in as_samples(loaded.version.spec(), arrays):
                self._writer.keep_input(loaded.name, one, most)
        except (HalfevenError, OSError) as error:
            logger.warning("%s: an input on which it drifted could not be kept: %s", loaded, error)

    def activated(self, loaded: LoadedVersion, before: LoadedVersion | None, last: Numbers | None) -> None:
        """A version is active: by an order, because the store moved, or at the start. ``last``: the numbers of the
        model's last such event, where nothing was active before: the same again is no event."""
        prepared = loaded.prepared
        numbers = {
            "version": loaded.number,
            "precision": prepared.precision,
            "form": prepared.engine.form,
            "device": prepared.engine.device,
        }
        sentence = f"{loaded} is active in {prepared.precision} ({prepared.reason})"
        if before is not None and before.number != loaded.number:
            sentence += f", in place of {before}"
        if last is None or {key: last.get(key) for key in numbers} != numbers:
            self.record(loaded.name, "activated", sentence, numbers)
        else:
            logger.info("%s", sentence, extra={"model": loaded.name})

    def retired(self, versions: Iterable[LoadedVersion]) -> None:
        for one in versions:
            self.record(one.name, "retired", f"{one} is not served any more", {"version": one.number})

    def not_ready(self, name: str, fault: str) -> None:
        """A model, or the version that the store names, could not be made ready."""
        self.record(name, "not_ready", fault)

    def forget(self, name: str) -> None:
        """The model was deleted: its counts are, too."""
        with self._lock:
            self.counts = {labels: count for labels, count in self.counts.items() if labels[0] != name}

    def record(self, name: str, kind: str, message: str, numbers: Numbers | None = None) -> None:
        """One event: counted, in the log, and in the store."""
        logger.log(_LEVELS.get(kind, logging.INFO), "%s", message, extra={"model": name, "event": kind})
        with self._lock:
            self.counts[name, kind] = self.counts.get((name, kind), 0) + 1
            try:
                self._writer.record(name, kind, message, numbers)
            except (HalfevenError, OSError, ValueError) as error:
                logger.error("the event could not be written (%s): %s", error, message)
