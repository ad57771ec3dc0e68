"""The loaded versions by name: follows the store, loads and unloads, and swaps versions with requests in flight.

One thread looks at the aliases twice a second, less often where there are many. A version that was made active in the
store is made ready beside the one that serves, with a queue of its own, and takes over between two requests. Requests
that wait at the old version are answered by the old version, which is closed when it is no longer needed.
"""

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress

from ...models.errors import HalfevenError, NotReady, UnknownName
from ...models.spec.spec import ModelSpec
from ...models.store.store import Store, Version
from ..batching.interface import IndexEntry, LoadConfig
from ..batching.place import Place
from .choices.remeasuring import Remeasuring
from .loading.ready import make_ready
from .loading.release import give_back, let_go_of_files, take_out_of_sight
from .orders import last_activation, read_orders
from .pace import LOOK_EVERY_S, LookingPace
from .readiness import AGAIN, Faults, Readiness, index_of, reasons_of
from .store_writer import StoreWriter
from .traffic.automatic_decisions import AutomaticDecisions
from .traffic.loaded_version import LoadedVersion, drain, retire
from .traffic.rules import TrialRules
from .traffic.served import ServedModel
from .wanted import configured, wanted_version

logger = logging.getLogger("halfeven.roster")
State = tuple[int | None, int]  # of a name in the store: the alias's version, the newest version


class Roster:
    """Start it once, on the event loop that will serve. Every request calls `find`, which is one look-up.

    The methods that load, unload or list block: call them on no event loop. Only one thread at a time works on a name;
    other names are not held up.
    """

    def __init__(
        self, store: Store, place: Place, rules: TrialRules | None = None, writer: StoreWriter | None = None,
        required: Iterable[str] = (),
    ) -> None:  # fmt: skip
        self.store, self.place, self.rules = store, place, rules or TrialRules()
        self.writer = writer or StoreWriter(store)
        self.decisions = AutomaticDecisions(self.writer, str(place.device))
        self._judge = ThreadPoolExecutor(1, "halfeven-judge")
        self._served: dict[str, ServedModel] = {}
        self._seen, self._loading = dict[str, State](), dict[str, int]()
        self._faults, self._unloaded = Faults(store.root / "models"), set[str]()
        self._readiness, self._missed, self._names = Readiness(required), set[str](), list[str]()
        self._working: defaultdict[str, threading.RLock] = defaultdict(threading.RLock)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping, self.leaving = threading.Event(), False
        self._first_look: Future[None] = Future()
        self._choices = Remeasuring(place, self.all, self.decisions.record, lambda: bool(self._loading))
        work = {"halfeven-roster": self._follow, "halfeven-watch": self._watch}
        self._threads = [threading.Thread(target=one, name=name, daemon=True) for name, one in work.items()]

    def start(self) -> None:
        """Start the device and follow the store; versions become ready one after another."""
        with suppress(RuntimeError):  # without an event loop there are no requests
            self._loop = asyncio.get_running_loop()
        self.place.thread.start()
        for thread in (*self._threads, self._choices):
            thread.start()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until every model that was in the store at the start is active or has its fault noted."""
        self._first_look.result(timeout_s)

    def leave(self) -> None:
        """The server is shutting down: it is not ready any more, but answers requests until `stop`."""
        self.leaving = True

    async def stop(self, timeout_s: float) -> None:
        """Refuse new requests, answer those that wait, stop the device, close the engines."""
        self._stopping.set()
        self._choices.leave()
        await drain([one for served in self._served.values() for one in served.loaded_versions()], timeout_s)
        for thread in (*self._threads, self._choices):
            await asyncio.to_thread(thread.join, timeout_s)
        self._judge.shutdown(wait=False, cancel_futures=True)
        ended = [loaded for served in self._served.values() for loaded in served.end()]
        if ended and await asyncio.to_thread(self.place.answers_within, timeout_s):
            for loaded in ended:
                await asyncio.to_thread(loaded.close)
        await asyncio.to_thread(self.place.thread.stop, timeout_s)

    # The methods for every request.

    def find(self, name: str, version: str | None = None) -> ServedModel | LoadedVersion:
        """The model, or one loaded version of it by number, label or the first eight digits of a digest."""
        served = self._served.get(name)
        if served is None:
            raise self._absent(name)
        return served if version is None else served.loaded(version)

    def all(self) -> list[ServedModel]:
        return [served for _, served in sorted(self._served.items())]

    @property
    def ready(self) -> bool:
        return not self.not_ready_reasons()

    @property
    def lost(self) -> str | None:
        return self.place.lost

    def not_ready_reasons(self, reaches: Callable[[str], bool] = lambda _: True) -> list[str]:
        """The reasons why the server is not ready (`readiness.py`); empty where it is. A model that the reader may not
        know of is not named."""
        if self.leaving or self._stopping.is_set():
            return ["the server is shutting down"]
        if (why := self.lost) is not None:
            return [why]
        if not self._first_look.done():
            return ["models are being made ready"]
        missing = self._readiness.missing(self._served, self._unloaded)
        return reasons_of(missing, self._faults, self._unloaded, self.knows, reaches)

    def knows(self, name: str) -> bool:
        """True if the store had the model at the last look."""
        return name in self._served or name in self._seen

    def active(self, name: str) -> str | None:
        """The active version under a name, if any."""
        return served.prepared.version if (served := self._served.get(name)) is not None else None

    def served(self, name: str) -> ServedModel | None:
        return self._served.get(name)

    def fault(self, name: str, number: int | None = None) -> str | None:
        """The reason why the store's alias for a name (of this version, where given) could not be followed; None where
        it was."""
        moved = number is not None and self._seen.get(name, (None, 0))[0] != number
        return None if moved else self._faults.of(name)

    # The verbs (`batching.interface.Roster`).

    def load(self, name: str, config: LoadConfig | None = None) -> None:
        """Load the version that the store has as live for this name, and return when it is active.

        Where that fails, the version that served goes on serving. ``config`` holds until the next load or version.
        Raises UnknownName, BadInput (a config that asks for more than there is), NotReady, DamagedFile or EngineFailed.
        """
        if not self.store.numbers(name):
            raise self._absent(name)
        with self.working(name):
            state = self._state(name)
            version = wanted_version(self.store, name, state[0], name in self._served)
            served = self._served.get(name)
            if version is None:
                if served is None:
                    raise NotReady(f"'{name}' has no version that may serve: every one was refused")
                version = served.traffic.stable.version
            wanted = configured(version.spec(), config)
            stands = served is not None and served.traffic.stable.number == version.number
            if not (stands and served is not None and served.spec == wanted.on_the_wire()):
                loaded = self.loaded_version_for(version, wanted, anew=True)
                self.decisions.record(name, "loaded", f"{version} was loaded", dict(config or {}))
                with self.closing_unused(loaded):
                    self.activate(loaded, state)
            self._unloaded.discard(name)
            self._faults.clear(name)
            if served is None:
                self._restore_orders(name)

    def unload(self, name: str) -> None:
        """Serve no version of the name. Returns when every accepted request is answered and the memory is free.

        It lasts until `load`, until a version is published or the alias moved, or until the next start.
        """
        if name not in self._served and not self.store.numbers(name):
            raise self._absent(name)
        with self.working(name):
            self._unloaded.add(name)
            self._seen[name] = self._state(name)
            if self._end(name):
                self.decisions.record(name, "unloaded", f"'{name}' was unloaded")

    def _end(self, name: str) -> bool:
        """Serve the name no more: whether it was served. Its accepted requests are answered. Hold `working`."""
        self._faults.clear(name)
        if (served := self._served.get(name)) is None:
            return False
        self._served = {other: one for other, one in self._served.items() if other != name}
        loaded_versions = served.end()
        del served  # it names the loaded versions
        retire(loaded_versions, self._loop)
        return True

    def index(self) -> list[IndexEntry]:
        """Every version that is loaded, being loaded, or wanted and not available."""
        names = sorted({*self.store.names(), *self._served})
        return index_of(names, self._served, self._loading, self._seen, self._unloaded, self._faults)

    # The methods for `director.py`.

    def working(self, name: str) -> threading.RLock:
        """The lock for work on a name. Only locks of known models are kept: callers may send any other name."""
        known = name in self._served or bool(self.store.numbers(name))
        return self._working[name] if known else threading.RLock()

    def loaded_version_for(
        self, version: Version, spec: ModelSpec | None = None, anew: bool = False
    ) -> LoadedVersion:
        """The version, loaded: the loaded one where there is one, else a new one. Hold `working`."""
        served = self._served.get(version.name)
        others = served.loaded_versions() if served else ()
        for loaded in () if anew else others:
            if loaded.number == version.number:
                return loaded
        logger.info("making %s ready", version)
        self._loading[version.name], place = version.number, self.place.until(self._stopping)
        try:
            prepared = make_ready(version, place, served.prepared if served else None)
        finally:
            del self._loading[version.name]
        wire = (spec or version.spec()).on_the_wire()
        # Equal specs are one object, so that a codec made for one version serves all.
        wire = next((loaded.spec for loaded in others if loaded.spec == wire), wire)
        return LoadedVersion(version, wire, self.place, prepared)

    @contextmanager
    def closing_unused(self, loaded: LoadedVersion | None) -> Iterator[None]:
        """Close the loaded version if the block fails, unless `Served` has it by then. Hold `working`."""
        try:
            yield
        except BaseException:
            if loaded is not None:
                self._close_unused(loaded)
            raise

    def _close_unused(self, loaded: LoadedVersion) -> None:
        if (served := self._served.get(loaded.name)) is None or not served.has(loaded):
            retire([loaded], self._loop)

    def follow(self, name: str, anew: bool = False) -> None:
        """Follow the store for this name, now; ``anew``: even where nothing changed. Notes an error as its fault."""
        try:
            with self.working(name):
                if anew:
                    self._seen.pop(name, None)
                elif self._faults.waits(name):
                    return
                self._follow_one(name)
                self._faults.clear(name)
                return
        except HalfevenError as error:
            fault = str(error)
        except Exception as error:
            logger.exception("'%s' could not be made ready", name)
            fault = f"{type(error).__name__}: {error}; the server's log has the traceback"
        if self._stopping.is_set():
            logger.info("'%s' was not made ready: the server is shutting down", name)
        elif self._faults.note(name, fault):
            self.decisions.not_ready(name, f"model '{name}' could not be made ready: {fault}; {AGAIN}")

    def tidy(self) -> None:
        """Close the versions that are not needed any more. Those of a name on which another thread works stay: the
        thread may be about to make one of them active again."""
        leaving: list[LoadedVersion] = []
        for name, served in self._served.items():
            if (working := self._working[name]).acquire(blocking=False):
                try:
                    leaving += served.take_leaving()
                finally:
                    working.release()
        retire(leaving, self._loop)
        self.decisions.retired(leaving)

    def look(self) -> None:
        """Follow the store once: versions that became active since the last look are made ready and swapped in."""
        names = self._names = self.store.names()
        for name in names:
            if self._stopping.is_set():
                return
            self.follow(name)
        self._forget_deleted(names)
        self.tidy()

    def _forget_deleted(self, names: Collection[str]) -> None:
        """Serve no model any more whose folder two looks miss: one may come between two renames that replace it. Where
        the folder of all models is gone, the disk is away."""
        known = self._served.keys() | self._seen.keys() | self._faults.names()
        missed = known.difference(names) if (self.store.root / "models").is_dir() else set[str]()
        gone, self._missed = missed & self._missed, missed
        for name in sorted(gone):
            with self.working(name):
                logger.warning("'%s' was deleted from the store and is not served any more", name)
                self._end(name)
                self._seen.pop(name, None)
                self._unloaded.discard(name)
                self._readiness.forget(name)
                self.decisions.forget(name)

    def _follow(self) -> None:
        self._guarded(self.look)
        self._guarded(give_back)
        self._readiness.started(self._served.keys() | self._faults.names(), self._served.keys())
        self._first_look.set_result(None)
        pace, pause_s = LookingPace(), LOOK_EVERY_S
        while not self._stopping.wait(pause_s):
            pause_s = pace.pause_after(lambda: self._guarded(self.look))

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as error:
            logger.error("the store cannot be listed; looking again: %s", error)
        except Exception:
            logger.exception("the store was not followed; a mistake of ours, please report it")

    def _watch(self) -> None:
        """Watch the versions on trial, on a thread of its own: following may prove a version for minutes."""
        while not self._stopping.wait(LOOK_EVERY_S):
            for served in list(self._served.values()):
                try:
                    served.look_at_time()
                    served.let_go_in_time()
                    served.note_recent()
                except Exception:
                    logger.exception("'%s' was not watched; a mistake of ours, please report it", served.name)

    def _follow_one(self, name: str) -> None:
        state, seen, fault = self._state(name), self._seen.get(name), self._faults.of(name)
        if not state[1] or (seen == state and fault is None):
            return
        self._faults.trying(name)
        self._seen[name] = state
        self._unloaded.discard(name)
        served = self._served.get(name)
        # Only a newer version was published; the alias may still name a version that was rejected since.
        if served is not None and fault is None and seen is not None and seen[0] == state[0]:
            return
        version = wanted_version(self.store, name, state[0], name in self._served)
        if version is None or (served is not None and served.traffic.stable.number == version.number):
            return
        loaded = self.loaded_version_for(version)
        # The next look follows the alias where it has moved meanwhile.
        if self.store.live_number(name) != state[0]:
            self._close_unused(loaded)
            del self._seen[name]
            return
        with self.closing_unused(loaded):
            self.activate(loaded, state)
        if served is None:
            self._restore_orders(name)

    def _state(self, name: str) -> State:
        return (self.store.live_number(name), max(self.store.numbers(name), default=0))

    def activate(self, loaded: LoadedVersion, state: State | None = None) -> None:
        """Make the loaded version the active one. ``state``: of the store, by default as it is now. It is noted first,
        for a version on trial may be rejected before this returns, and must not be followed again. Hold `working`."""
        self._seen[loaded.name] = state or self._state(loaded.name)
        before = None if (served := self._served.get(loaded.name)) is None else served.traffic.stable
        if served is None:
            served = ServedModel(loaded, self.rules, self.decisions, self._judge)
            self._served = {**self._served, loaded.name: served}
        else:
            served.activate(loaded)
            self.tidy()
        if self._first_look.done():  # the first look does so once, at its end
            take_out_of_sight()
            let_go_of_files()
        self.decisions.activated(loaded, before, None if before else last_activation(self.store, loaded.name))

    def _restore_orders(self, name: str) -> None:
        """Load the canary and the shadow that were ordered before this start, or before the name was unloaded."""
        served = self._served[name]
        ordered = read_orders(self.store, name)
        for order, take in ((ordered.canary, served.set_canary), (ordered.shadow, served.set_shadow)):
            if order is None or order.version == served.traffic.stable.number:
                continue
            try:
                take(self.loaded_version_for(self.store.version(name, order.version)), order.percent)
            except HalfevenError as error:
                fault = f"{name}@{order.version} was ordered as a canary or shadow and could not be loaded: {error}"
                if not self._stopping.is_set():  # else the next start loads them
                    self.decisions.record(name, "order_failed", fault)

    def _absent(self, name: str) -> HalfevenError:
        if name in self._unloaded:
            return UnknownName(
                f"Request for unknown model: '{name}' has no available versions: it was unloaded; "
                f"POST /v2/repository/models/{name}/load loads it"
            )
        if (fault := self._faults.of(name)) is not None:
            return NotReady(f"model '{name}' is not ready: {fault}")
        followed = name in self._seen or not self._first_look.done()
        if self.store.numbers(name) and (followed or self._state(name)[0]):
            return NotReady(f"model '{name}' is being made ready; ask again in a moment")
        return UnknownName.of_model(name, self._names, "Request for unknown model: '{}' is not found")
