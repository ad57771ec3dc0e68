"""One thread measures versions again while they serve: one at a time, within one budget.

Every served batch is a measurement. Where live batches take much longer, or shorter, than was measured (`live.py`), or
are far larger than those beside which the choice was confirmed, the version is measured again at once. A choice that
was not confirmed before is measured again once it has served for a moment; each undisturbed sweep that confirms it
doubles the time to the next one.
"""

import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ....models.errors import HalfevenError, NotReady
from ...batching.place import Place
from ..loading.kept_setups import keep_setup, kept_setup
from ..loading.tuned import way_of
from ..traffic.loaded_version import LoadedVersion
from ..traffic.served import ServedModel
from .budget import MeasuringBudget
from .live import (
    OFF,
    Batches,
    are_enough,
    of_new_sizes,
    off_by,
    rows_per_batch,
    seconds_by_rows,
    share_on_core,
    since,
)
from .rounds import Steps
from .sweep import Decided, Machine, Sweep
from .what_serves import Gone, Record

logger = logging.getLogger("halfeven.roster")
LOOK_EVERY_S = 1.0
FIRST_S, LONGEST_S = 60.0, 6 * 3600.0  # from a sweep that confirmed the choice to the next one
AGAIN_S = 15.0  # from one that was disturbed, or left out what was decided before: it confirms nothing
WORKED_S, WORKED_BATCHES = 2.0, 1000  # of which one suffices: a version that serves nobody is not measured
CONFIRMS = 2  # rounds of a sweep that changed nothing
_MOST_DOUBLINGS = 20  # more than `LONGEST_S` allows; 2 to the power of 1,024 is no float any more
GROWN = 2.0  # times as many rows in a batch as when the choice was confirmed: such a load is new


@dataclass(slots=True, eq=False)
class Watched:
    """A version that serves: when its next sweep is due, and what its batches are expected to take.

    ``rows``: of a live batch, in the mean. ``confirmed_rows``: the most of them beside which the choice was confirmed;
    0: not known.
    """

    served: ServedModel
    loaded: LoadedVersion
    due_s: float
    rounds: int  # in a row that confirmed what serves
    expected: dict[int, float]
    confirmed_rows: float = 0.0
    rows: float = 0.0
    seen: Batches = field(default_factory=dict)
    worked_s: float = 0.0
    batches: int = 0
    on_core: tuple[float, float] = (0.0, 0.0)  # as `core_seconds` gives them
    looks_off: int = 0
    decided: Decided = field(default_factory=Decided)

    @property
    def has_worked(self) -> bool:
        return self.worked_s >= WORKED_S or self.batches >= WORKED_BATCHES


class Remeasuring(threading.Thread):
    """``models`` gives those that are served; ``busy``: whether versions are being loaded, which is measured too.

    The thread calls `turn` again and again until `leave`; without the thread, call it yourself, and `close` at the end.
    """

    def __init__(
        self,
        place: Place,
        models: Callable[[], Sequence[ServedModel]],
        record: Record,
        busy: Callable[[], bool] = lambda: False,
        machine: Machine | None = None,
    ) -> None:
        super().__init__(name="halfeven-choices", daemon=True)
        self._leaving = threading.Event()
        self._place, self._models, self._record, self._busy = place, models, record, busy
        self._machine = machine or Machine(idle=lambda: place.thread.asleep)
        self._budget = MeasuringBudget(self._machine.clock)
        self._watched: dict[LoadedVersion, Watched] = {}
        self._steps: Steps[None] | None = None
        self._looked_s = float("-inf")
        self._again_s = float("-inf")  # the next step is not before
        self._calm = True  # no version was loaded since the last look: that takes cores, and the device

    def leave(self) -> None:
        """End the thread after its step; join it then."""
        self._leaving.set()

    def run(self) -> None:
        """Measure again until the server stops. On a device other than a CPU nothing is, and this returns at once."""
        if self._place.device.type != "cpu":
            return
        self._stand_back()
        wait_s = LOOK_EVERY_S
        while not self._leaving.wait(wait_s):
            try:
                wait_s = self.turn()
            except Exception:
                logger.exception("what serves could not be looked at; a mistake of ours, please report it")
                wait_s, self._steps = LOOK_EVERY_S, None
        self.close()

    def _stand_back(self) -> None:
        """Be as nice as the device thread: threads that an engine starts inherit it from the thread that loads it."""
        device = self._place.thread.native_id
        if sys.platform == "linux" and device is not None:
            with suppress(OSError):  # a sandbox may forbid it
                os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, device))

    def turn(self) -> float:
        """Do one step, if one is due and the budget allows it; gives the seconds until the next call."""
        now_s, busy = self._machine.clock(), self._busy()
        self._calm = self._calm and not busy
        if now_s - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now_s
            self._look()
            self._calm = not busy
        if busy:
            self.close()  # a rival that serves for a moment would serve for as long as a version is being loaded
            return LOOK_EVERY_S
        if now_s < self._again_s:
            return min(self._again_s - now_s, LOOK_EVERY_S)
        if self._steps is None:
            due = self._next_due()
            if due is None:
                return LOOK_EVERY_S
            self._steps = self._sweep(due)
        try:
            wait_s = next(self._steps)
            self._again_s = self._machine.clock() + wait_s
            return min(wait_s, LOOK_EVERY_S)
        except StopIteration:
            self._steps = None
            return 0.0

    def close(self) -> None:
        """End the sweep that is under way, and close the engine that was loaded for it."""
        if self._steps is not None:
            with suppress(HalfevenError):  # the device thread may have ended
                self._steps.close()
            self._steps = None

    # Looking at live batches.

    def _look(self) -> None:
        present: dict[LoadedVersion, Watched] = {}
        for served in self._models():
            for loaded in filter(None, (served.traffic.stable, served.traffic.canary)):
                if loaded.prepared.forms:
                    present[loaded] = self._watched.get(loaded) or self._new(served, loaded)
        self._watched = present
        for one in present.values():
            self._look_at(one, self._calm)
            one.loaded.confirmed = one.rounds > 0

    def _new(self, served: ServedModel, loaded: LoadedVersion) -> Watched:
        now_s, way = self._machine.clock(), way_of(loaded.prepared)
        kept = kept_setup(loaded.version, way.form, way.precision, self._place.device)
        due_s, rounds, expected, rows = now_s, 0, dict[int, float](), 0.0
        if kept is not None and kept.setup == way.setup:  # else it is a tuning's
            rounds, expected, rows = kept.rounds, dict(kept.seconds), kept.rows
            due_s += _pause_s(rounds) if rounds else 0.0
        seen, on_core = loaded.counters().batches, self._core_seconds()
        return Watched(served, loaded, due_s, rounds, expected, rows, seen=seen, on_core=on_core)

    def _core_seconds(self) -> tuple[float, float]:
        return self._machine.core_seconds(self._place.thread.native_id)

    def _look_at(self, one: Watched, calm: bool) -> None:
        batches, (had_s, waited_s) = one.loaded.counters().batches, self._core_seconds()
        fresh = since(one.seen, batches)
        on_core = share_on_core(fresh, had_s - one.on_core[0], waited_s - one.on_core[1])
        one.seen, one.on_core = batches, (had_s, waited_s)
        one.worked_s += sum(spent_ns for _, spent_ns in fresh.values()) / 1e9
        one.batches += sum(count for count, _ in fresh.values())
        if are_enough(fresh) and calm:
            one.rows = rows_per_batch(fresh)
            self._judge(one, fresh, on_core)

    def _judge(self, one: Watched, fresh: Batches, on_core: float) -> None:
        """Learn what batches take whose size was not measured, and note where the others take longer or shorter."""
        off = off_by(fresh, one.expected, on_core)
        if are_enough(new := of_new_sizes(fresh, one.expected)):
            taken = seconds_by_rows(fresh, on_core)
            one.expected |= {rows: taken[rows] for rows in new}
        # Between the steps of a sweep live batches find the caches full of other data.
        if self._steps is not None:
            return
        has_grown = 0 < GROWN * one.confirmed_rows < one.rows
        is_off = off is not None and not 1 / OFF <= off <= OFF
        one.looks_off = one.looks_off + 1 if is_off or has_grown else 0
        if one.looks_off >= 2:
            logger.info(
                "batches of %s have %.3g rows (%.3g when the choice was confirmed) and take %.3g times as long as was "
                "measured", one.loaded, one.rows, one.confirmed_rows, off or 1.0,
            )  # fmt: skip
            one.looks_off, one.rounds, one.due_s = 0, 0, self._machine.clock()
            one.expected = {}
            one.decided.clear()

    # Sweeps.

    def _next_due(self) -> Watched | None:
        now_s = self._machine.clock()
        due = [one for one in self._watched.values() if one.has_worked and one.due_s <= now_s]
        return max(due, key=lambda one: one.worked_s, default=None)

    def _sweep(self, one: Watched) -> Steps[None]:
        one.worked_s, one.batches = 0.0, 0
        leaves_out = bool(one.decided.ways or one.decided.keys)
        try:
            sweep = Sweep(
                one.loaded,
                self._place,
                self._machine,
                self._budget,
                self._record,
                one.served.exchanged,
                one.decided,
            )
            changed = yield from sweep.steps()
        except Gone:  # another version, or the original after drift: looked at again when it has worked
            one.expected = {}
        except NotReady:  # the server is stopping
            one.due_s = float("inf")
        except Exception:
            logger.exception("%s could not be measured again; it serves as it is", one.loaded)
            one.due_s = self._machine.clock() + LONGEST_S
        else:
            one.expected = {}  # what live batches take from now on
            if changed:
                one.rounds, one.confirmed_rows = 0, 0.0
                return
            one.decided.clear()
            if sweep.crowded or leaves_out:
                one.due_s = self._machine.clock() + AGAIN_S
            else:
                self._confirm(one, sweep)

    def _confirm(self, one: Watched, sweep: Sweep) -> None:
        one.rounds += CONFIRMS
        one.confirmed_rows = max(one.confirmed_rows, one.rows)
        one.due_s = self._machine.clock() + _pause_s(one.rounds)
        way, measured = sweep.way, sweep.measured
        keep_setup(
            one.loaded.version,
            way.form,
            way.precision,
            self._place.device,
            way.setup,
            [measured],
            rounds=one.rounds,
            rows=one.confirmed_rows,
        )


def _pause_s(rounds: int) -> float:
    """The seconds from the sweep that confirmed a choice for so many rounds in a row to the next one."""
    return min(FIRST_S * 2.0 ** min(rounds // CONFIRMS - 1, _MOST_DOUBLINGS), LONGEST_S)
