"""Who serves which name: follows the store, and swaps versions with requests in flight.

One thread looks at the aliases twice a second. A version that was put on duty in the store is made ready
beside the one that serves, then swapped in between two batches; the old one is closed when no batch uses it.
"""

import asyncio
import gc
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from ..models.errors import HalfevenError, NotReady, UnknownName
from ..models.spec import ModelSpec
from ..models.store import Store, Version
from .batching.batcher import Batcher
from .duty import NO_TERMS, Answer, OnDuty, Statistics, Terms
from .readying import Place, make_ready

logger = logging.getLogger("halfeven.roster")
LOOK_EVERY_S = 0.5


@dataclass(slots=True, eq=False)
class ServedModel:
    """One name with its batcher; what is on duty changes under it."""

    name: str
    batcher: Batcher

    def submit(
        self, arrays: Sequence[np.ndarray], rows: int, terms: Terms = NO_TERMS
    ) -> asyncio.Future[Answer]:
        """Queue one checked request with the version that is to answer it."""
        return self.batcher.submit(arrays, rows, terms)

    @property
    def spec(self) -> ModelSpec:
        return self.batcher.spec

    @property
    def duty(self) -> OnDuty:
        return self.batcher.duty

    def statistics(self) -> Statistics:
        return self.batcher.statistics()


class Roster:
    """Start it once; `find` is what every request asks (one dictionary look-up)."""

    def __init__(self, store: Store, place: Place) -> None:
        self.store = store
        self._place = place
        self._served: dict[str, ServedModel] = {}
        self._seen: dict[str, tuple[int | None, int]] = {}
        self._faults: dict[str, str] = {}
        self._stopping = threading.Event()
        self._first_look: Future[None] = Future()
        self._thread = threading.Thread(target=self._follow, name="halfeven-roster", daemon=True)

    def start(self) -> None:
        """Start the device and follow the store; versions become ready one after another."""
        self._place.thread.start()
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> None:
        """Until everything that was in the store at the start is on duty or has its fault noted."""
        self._first_look.result(timeout_s)

    async def stop(self, timeout_s: float) -> None:
        """Refuse new work, finish what waits, stop the device, close the engines."""
        self._stopping.set()
        for served in self._served.values():
            try:
                await asyncio.wait_for(served.batcher.drain(), timeout_s)
            except TimeoutError:
                logger.error("'%s' did not finish what waits within %g s", served.name, timeout_s)
        await asyncio.to_thread(self._thread.join, timeout_s)
        for served in self._served.values():
            self._place.thread.call(served.duty.engine.close)
        await asyncio.to_thread(self._place.thread.stop, timeout_s)

    def find(self, name: str, version: str | None = None) -> ServedModel:
        served = self._served.get(name)
        if served is None:
            raise self._absent(name)
        if version is not None and version != served.duty.version:
            raise UnknownName(
                f"Request for unknown model: '{name}' version {version} is not found: version "
                f"{served.duty.version} is on duty"
            )
        return served

    def all(self) -> list[ServedModel]:
        return [self._served[name] for name in sorted(self._served)]

    @property
    def ready(self) -> bool:
        return not self.not_ready_reasons()

    def not_ready_reasons(self) -> list[str]:
        """Why not everything in the store is served; empty where it is."""
        if self._stopping.is_set():
            return ["the server is shutting down"]
        if not self._place.thread.alive:
            return [f"the thread of device {self._place.device} has ended"]
        if not self._first_look.done():
            return ["models are being made ready"]
        return [fault for name, fault in sorted(self._faults.items()) if name not in self._served]

    def on_duty(self, name: str) -> str | None:
        """The version on duty under a name, if any."""
        served = self._served.get(name)
        return served.duty.version if served is not None else None

    def fault(self, name: str, number: int | None = None) -> str | None:
        """Why the newest word of the store about a name (this version, where given) was not followed."""
        if number is not None and self._seen.get(name, (None, 0))[0] != number:
            return None
        return self._faults.get(name)

    def look(self) -> None:
        """Follow the store once: whatever changed since the last look is made ready and swapped in."""
        try:
            names = self.store.names()
        except OSError:
            logger.exception("the store cannot be listed; looking again")
            return
        for name in names:
            if self._stopping.is_set():
                return
            try:
                self._follow_one(name)
            except HalfevenError as error:
                self._note(name, str(error))
            except Exception as error:
                logger.exception("'%s' could not be made ready", name)
                self._note(name, f"{name}: {type(error).__name__}: {error}")

    def _follow(self) -> None:
        try:
            self.look()
            _freeze()
        finally:
            self._first_look.set_result(None)
        while not self._stopping.wait(LOOK_EVERY_S):
            self.look()

    def _follow_one(self, name: str) -> None:
        numbers = self.store.numbers(name)
        state = (self.store.live_number(name), numbers[-1] if numbers else 0)
        if not numbers or self._seen.get(name) == state:
            return
        self._seen[name] = state
        self._faults.pop(name, None)
        version = self._wanted(name, state[0])
        served = self._served.get(name)
        if version is None or (served is not None and served.duty.version == str(version.number)):
            return
        logger.info("making %s ready", version)
        relieves = served.duty if served is not None else None
        self._put_on_duty(version, make_ready(version, self._place, relieves))

    def _wanted(self, name: str, live: int | None) -> Version | None:
        """The live version; while there is none, the newest whose half was refused: its FP32 whole serves.

        Weights that a gate refused never serve, in no precision.
        """
        if live is not None:
            return self.store.version(name, live)
        if name in self._served:
            return None
        for number in reversed(self.store.numbers(name)):
            version = self.store.version(name, number)
            gate = version.manifest.get("gate")
            if gate is None or gate["passed"]:
                return version
        return None

    def _put_on_duty(self, version: Version, duty: OnDuty) -> None:
        spec = version.spec()
        served = self._served.get(version.name)
        if served is None:
            batcher = Batcher(spec, self._place.thread, duty)
            self._served = {**self._served, version.name: ServedModel(version.name, batcher)}
        else:
            batcher = served.batcher
            old = self._place.call(lambda: batcher.swap(duty, spec))
            self._place.call(old.engine.close)
            _freeze()
        logger.info("%s is on duty in %s (%s)", version, duty.precision, duty.reason)

    def _note(self, name: str, fault: str) -> None:
        logger.error("%s", fault)
        self._faults[name] = fault

    def _absent(self, name: str) -> HalfevenError:
        if name in self._faults:
            return NotReady(f"model '{name}' is not ready: {self._faults[name]}")
        if (name in self._seen or not self._first_look.done()) and name in self.store.names():
            return NotReady(f"model '{name}' is being made ready; ask again in a moment")
        return UnknownName(f"Request for unknown model: '{name}' is not found")


def _freeze() -> None:
    """Take what is loaded out of the collector's sight: walking torch's heap costs 80 ms of somebody's p99."""
    gc.unfreeze()  # what was closed meanwhile is a cycle, and frozen it would never be found
    gc.collect()
    gc.freeze()
