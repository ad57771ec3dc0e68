"""A replica follows the store while it serves: versions, the alias, the canary, the shadow, and halves that drifted
on another replica."""

import logging
import threading
from collections.abc import Callable

from ...models.errors import HalfevenError, UnknownName
from ..http.limits.repeated_warnings import RepeatedWarning
from .orders import TrafficOrder, TrafficOrders, drifted, read_orders
from .roster import Roster
from .store_copy import StoreCopy
from .traffic.loaded_version import LoadedVersion
from .traffic.served import ServedModel

logger = logging.getLogger("halfeven.versions")
LOOK_EVERY_S = 0.5


class Following:
    """Follows the store on a thread of its own, and the keys on another one: a revoked key waits for no version that is
    copied or made ready. The roster follows the alias in the copy, as in every server."""

    def __init__(self, copy: StoreCopy, roster: Roster) -> None:
        self._copy, self._roster = copy, roster
        self._carried_out: dict[str, TrafficOrders] = {}
        self._stopping = threading.Event()
        self._away = RepeatedWarning(logger, "the store is not followed")
        self._threads = [
            threading.Thread(target=self._again_and_again, args=(look,), name=f"halfeven-{name}", daemon=True)
            for name, look in (("following", self.look), ("following-keys", self.look_at_keys))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def look_at_keys(self) -> None:
        """Follow the keys once. Raises nothing."""
        try:
            self._copy.follow_keys()
        except Exception as error:  # of whatever kind: a thread that ends would follow nothing any more
            self._away.count(str(error))

    def look(self) -> None:
        """Follow once. Raises nothing: what is loaded is served on."""
        try:
            self._copy.follow()
        except Exception as error:
            self._away.count(str(error))
        for served in self._roster.all():
            try:
                with self._roster.working(served.name):
                    self._follow_orders(served)
                    self._follow_drift(served)
            except Exception:
                logger.exception("the orders for '%s' cannot be followed", served.name)

    def _again_and_again(self, look: Callable[[], None]) -> None:
        while not self._stopping.wait(LOOK_EVERY_S):
            look()

    def _follow_orders(self, served: ServedModel) -> None:
        """Carry out what was ordered since the last look. A canary that this replica ended itself stays ended while
        the order is still in the store."""
        ordered = read_orders(self._roster.store, served.name)
        before = self._carried_out.get(served.name)
        if ordered == before:
            return
        self._carried_out[served.name] = ordered
        now, known = served.traffic, before or TrafficOrders()
        if ordered.canary != known.canary and not _stands(ordered.canary, now.canary, now.canary_percent):
            served.set_canary(*self._loaded(served, ordered.canary))
        if ordered.shadow != known.shadow and not _stands(ordered.shadow, now.shadow, now.shadow_percent):
            served.set_shadow(*self._loaded(served, ordered.shadow))
        self._roster.tidy()

    def _loaded(self, served: ServedModel, order: TrafficOrder | None) -> tuple[LoadedVersion | None, float]:
        if order is None or order.version == served.traffic.stable.number:
            return None, 0.0
        try:
            version = self._roster.store.version(served.name, order.version)
        except UnknownName:
            self._carried_out.pop(served.name, None)  # it is not copied yet
            return None, 0.0
        try:
            return self._roster.loaded_version_for(version), order.percent
        except HalfevenError as error:
            if self._stopping.is_set():  # the next start loads it
                return None, 0.0
            sentence = f"{version} was ordered as a canary or shadow and could not be loaded: {error}"
            self._roster.decisions.record(served.name, "order_failed", sentence)
            return None, 0.0

    def _follow_drift(self, served: ServedModel) -> None:
        """The original takes the place of a half that another replica found drifting on a device of this kind."""
        for loaded in served.loaded_versions():
            if loaded.prepared.precision != "fp32":
                why = drifted(loaded.version, str(self._roster.place.device))
                if why is not None and loaded.fall_back(why):
                    logger.warning("%s fell back to its FP32 original: %s", loaded, why)


def _stands(order: TrafficOrder | None, loaded: LoadedVersion | None, percent: float) -> bool:
    if order is None or loaded is None:
        return order is None and loaded is None
    return (order.version, order.percent) == (loaded.number, percent)
