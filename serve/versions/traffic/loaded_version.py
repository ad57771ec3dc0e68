"""One loaded version with a queue of its own: requests that wait in it are never answered by another version."""

import asyncio
import logging
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np

from ....models.engines.engine import Engine
from ....models.errors import NotReady
from ....models.spec.spec import ModelSpec
from ....models.store.store import Version
from ...batching.batcher import Batcher
from ...batching.counters import Counters
from ...batching.interface import NO_TERMS, Answer, PreparedVersion, Submit, Terms
from ...batching.place import Place
from ..loading.cpu_choice import batch_seconds
from ..loading.ready import ORIGINALS
from ..loading.release import give_back
from ..loading.tuned import way_of
from .comparison import Scale
from .drift import Drift, Keep, OnDrift
from .rules import TrialRules

logger = logging.getLogger("halfeven.versions")
DRAIN_SECONDS = 60.0


class LoadedVersion:
    """``drift``: the live parity of a half whose original is loaded too, else None. ``label``: as in `ServedModel`.
    ``fell_back``: its half drifted, and does not serve again. ``confirmed``: what serves was found best by measuring it
    again (`choices/`)."""

    def __init__(self, version: Version, spec: ModelSpec, place: Place, prepared: PreparedVersion) -> None:
        self.version = version
        self.spec = spec
        self.batcher = Batcher(spec, place.thread, prepared)
        self.drift: Drift | None = None
        self.label = "stable"
        self.fell_back = False
        self.confirmed = False
        self._place = place
        self._behind: list[Batcher] = []
        self._checking: Batcher | None = None  # of these the one with the original, for `drift`
        self._front: Submit = self.batcher
        self._lent_by: PreparedVersion | None = None  # serves again when what was lent is taken back
        self._ending = threading.RLock()  # held while engines change or are closed
        self._closed = False

    def __str__(self) -> str:
        return str(self.version)

    @property
    def number(self) -> int:
        return self.version.number

    @property
    def name(self) -> str:
        return self.version.name

    @property
    def prepared(self) -> PreparedVersion:
        return self.batcher.prepared

    @property
    def waiting(self) -> int:
        return self.batcher.waiting

    @property
    def expected_wait_s(self) -> float:
        return self.batcher.expected_wait_s

    def submit(
        self, arrays: Sequence[np.ndarray], rows: int, terms: Terms = NO_TERMS
    ) -> asyncio.Future[Answer]:
        return self._front.submit(arrays, rows, terms)

    def all_counters(self) -> list[Counters]:
        return self.batcher.all_counters()

    def counters(self) -> Counters:
        """A copy of the counters of this version alone."""
        return next(
            counters for counters in self.batcher.all_counters() if counters.version == str(self.number)
        )

    # Its time beside another version's.

    def may_be_timed_beside(self, other: "LoadedVersion") -> bool:
        """False while its times may be those of a wrong choice: it serves in another way than ``other``, and no
        measurement of what serves has confirmed that yet."""
        mine, theirs = self.prepared, other.prepared
        return not mine.forms or self.confirmed or way_of(mine) == way_of(theirs)

    def batch_seconds(self, rows: int) -> float | None:
        """Seconds of a batch of so many rows, each of them the probe: the shorter of two, for the first may find the
        engine's threads asleep. None where another engine is lent, and where none can be run. From any thread but the
        device's."""
        with self._ending:
            probe, engine = self.prepared.probe, self.prepared.engine
            if probe is None or self._closed or self._lent_by is not None:
                return None
            parts = [[array] * max(rows, 1) for array in probe]
            try:
                return self._place.call(lambda: min(batch_seconds(engine, parts) for _ in range(2)))
            except Exception as error:  # it failed, or the server is stopping; neither is a time
                logger.warning("a batch of %d rows of %s could not be timed: %s", rows, self, error)
                return None

    # Live parity and background queues.

    def check(
        self, scale: Scale, rules: TrialRules, judge: Executor, on_drift: OnDrift, keep: Keep | None = None
    ) -> None:
        """From now on the original answers a share of the requests too. Without effect where no original is loaded."""
        prepared = self.prepared
        if prepared.original is None or prepared.precision == "fp32" or not rules.parity_sample:
            return
        original = self.behind(replace(prepared, precision="fp32", engine=prepared.original, original=None))
        self._checking = original
        self.drift = Drift(self.spec, self.batcher, original, scale, rules, judge, on_drift, keep)
        self._front = self.drift

    def behind(self, prepared: PreparedVersion) -> Batcher:
        """A second queue of this loaded version, which runs only when the device has nothing else to do."""
        batcher = Batcher(self.spec, self._place.thread, prepared, background=True)
        self._behind.append(batcher)
        return batcher

    def forget(self, batcher: Batcher) -> None:
        """Drop a background queue with its requests: no caller waits for them."""
        batcher.let_go()
        self._behind.remove(batcher)

    def fall_back(self, reason: str) -> bool:
        """Put the FP32 original in the half's place; False where that was done already, or the version is closed. From
        any thread but the device's."""
        with self._ending:
            self._take_back()
            half = self.prepared
            if half.original is None or self._closed:
                return False
            file = ORIGINALS.get(half.original.form, "")
            digest = self.version.sha256_of_form(file) if self.version.has(file) else half.digest
            setup = None if half.setup is None else getattr(half.original, "setup", None)
            original = replace(
                half,
                precision="fp32",
                engine=half.original,
                original=None,
                reason=reason,
                digest=digest,
                setup=setup,
            )
            self._front = self.batcher
            self._swap(half.engine, original)
            self._place.call(half.engine.close)
            self.fell_back = True
            return True

    def serves_by(self, engine: Engine) -> bool:
        """True if this engine answers the version's requests. On the device thread, which closes engines: as long
        as the call lasts."""
        return not self._closed and self.prepared.engine is engine

    def exchange(self, engine: Engine, new: PreparedVersion) -> bool:
        """Put ``new``, the same version in another engine or with another batch size, in the place of ``engine``; False
        where that does not serve any more. Engines that ``new`` has no use for are closed. From any thread but the
        device's.
        """
        with self._ending:
            old = self.prepared
            if old.engine is not engine or self._closed:
                return False
            # The queue of checks holds the original that is replaced.
            if new.original is not old.original and self._checking is not None:
                self._front, self.drift = self.batcher, None
                self.forget(self._checking)
                self._checking = None
            self._swap(engine, new)
            for unused in (old.engine, old.original):
                if unused is not None and unused is not new.engine and unused is not new.original:
                    self._place.call(unused.close)
            return True

    def lend(self, engine: Engine, rival: PreparedVersion) -> bool:
        """Let ``rival`` answer requests in the place of ``engine`` until `take_back`; its engine stays the caller's.

        False where ``engine`` does not serve any more. From any thread but the device's.
        """
        with self._ending:
            if self._closed or self._lent_by is not None or self.prepared.engine is not engine:
                return False
            self._lent_by = self.prepared
            self._swap(engine, rival)
            return True

    def take_back(self) -> bool:
        """End what `lend` began; False where it has ended already, because the version was closed or fell back."""
        with self._ending:
            return self._take_back()

    def _take_back(self) -> bool:
        lender, self._lent_by = self._lent_by, None
        if lender is not None:
            self._swap(self.prepared.engine, lender)
        return lender is not None

    def _swap(self, engine: Engine, new: PreparedVersion) -> None:
        for batcher in (self.batcher, *self._behind):
            if batcher.prepared.engine is engine:
                self._place.call(partial(batcher.swap, new))

    # The end.

    async def drain(self, why: str = "it is no longer loaded; ask without a version") -> None:
        """Refuse new requests; return when the waiting ones have been answered. On the event loop."""
        self._front = _Gone(f"version {self.number} of '{self.name}' takes no new requests: {why}")
        for batcher in (self.batcher, *self._behind):
            await batcher.drain()

    def close(self) -> None:
        """Give the memory back. Drain first; not on the device thread."""
        with self._ending:
            with suppress(NotReady):  # the device thread has ended: no batch runs any more
                self._take_back()
            self._closed = True
            for batcher in (self.batcher, *self._behind):
                self._place.thread.detach(batcher)
            self._behind.clear()
            engines = (self.prepared.engine, self.prepared.original)
            for engine in {id(one): one for one in engines if one is not None}.values():
                try:
                    self._place.call(engine.close)
                except NotReady:  # the device thread has ended: the process is going
                    return
                except Exception:
                    logger.exception("an engine of %s could not be closed", self)


class _Gone:
    """Takes the place of a queue that is closed: refuses every request."""

    def __init__(self, message: str) -> None:
        self._message = message

    def submit(
        self, arrays: Sequence[np.ndarray], rows: int, terms: Terms = NO_TERMS
    ) -> asyncio.Future[Answer]:
        raise NotReady(self._message)


def retire(loaded_versions: Iterable[LoadedVersion], loop: asyncio.AbstractEventLoop | None) -> None:
    """Answer the waiting requests, close the versions and free the memory. The caller must keep no reference."""
    retired = False
    for loaded in loaded_versions:
        if _drained(loaded, loop):
            loaded.close()
            logger.info("%s is closed", str(loaded))  # a log that keeps its records keeps no engine
        retired = True
    del loaded_versions
    if retired:
        give_back()


async def drain(loaded_versions: Iterable[LoadedVersion], timeout_s: float) -> None:
    """Refuse new requests and answer those that wait: at the end of the server, on its event loop."""

    async def drained(loaded: LoadedVersion) -> None:
        try:
            await asyncio.wait_for(loaded.drain("the server is shutting down; ask another one"), timeout_s)
        except TimeoutError:
            logger.error("%s did not answer its waiting requests within %g s", loaded, timeout_s)

    await asyncio.gather(*map(drained, loaded_versions))  # all at once: what is stuck delays no other one


def _drained(loaded: LoadedVersion, loop: asyncio.AbstractEventLoop | None) -> bool:
    """Answer the waiting requests, on the event loop. False where that takes too long: the version is closed later."""
    if loop is None or loop.is_closed():
        asyncio.run(loaded.drain())
        return True
    done = asyncio.run_coroutine_threadsafe(loaded.drain(), loop)
    try:
        done.result(DRAIN_SECONDS)
    except TimeoutError:
        logger.error(
            "%s has not answered its waiting requests within %g s; it stays until it has",
            loaded,
            DRAIN_SECONDS,
        )
        done.add_done_callback(lambda _: threading.Thread(target=loaded.close, daemon=True).start())
        return False
    return True
