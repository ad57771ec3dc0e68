"""One sweep over a version that serves: its batch size, threads, passes and form, each beside what might be better.

A rival that two rounds in a row found better takes the place of the engine that serves, between two batches. One engine
more than those that serve is loaded at a time, on the calling thread, and closed afterwards.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from ....exporters.inputs.samples import Samples, stored_samples
from ....models.engines.cpu.row_shares import FEWEST_SHARED, LONG_ROW_SECONDS
from ....models.engines.cpu.setup import CpuSetup
from ....models.engines.engine import SHORT_SECONDS, Engine
from ....models.errors import NotReady
from ....models.spec import ModelSpec
from ...batching.interface import PreparedVersion, ServableForm
from ...batching.place import Place
from ..loading.candidate_forms import NEAR, batch_of
from ..loading.cpu_choice import MUST_GAIN, Timed, mean
from ..loading.kept_setups import keep_setup, kept_setup
from ..loading.ready import invariance_of
from ..loading.tuned import Way, Winner, correct_tuned, tuned_for
from ..loading.useful_rows import AHEAD, ONE_BY_ONE
from ..traffic.loaded_version import LoadedVersion
from .budget import Budget
from .decided import Decided
from .machine import Machine
from .rivals import CHANGES, gain_needed, setup_rivals
from .rounds import SHORT_S, Job, Side, Steps, Stopwatch, Verdict, contest
from .rows_per_batch import agreed_rows

logger = logging.getLogger("halfeven.roster")
_WITHIN_REACH = 0.5  # times as fast as what serves: passes have gained no more than the rest
_LOADING_NEEDS = 4  # times the bytes of its files, while an engine is loaded
_WARMED_S = 0.005  # a shorter batch is warmed up as at a load, where its engine may turn out to be brief
_MARK = "; while serving: "  # in a reason, in front of the last correction
Record = Callable[[str, str, str, Mapping[str, Any]], None]


class Gone(Exception):
    """The version does not serve any more, or by another engine."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A rival: what its batches took, how many times as fast it was (0: it was not run), the passes that it allows, and
    whether it serves now."""

    measured: Timed
    gain: float = 0.0
    possible: frozenset[str] = frozenset()
    taken: bool = False

    @property
    def setup(self) -> CpuSetup:
        return self.measured.setup

    def way(self, form: ServableForm) -> Way:
        return Way(form.form, form.precision, self.setup)


@dataclass(slots=True, eq=False)
class Sweep:
    """One sweep over a loaded version. ``exchanged`` is called after another engine took the place.

    ``decided`` is kept from a sweep that changed something to the next.
    """

    loaded: LoadedVersion
    place: Place
    machine: Machine
    budget: Budget
    record: Record
    exchanged: Callable[[LoadedVersion], None]
    decided: Decided = field(default_factory=Decided)
    _spec: ModelSpec = field(init=False)
    _samples: Samples = field(init=False)
    _watch: Stopwatch = field(init=False)
    _engine: Engine = field(init=False)  # that serves
    _taken: Timed = field(init=False)  # its batches
    crowded: bool = False  # other programs, the host or the quota disturbed a round
    _sped_up: float = 1.0  # by what was replaced in this sweep
    _load_s: float = 0.0  # what the last load cost

    def __post_init__(self) -> None:
        self._spec = self.loaded.version.spec()
        self._samples = stored_samples(self.loaded.version)
        machine = self.machine
        self._watch = Stopwatch(
            self.place.call,
            partial(batch_of, self._spec, self._samples),
            machine.batch_seconds,
            self.budget,
            machine.idle,
            machine.clock,
            self._allowed,
        )
        self._begin()

    # What serves.

    @property
    def prepared(self) -> PreparedVersion:
        return self.loaded.prepared

    @property
    def way(self) -> Way:
        return way_of(self.prepared)

    @property
    def measured(self) -> Timed:
        """What the batches of the engine that serves took in this sweep."""
        return self._taken

    @property
    def _limit(self) -> int:
        """The most rows of a batch now; 0: not batched."""
        most = self.loaded.spec.max_batch_size
        return min(self.prepared.useful_rows or most, most) if self._spec.batched else 0

    @property
    def _possible(self) -> frozenset[str]:
        return frozenset(getattr(self._engine, "possible", ()))

    def _begin(self, taken: Timed | None = None) -> None:
        self._engine, self._taken = self.prepared.engine, taken or Timed(self.way.setup, {})

    def _allowed(self) -> None:
        """Raises Gone where the engine served and does not any more. On the device thread, which closes engines."""
        if not self.loaded.serves_by(self._engine):
            raise Gone(f"{self.loaded} is served by another engine, or not any more")

    # The sweep.

    def steps(self) -> Steps[bool]:
        """Every choice once, unless it was decided since the last sweep that changed nothing; whether anything was
        replaced. Raises Gone."""
        changed = yield from self._batch_size()
        tried: list[tuple[ServableForm, Tried, float]] = []
        for form in self.prepared.forms:
            if (setup := self._setup_in(form)) is not None and self._key(form) not in self.decided.keys:
                served, was = self._form_of(self.way), Tried(self._taken, possible=self._possible)
                found = yield from self._challenge(form, setup, "form")
                changed |= found.taken
                if found.taken:  # the form that served may be the better one with other passes
                    form, found = served, replace(was, gain=1 / found.gain)
                if form is not None:
                    tried.append((form, found, self._sped_up))
        for change in CHANGES:
            own = self._form_of(self.way)
            if own is None or change in self.decided.keys:
                continue
            for setup in self._setups(change):
                changed |= (yield from self._challenge(own, setup, change)).taken
        for form, found, before in tried:
            if self._setup_in(form) is None:
                continue
            if found.setup.threads != self.way.threads:  # it is to have as many threads as what serves now
                setup = CpuSetup(self.way.threads, found.setup.passes)
                found, before = (yield from self._challenge(form, setup, "form")), self._sped_up
                changed |= found.taken
            if not found.taken:
                changed |= yield from self._climb(form, found, found.gain * before / self._sped_up)
        return changed

    def _key(self, form: ServableForm) -> str:
        return f"{form.form} {form.precision}"

    def _form_of(self, way: Way) -> ServableForm | None:
        """None after drift where a half was asked for: the whole that serves is no choice."""
        forms = self.prepared.forms
        return next((one for one in forms if (one.form, one.precision) == (way.form, way.precision)), None)

    def _setups(self, change: str) -> list[CpuSetup]:
        seconds, setup = self._taken.seconds, self.way.setup
        largest = max(seconds)
        row_s = seconds[largest] * max(setup.threads, 1) / max(largest, 1)
        most = max(self.loaded.spec.max_batch_size, 1)
        short = seconds[largest] * setup.threads / max(largest, 1) * most < SHORT_SECONDS
        long_rows = most >= FEWEST_SHARED and row_s >= LONG_ROW_SECONDS
        return setup_rivals(setup, change, self._possible, self.machine.cores(), short, long_rows)

    def _setup_in(self, form: ServableForm) -> CpuSetup | None:
        """The setup in which another form is tried: the threads and passes that serve now, and its own passes. None for
        the form that serves, for one that a load found hopeless, and for a half after drift."""
        if self._key(form) == f"{self.way.form} {self.way.precision}":
            return None
        if self.loaded.fell_back and form.precision != "fp32":
            return None
        kept = kept_setup(self.loaded.version, form.form, form.precision, self.place.device)
        own, setup = (kept.setup.passes if kept else frozenset[str]()), self.way.setup
        smallest = min(self._taken.seconds)
        if kept is not None and kept.seconds.get(smallest, 0.0) > NEAR * self._taken.seconds[smallest]:
            return None
        return CpuSetup(setup.threads, setup.passes | own)

    def _climb(self, form: ServableForm, best: Tried, gain: float) -> Steps[bool]:
        """Change one pass of another form at a time, as long as that brings it nearer to what serves, unless its setup
        was confirmed before. ``gain``: how many times as fast as what serves it is now."""
        kept = kept_setup(self.loaded.version, form.form, form.precision, self.place.device)
        if gain < _WITHIN_REACH or (kept is not None and kept.rounds):
            return False
        for name in MUST_GAIN:
            for setup in setup_rivals(best.setup, name, best.possible, self.machine.cores(), False, False):
                other = yield from self._challenge(form, setup, "form")
                if other.taken:
                    return True
                if other.gain >= gain * gain_needed(best.way(form), other.way(form)):
                    best, gain = other, other.gain
        self._keep_other(form, best)
        return False

    def _keep_other(self, form: ServableForm, best: Tried) -> None:
        version, device = self.loaded.version, self.place.device
        keep_setup(version, form.form, form.precision, device, best.setup, [best.measured], rounds=2)

    # The size of a batch.

    def _batch_size(self) -> Steps[bool]:
        """Measure batches of one row, two, four, …, as long as they are short, until two rounds in a row agree on how
        many rows are useful."""
        if self._limit == 0 or self.loaded.spec.max_batch_size == 1:
            yield from self._watch.time(*[Job(self._engine, self._limit, self._taken)] * 2)
            return False
        worth = AHEAD if getattr(self._engine, "in_flight", 1) > 1 else ONE_BY_ONE
        limit, most = self._limit, self.loaded.spec.max_batch_size
        found = yield from agreed_rows(self._engine, self._taken, limit, most, worth, self._watch)
        return found is not None and self._take_rows(found.rows, found.seconds, found.rounds)

    def _take_rows(self, rows: int, seconds: Mapping[int, float], rounds: int) -> bool:
        limit, prepared = self._limit, self.prepared
        ceiling = prepared.ceiling.smallest if prepared.ceiling is not None else 0
        rows = min(rows, ceiling or rows)
        if rows == limit:
            return False
        gain = rows / seconds[rows] * seconds[limit] / limit if rows in seconds and limit in seconds else 0.0
        was, now = f"batches of up to {limit}", f"batches of up to {rows}"
        sentence = _sentence(was, now, gain, rounds)
        new = replace(prepared, useful_rows=rows, reason=_with(prepared.reason, sentence))
        return self._exchange(new, "useful rows", (was, now), sentence, Verdict(True, rounds, gain))

    # Engines.

    def _challenge(self, form: ServableForm, setup: CpuSetup, what: str) -> Steps[Tried]:
        """Let a form in a setup run beside what serves, and take its place where it wins."""
        active, nothing = Side(self.way, self._engine, self._taken), Tried(Timed(setup, {}))
        asked = Way(form.form, form.precision, setup)
        if asked in self.decided.ways or asked == active.way:
            return nothing
        while wait_s := self.budget.wait_s(self._load_s):
            yield wait_s
        if self.machine.free_bytes() < _LOADING_NEEDS * form.nbytes:
            logger.info("%s: there is no memory to try %s beside what serves", self.loaded, asked)
            return nothing
        try:
            with self._loaded(form, setup) as (engine, keep):
                way = replace(asked, setup=getattr(engine, "setup", setup))
                if way == active.way or way in self.decided.ways:
                    return nothing
                rival, sizes = Side(way, engine, Timed(way.setup, {})), self._sizes()
                verdict = yield from contest(active, rival, sizes, self._watch, self.machine.crowding, mean)
                self.crowded = self.crowded or verdict.crowded
                possible = frozenset[str](getattr(engine, "possible", ()))
                taken = verdict.wins and self._take(form, rival, verdict, what, keep)
                self.decided.note(self._key(form) if what == "form" else what, verdict.gain, taken)
                return Tried(rival.taken, verdict.gain, possible, taken)
        except (Gone, NotReady):
            raise
        except Exception:
            logger.exception("%s: %s cannot be tried beside what serves, which stays", self.loaded, asked)
            return nothing

    @contextmanager
    def _loaded(self, form: ServableForm, setup: CpuSetup) -> Iterator[tuple[Engine, Callable[[], None]]]:
        """A rival's engine, and a function to call where it is to stay; else it is closed at the end."""
        began_s, kept = self.machine.loading_clock(), list[bool]()
        load = partial(form.load, setup)
        # A live form runs the operator's own code, which may count on the device's thread.
        engine = self.place.call(load) if form.form == "live" else load()
        self._load_s = self.machine.loading_clock() - began_s
        self.budget.spend(self._load_s)
        try:
            yield engine, lambda: kept.append(True)
        finally:
            if not kept:
                self.place.call(engine.close)
            del engine
            self.machine.tidy(bool(kept))

    def _sizes(self) -> list[int]:
        """One row, and the largest batch that is short."""
        short = [
            rows for rows, taken in self._taken.seconds.items() if taken <= SHORT_S and rows <= self._limit
        ]
        return sorted({min(self._taken.seconds), max(short, default=min(self._taken.seconds))})

    def _take(
        self, form: ServableForm, rival: Side, verdict: Verdict, what: str, keep: Callable[[], None]
    ) -> bool:
        """Warm the rival up with what it may get, and put it in the place of what serves."""
        was, prepared = self.way, self.prepared
        self._warm(rival)
        sentence = _sentence(str(was), str(rival.way), verdict.gain, verdict.rounds)
        new = replace(
            prepared,
            engine=rival.engine,
            precision=form.precision,
            digest=form.digest,
            setup=rival.way.setup,
            whole=self._whole_beside(form),
            reason=_with(prepared.reason, sentence),
        )
        if what == "form":
            new.invariance = invariance_of(
                self._spec, self._samples, rival.engine, max(rival.taken.seconds), self.place
            )
        measured = [rival.taken, self._taken]
        self._exchange(new, what, (str(was), str(rival.way)), sentence, verdict, rival.taken, keep)
        self.decided.ways.add(was)
        self._sped_up *= verdict.gain
        version, device = self.loaded.version, self.place.device
        kept = [one for one in measured if one.seconds]
        keep_setup(
            version, form.form, form.precision, device, rival.way.setup, kept, verdict.crowded, verdict.rounds
        )
        self.exchanged(self.loaded)
        return True

    def _whole_beside(self, form: ServableForm) -> Engine | None:
        """The FP32 engine that stands by a half: the one that did, or the one that served."""
        if form.precision == "fp32" or not self.place.rescue:
            return None
        return self.prepared.engine if self.prepared.precision == "fp32" else self.prepared.whole

    def _warm(self, rival: Side) -> None:
        for rows in sorted({min(rival.taken.seconds), self._limit}):
            parts = batch_of(self._spec, self._samples, rows)
            size = max(rival.taken.seconds)
            is_short = rival.taken.seconds[size] * max(rows, 1) / max(size, 1) <= _WARMED_S
            self.place.call(partial(rival.engine.warm_up if is_short else rival.engine.run, parts))

    def _exchange(
        self, new: PreparedVersion, what: str, change: tuple[str, str], sentence: str, verdict: Verdict,
        taken: Timed | None = None, keep: Callable[[], None] = lambda: None,
    ) -> bool:  # fmt: skip
        """Swap, correct a tuning that said otherwise, and tell. ``keep`` is called once the new engine serves, whose
        batches took ``taken``. Raises Gone."""
        if not self.loaded.exchange(self._engine, new):
            raise Gone(f"{self.loaded} is served by another engine, or not any more")
        keep()
        if new.engine is not self._engine:
            self._begin(taken)
        self._correct_tuned(verdict.gain)
        numbers = {"version": self.loaded.number, "what": what, "from": change[0], "to": change[1]}
        numbers |= {"gain": verdict.gain, "rounds": verdict.rounds, "crowded": verdict.crowded}
        self.record(self.loaded.name, "choice_replaced", f"{self.loaded}: {what}: {sentence}", numbers)
        return True

    def _correct_tuned(self, gain: float) -> None:
        version, device = self.loaded.version, self.place.device
        tuned = tuned_for(version, device)
        if tuned is None:
            return
        way = self.way
        winner = Winner(
            way.form,
            way.precision,
            way.threads,
            self.prepared.useful_rows,
            tuned.winner.queue_delay_us,
            tuned.winner.rows_per_second * max(gain, 1.0),
            sorted(way.setup.passes),
        )
        correct_tuned(version, device, winner, datetime.now(UTC).isoformat(timespec="seconds"), gain)


def way_of(prepared: PreparedVersion) -> Way:
    """How a version is served now."""
    engine = prepared.engine
    return Way(engine.form, engine.precision, prepared.setup or CpuSetup())


def _sentence(was: str, now: str, gain: float, rounds: int) -> str:
    how = f"{gain:.3g} times as fast" if gain else "as fast"
    return f"{now} instead of {was}, measured {how} in {rounds} rounds"


def _with(reason: str, sentence: str) -> str:
    """The reason with the last correction."""
    return reason.partition(_MARK)[0] + _MARK + sentence
