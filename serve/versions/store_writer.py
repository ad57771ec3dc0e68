"""Writes to the store what concerns versions in traffic: by whose order a version is active, the canary, the shadow,
drift and events. A store has one writer: the server, or one process for many replicas (`serve/ray/`).

Versions are named by model and number, so that each call can be sent to another process.
"""

import logging
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from ...exporters.inputs.drifted_inputs import keep_input
from ...models.errors import DamagedFile
from ...models.store.reserve import with_reserve
from ...models.store.store import Store
from . import orders
from .orders import TrafficOrder

logger = logging.getLogger("halfeven.versions")

TRIAL = "trial"  # by whose order the alias goes back
Role = Literal["canary", "shadow"]
Numbers = Mapping[str, Any]


class StoreWriter:
    """The writer of a store that this process has for itself; a subclass may write in another way.

    Every method blocks; what it wrote is durable when it returns. Raises UnknownName for a version that is not there.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.RLock()

    def promote(self, name: str, number: int) -> None:
        """Make the version the active one; an order for it as a canary or shadow ends. Raises Conflict for a refused
        version."""
        with self._lock:
            self._store.promote(self._store.version(name, number))
            self._forget(name, number)

    def promote_over(self, name: str, current: int | None, number: int, by: str) -> None:
        """Make the version active as `promote` does, ``by`` whose order is recorded, and only where ``current`` (None:
        nothing) is still active. It may be called again: a version that is active stays so. Raises Conflict where
        another one is."""
        with self._lock:
            if self._store.live_number(name) != number:
                self._store.promote_over(current, self._store.version(name, number), by)
            self._forget(name, number)

    def roll_back(self, name: str) -> int:
        """Make the newest live version before the active one active, and return its number. Raises Conflict where
        there is none."""
        with self._lock:
            number = self._store.rollback(name).number
            self._forget(name, number)
            return number

    def put_back(self, name: str, bad: int, good: int) -> None:
        """Make ``good`` the active one again where ``bad`` still is. Raises Conflict where it is not."""
        with_reserve(
            self._store.root,
            lambda: self._store.promote_over(bad, self._store.version(name, good), TRIAL),
        )

    def order(self, name: str, role: Role, number: int | None, percent: float) -> None:
        """Write the order for a canary or a shadow; no number ends it. Raises DamagedFile."""
        with self._lock:
            ordered: Mapping[str, Any] = {role: None if number is None else TrafficOrder(number, percent)}
            found = replace(orders.read_orders(self._store, name), **ordered)
            if number is None:  # ending a share is going back
                with_reserve(self._store.root, lambda: orders.write_orders(self._store, name, found))
            else:
                orders.write_orders(self._store, name, found)

    def end_share(self, name: str, role: Role, number: int) -> None:
        """End the canary or the shadow where it is this version. Raises DamagedFile."""
        with self._lock:
            found = orders.read_orders(self._store, name)
            order: TrafficOrder | None = getattr(found, role)
            if order is not None and order.version == number:
                none: Mapping[str, Any] = {role: None}
                ended = replace(found, **none)
                with_reserve(self._store.root, lambda: orders.write_orders(self._store, name, ended))

    def note_drift(self, name: str, number: int, device: str, reason: str) -> None:
        """The half of this version may not serve on this device before it is proven again."""
        orders.note_drift(self._store.version(name, number), device, reason)

    def keep_input(self, name: str, arrays: Mapping[str, np.ndarray], most: int) -> None:
        """Keep an input on which a half drifted (`exporters/inputs/drifted_inputs.py`)."""
        with self._lock:
            keep_input(self._store, name, arrays, most)

    def record(self, name: str, kind: str, message: str, numbers: Numbers | None = None) -> None:
        """Append an event."""
        with self._lock:
            orders.record(self._store, name, kind, message, numbers)

    def _forget(self, name: str, number: int) -> None:
        """Delete a canary or shadow order for the version: it is active now. Orders that cannot be read stop nothing:
        a change that is reported as failed is ordered again, and two rollbacks go back twice."""
        try:
            found = orders.read_orders(self._store, name)
        except DamagedFile as error:
            logger.error("an order for %s@%s may stay: %s", name, number, error)
            return
        kept: Mapping[str, Any] = {
            role: None if (order := getattr(found, role)) is None or order.version == number else order
            for role in ("canary", "shadow")
        }
        if (left := replace(found, **kept)) != found:
            with_reserve(self._store.root, lambda: orders.write_orders(self._store, name, left))
