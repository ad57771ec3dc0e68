"""One sweep over a version that serves: its batch size, threads, passes and form, each beside what might be better.

A rival that rounds in a row found better (two, or three of live traffic) takes the place of the engine that serves,
between two batches. One engine more than those that serve is loaded at a time, on the calling thread, and closed
afterwards.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from ....models.engines.cpu.openmp import end_openmp_threads
from ....models.engines.cpu.row_shares import FEWEST_SHARED, LONG_ROW_SECONDS
from ....models.engines.cpu.setup import PACKED_CONVOLUTIONS, SHARED_ROWS, CpuSetup
from ....models.engines.engine import SHORT_SECONDS, Engine
from ....models.errors import NotReady
from ....models.machine.control_groups import free_bytes
from ....models.machine.core_wait import Crowding, core_seconds
from ....models.machine.processor import hardware
from ....models.machine.usable_cores import usable_cores
from ...batching.interface import PreparedVersion, ServableForm
from ...batching.place import Place
from ..loading.candidate_forms import NEAR, VersionHere
from ..loading.cpu_choice import CROWDED, Parts, TimedSetup, batch_seconds, mean
from ..loading.kept_setups import KeptSetup, keep_setup, kept_setup
from ..loading.release import give_back, give_back_tried
from ..loading.tuned import Way
from ..traffic.loaded_version import LoadedVersion
from .budget import MeasuringBudget
from .live_trial import CLEAR, LiveTrial, Window
from .rivals import CHANGES, everything, setup_rivals, wins
from .rounds import SHORT_S, BatchToTime, Side, Steps, Stopwatch, Verdict, contest, round_gains
from .rows_per_batch import right_rows, useful_rows_of
from .what_serves import Gone, Record, WhatServes

FORM, SETUP = "form", "setup"  # what may change, beside `CHANGES`
_CLEARLY_SLOWER = 0.8  # times as fast as what serves: no other change makes up for it


@dataclass(slots=True, eq=False)
class Decided:
    """The decisions since the last sweep that changed nothing.

    ``ways`` that served do not come back. ``keys`` are the changes and forms that won, or were clearly slower: they are
    not tried again. What was measured beside other programs decides nothing.
    """

    ways: set[Way] = field(default_factory=set)
    keys: set[str] = field(default_factory=set)

    def note(self, key: str, verdict: Verdict, was: Way) -> None:
        """``was`` served before the verdict."""
        if verdict.crowded:
            return
        if verdict.wins:
            self.ways.add(was)
        if verdict.wins and key not in CHANGES:  # another form: its passes are its own
            self.keys -= {*CHANGES}
        if verdict.wins or verdict.gain < _CLEARLY_SLOWER:
            self.keys.add(key)

    def clear(self) -> None:
        self.ways.clear()
        self.keys.clear()


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts of this machine that measuring reads; tests give others. ``idle``: the device has nothing to do.
    ``units``: as `Processor.units`."""

    idle: Callable[[], bool]
    clock: Callable[[], float] = time.monotonic
    cores: Callable[[], int] = usable_cores
    crowding: Callable[[bool], Crowding] = Crowding
    batch_seconds: Callable[[Engine, Parts], float] = batch_seconds
    loading_clock: Callable[[], float] = time.thread_time
    free_bytes: Callable[[], int] = free_bytes
    tidy: Callable[[bool], None] = lambda exchanged: give_back() if exchanged else give_back_tried()
    core_seconds: Callable[[int | None], tuple[float, float]] = core_seconds
    units: Callable[[], Collection[str]] = lambda: hardware().units()


logger = logging.getLogger("halfeven.roster")
_LOADING_NEEDS = 4  # times the bytes of its files, while an engine is loaded
_WARMED_S = 0.005  # a shorter batch is warmed up as at a load, where its engine may turn out to be brief
_HOPELESS = 0.5  # times as fast with one row between live batches: callers do not try it
_HOPELESS_AFTER_ONNX = 0.1  # the same where ONNX Runtime's threads still spin


@dataclass(slots=True, eq=False)
class Sweep:
    """One sweep over a loaded version. ``exchanged`` is called after another engine took the place.

    ``decided`` is kept from a sweep that changed something to the next.
    """

    loaded: LoadedVersion
    place: Place
    machine: Machine
    budget: MeasuringBudget
    record: Record
    exchanged: Callable[[LoadedVersion], None]
    decided: Decided = field(default_factory=Decided)
    _here: VersionHere = field(init=False)
    _watch: Stopwatch = field(init=False)
    _now: WhatServes = field(init=False)
    _trial: LiveTrial = field(init=False)
    crowded: bool = False  # other programs, the host or the quota disturbed a round
    _lost: set[Way] = field(default_factory=set)  # in this sweep
    _possible: dict[str, Set[str]] = field(default_factory=dict)  # the passes of the forms that were loaded
    _load_s: float = 0.0  # what the last load cost

    def __post_init__(self) -> None:
        self._here = VersionHere.of(self.loaded.version, self.place)
        machine, self._now = self.machine, WhatServes(self.loaded, self.place, self.record)
        self._watch = Stopwatch(
            self.place.call,
            self._here.batch,
            machine.batch_seconds,
            self.budget,
            machine.idle,
            machine.clock,
            machine.crowding,
            self._now.allowed,
        )
        self._trial = LiveTrial(self._now.batches, machine.clock, self.budget)

    @property
    def way(self) -> Way:
        return self._now.way

    @property
    def measured(self) -> TimedSetup:
        """The times that the batches of the engine that serves took in this sweep."""
        return self._now.taken

    # The sweep.

    def steps(self) -> Steps[bool]:
        """Every choice once, what most likely gains much first, unless it was decided since the last sweep that changed
        nothing; whether anything was replaced. Raises Gone."""
        yield from self._first_looks()
        changed, own = False, self._now.form
        if own is not None and SETUP not in self.decided.keys:
            changed = yield from self._with_everything(own, SETUP)
        may_be_few = 0 < self._now.limit < self.loaded.spec.max_batch_size
        if may_be_few:
            changed |= yield from right_rows(self._now, self._watch, self._trial)
        others: list[ServableForm] = []
        for form in sorted(self._now.prepared.forms, key=self._turn):
            served = self._now.form
            if form == served or self._key(form) in self.decided.keys or not self._may_serve(form):
                continue
            taken = yield from self._with_everything(form, FORM)
            changed |= taken
            others += [served] if taken and served is not None else [form]
        for change in CHANGES:
            own = self._now.form
            if own is None or change in self.decided.keys:
                continue
            for setup in setup_rivals(self.way.setup, change, self._now.possible, *self._limits()):
                changed |= (yield from self._challenge(own, setup, change)).wins
        for form in others:
            for setup in (self._setup_in(form), self.way.setup):
                if form != self._now.form:
                    changed |= (yield from self._challenge(form, setup, FORM)).wins
        if not (may_be_few or changed):  # too many rows cost callers time, not answers
            changed = yield from right_rows(self._now, self._watch, self._trial)
        return changed

    def _first_looks(self) -> Steps[None]:
        """Time one row, and those larger batches that are short."""
        most, seconds = self.loaded.spec.max_batch_size, self.measured.seconds
        for rows in sorted({1, FEWEST_SHARED, most}) if self._now.limit else [0]:
            if rows <= max(most, 1) and sum(seconds.values()) * rows <= SHORT_S * max(sum(seconds), 1):
                yield from self._watch.time(*[BatchToTime(self._now.engine, rows, self.measured)] * 2)

    def _with_everything(self, form: ServableForm, what: str) -> Steps[bool]:
        """Let a form run with every core and pass. Packed convolutions take many times as long as plain ones on some
        processors: the form runs without them first, or as what serves tells."""
        packed = everything(*self._limits())
        plain = packed.without(PACKED_CONVOLUTIONS)
        setups = [plain, packed]
        if what == SETUP:
            setups = [one.only({*self._now.possible, SHARED_ROWS}) for one in setups]  # the rival tells
        elif PACKED_CONVOLUTIONS in self._now.possible:
            setups = [packed if PACKED_CONVOLUTIONS in self.way.setup.passes else plain]
        changed = False
        for setup in setups:
            if setup is not setups[0] and PACKED_CONVOLUTIONS not in self._possible.get(
                self._key(form), setup.passes
            ):
                break
            verdict = yield from self._challenge(form, setup, what)
            changed |= verdict.wins
            if verdict.gain < _HOPELESS:
                break
        return changed

    def _turn(self, form: ServableForm) -> int:
        """The place of a form in the order of trials: first the halves that the processor multiplies itself, then FP32,
        last the halves that it has to convert."""
        return 0 if form.precision in self.machine.units() else 1 if form.precision == "fp32" else 2

    def _key(self, form: ServableForm) -> str:
        return f"{form.form} {form.precision}"

    def _limits(self) -> tuple[int, bool, bool]:
        """The cores, and how short and how long the rows are, for `setup_rivals`."""
        seconds, setup = self.measured.seconds, self.way.setup
        largest = max(seconds)
        row_s = seconds[largest] * max(setup.threads, 1) / max(largest, 1)
        most = max(self.loaded.spec.max_batch_size, 1)
        return (
            self.machine.cores(),
            row_s * most < SHORT_SECONDS,
            most >= FEWEST_SHARED and row_s >= LONG_ROW_SECONDS,
        )

    def _may_serve(self, form: ServableForm) -> bool:
        """False for a half after drift, and for a form that a load found hopeless."""
        if self.loaded.fell_back and form.precision != "fp32":
            return False
        kept, smallest = self._kept(form), min(self.measured.seconds)
        return kept is None or kept.seconds.get(smallest, 0.0) <= NEAR * self.measured.seconds[smallest]

    def _kept(self, form: ServableForm) -> KeptSetup | None:
        return kept_setup(self.loaded.version, form.form, form.precision, self.place.device)

    def _setup_in(self, form: ServableForm) -> CpuSetup:
        """The threads and passes that serve now, and those that were kept for the form."""
        kept = self._kept(form)
        return self.way.setup.having(*(kept.setup.passes if kept else ()))

    # Engines.

    def _challenge(self, form: ServableForm, setup: CpuSetup, what: str) -> Steps[Verdict]:
        """Let a form in a setup run beside what serves, and take its place where it wins."""
        nothing, asked = Verdict(gain=1.0), Way(form.form, form.precision, setup)
        if asked in {self.way, *self.decided.ways, *self._lost}:
            return nothing
        while wait_s := self.budget.wait_s(self._load_s):
            yield wait_s
        if self.machine.free_bytes() < _LOADING_NEEDS * form.nbytes:
            logger.info("%s: there is no memory to try %s beside what serves", self.loaded, asked)
            return nothing
        try:
            with self._loaded(form, setup) as (engine, keep):
                way, self._possible[self._key(form)] = replace(asked, setup=engine.setup), engine.possible
                if way in {self.way, *self.decided.ways, *self._lost}:
                    return nothing
                rival = Side(way, engine, TimedSetup(way.setup, {}))
                verdict, new = yield from self._compared(form, rival, what)
                self.crowded = self.crowded or verdict.crowded
                logger.debug("%s: %s beside %s: %s", self.loaded, way, self.way, verdict)
                was = self.way
                if verdict.wins:
                    self._take(new, rival, verdict, what, keep)
                else:
                    self._lost.add(way)
                self.decided.note(self._key(form) if what == FORM else what, verdict, was)
                return verdict
        except (Gone, NotReady):
            raise
        except Exception:
            logger.exception("%s: %s cannot be tried beside what serves, which stays", self.loaded, asked)
            return nothing

    def _compared(self, form: ServableForm, rival: Side, what: str) -> Steps[tuple[Verdict, PreparedVersion]]:
        """The verdict, and what would serve: by live traffic where there is enough of it, unless the rival is hopeless;
        else by runs between live batches.

        Just after a batch callers, the event loop and threads that still spin need every core: a rival with more
        threads may seem 100 times as slow there, and one with several was 4 times as slow after ONNX Runtime, and the
        fastest under load. So what runs between live batches decides little of such a rival, and a disturbed run
        decides nothing. Any other that gains little in the batches of live traffic must not lose much with one row,
        nor with the largest batch where live ones were small.
        """
        active, sizes = Side(self.way, self._now.engine, self.measured), self._sizes()
        new = self._now.by(form, rival.engine, self._now.prepared.useful_rows)
        self._watch.anew()
        gain = mean((yield from round_gains(active, rival, sizes[:1], self._watch, is_first=True)))
        crowded, after_onnx = self._watch.was_disturbed(), active.way.form == "onnx" and rival.way.threads > 1
        if gain < (_HOPELESS_AFTER_ONNX if after_onnx else _HOPELESS) and not crowded:
            return Verdict(rounds=1, gain=gain), new
        before = yield from self._trial.window()
        if before.is_enough:
            crowding = self.machine.crowding(True)
            sizes_differ = what in (FORM, SETUP) and self._now.limit and not crowded
            own_rows = (yield from useful_rows_of(rival, self._now, self._watch)) if sizes_differ else 0

            def speaks_for_it(gain: float) -> bool:
                return wins(active.way, rival.way, [gain], crowding.disturbance() > CROWDED)

            verdict = yield from self._live_verdict(rival, new, own_rows, before, speaks_for_it)
            if verdict is not None:
                verdict.crowded |= crowded or crowding.disturbance() > CROWDED
                between_counts = not (crowded or after_onnx or rival.way.threads > active.way.threads)
                alone = gain if between_counts else 1.0
                if verdict.wins and alone * verdict.gain < _CLEARLY_SLOWER:
                    verdict.wins, verdict.gain = False, alone
                if verdict.wins and between_counts and verdict.live_rows * 2 <= self._now.limit:
                    yield from self._with_all_rows(active, rival, verdict)
                return verdict, new
        if gain < _HOPELESS:
            return Verdict(rounds=1, gain=gain, crowded=crowded), new
        return (yield from contest(active, rival, sizes, self._watch, mean)), new

    def _live_verdict(
        self, rival: Side, new: PreparedVersion, own_rows: int, before: Window, wins: Callable[[float], bool]
    ) -> Steps[Verdict | None]:
        """The verdict of live traffic on ``new``, in batches that are no smaller than those of what serves; where that
        is not clear also in batches of ``own_rows``, which one short run found best (0: not known).

        Small batches that are as fast by themselves are slower beside the event loop and the callers' programs.
        """
        verdict, sizes = None, (max(own_rows, self._now.limit), own_rows) if own_rows else (0,)
        for rows in dict.fromkeys(sizes):
            new.useful_rows = rows or new.useful_rows
            self._warm(rival, new)
            verdict = yield from self._trial.verdict(before, partial(self._now.lend, new), wins)
            if verdict is None or verdict.wins or verdict.gain * CLEAR < 1.0:
                break
        return verdict

    def _with_all_rows(self, active: Side, rival: Side, verdict: Verdict) -> Steps[None]:
        """Take the verdict back where live batches were small and the rival is clearly slower with the largest that is
        short: what serves is chosen for every load, not for that of a moment."""
        gain = mean((yield from round_gains(active, rival, self._sizes()[-1:], self._watch, is_first=True)))
        if gain < _CLEARLY_SLOWER:
            verdict.wins, verdict.gain = False, gain

    @contextmanager
    def _loaded(self, form: ServableForm, setup: CpuSetup) -> Iterator[tuple[Engine, Callable[[], None]]]:
        """A rival's engine, and a function to call where it is to stay; else it is closed at the end."""
        began_s, kept = self.machine.loading_clock(), list[bool]()
        load = partial(form.load, setup)
        # A live form runs the operator's own code, which may count on the device's thread.
        engine = self.place.call(load) if form.form == "live" else load()
        end_openmp_threads()  # those of this thread would slow what serves
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
        """The sizes to compare: one row, and the largest batch that is short."""
        short = [
            rows
            for rows, taken in self.measured.seconds.items()
            if taken <= SHORT_S and rows <= self._now.limit
        ]
        return sorted({min(self.measured.seconds), max(short, default=min(self.measured.seconds))})

    def _take(
        self, new: PreparedVersion, rival: Side, verdict: Verdict, what: str, keep: Callable[[], None]
    ) -> None:
        """Warm the rival up with what it may get, and put it in the place of what serves."""
        was, measured = self.way, [rival.taken, self.measured]
        self._warm(rival, new)
        if what == FORM:
            most = max(*rival.taken.seconds, self._now.rows_of(new))
            new.invariance = self._here.invariance_of(rival.engine, most)
        self._now.exchange(new, what, (str(was), str(rival.way)), verdict, rival.taken, keep)
        version, way, kept = self.loaded.version, rival.way, [one for one in measured if one.seconds]
        keep_setup(version, way.form, way.precision, self.place.device, way.setup, kept, verdict.crowded)
        self.exchanged(self.loaded)

    def _warm(self, rival: Side, new: PreparedVersion) -> None:
        for rows in sorted({min(rival.taken.seconds), self._now.rows_of(new)}):
            parts = self._here.batch(rows)
            size = max(rival.taken.seconds)
            is_short = rival.taken.seconds[size] * max(rows, 1) / max(size, 1) <= _WARMED_S
            self.place.call(partial(rival.engine.warm_up if is_short else rival.engine.run, parts))
