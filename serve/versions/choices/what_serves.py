"""The engine that serves a loaded version, and how another takes its place: for a moment in a trial, or to stay."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from ....models.engines.engine import Engine
from ...batching.interface import PreparedVersion, ServableForm
from ...batching.place import Place
from ..loading.cpu_choice import TimedSetup
from ..loading.tuned import Way, Winner, correct_tuned, tuned_for, way_of
from ..traffic.loaded_version import LoadedVersion
from .live import Batches
from .rounds import Verdict

_MARK = "; while serving: "  # in a reason, in front of the last correction
Record = Callable[[str, str, str, Mapping[str, Any]], None]


class Gone(Exception):
    """The version does not serve any more, or by another engine."""


@dataclass(slots=True, eq=False)
class WhatServes:
    """The engine that serves now (``engine``), and what its batches took in this sweep (``taken``)."""

    loaded: LoadedVersion
    place: Place
    record: Record
    engine: Engine = field(init=False)
    taken: TimedSetup = field(init=False)

    def __post_init__(self) -> None:
        self.begin()

    def begin(self, taken: TimedSetup | None = None) -> None:
        self.engine, self.taken = self.prepared.engine, taken or TimedSetup(self.way.setup, {})

    @property
    def prepared(self) -> PreparedVersion:
        return self.loaded.prepared

    @property
    def way(self) -> Way:
        return way_of(self.prepared)

    @property
    def form(self) -> ServableForm | None:
        """The form that serves; None after the drift of a half that was asked for: FP32 then serves without choice."""
        forms = self.prepared.forms
        now = self.way
        return next((one for one in forms if (one.form, one.precision) == (now.form, now.precision)), None)

    @property
    def limit(self) -> int:
        """The most rows of a batch now; 0: not batched."""
        return self.rows_of(self.prepared)

    def rows_of(self, prepared: PreparedVersion) -> int:
        """The most rows of a batch that ``prepared`` would serve; 0: not batched."""
        most = self.loaded.spec.max_batch_size
        return min(prepared.useful_rows or most, most)

    @property
    def possible(self) -> frozenset[str]:
        return frozenset(self.engine.possible)

    def allowed(self) -> None:
        """Raises Gone where the engine served and does not any more. On the device thread, which closes engines."""
        if not self.loaded.serves_by(self.engine):
            raise self.gone()

    def gone(self) -> Gone:
        return Gone(f"{self.loaded} is served by another engine, or not any more")

    def batches(self) -> Batches:
        return self.loaded.counters().batches

    # Another in its place.

    def by(self, form: ServableForm, engine: Engine, rows: int) -> PreparedVersion:
        """The version that serves, by another engine in batches of up to ``rows`` (0: of all that fit)."""
        return replace(
            self.prepared,
            engine=engine,
            precision=form.precision,
            digest=form.digest,
            setup=engine.setup,
            original=self._original_beside(form),
            useful_rows=rows,
        )

    def _original_beside(self, form: ServableForm) -> Engine | None:
        """The FP32 engine that stands by a half: the one that did, or the one that served."""
        if form.precision == "fp32" or not self.place.rescue:
            return None
        return self.engine if self.prepared.precision == "fp32" else self.prepared.original

    def lend(self, rival: PreparedVersion, lent: bool) -> None:
        """Let the rival serve for a moment, or end that. Raises Gone."""
        if not (self.loaded.lend(self.engine, rival) if lent else self.loaded.take_back()):
            raise self.gone()

    def exchange(
        self, new: PreparedVersion, what: str, change: tuple[str, str], verdict: Verdict,
        taken: TimedSetup | None = None, keep: Callable[[], None] = lambda: None,
    ) -> bool:  # fmt: skip
        """Swap, correct a tuning that said otherwise, and tell. ``keep`` is called once the new engine serves, whose
        batches took ``taken``. Raises Gone."""
        sentence = _sentence(*change, verdict)
        new.reason = new.reason.partition(_MARK)[0] + _MARK + sentence
        if not self.loaded.exchange(self.engine, new):
            raise self.gone()
        keep()
        if new.engine is not self.engine:
            self.begin(taken)
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
        delay_us, rate = tuned.winner.queue_delay_us, tuned.winner.rows_per_second * max(gain, 1.0)
        winner = Winner.of(self.way, self.prepared.useful_rows, delay_us, rate)
        correct_tuned(version, device, winner, datetime.now(UTC).isoformat(timespec="seconds"), gain)


def _sentence(was: str, now: str, verdict: Verdict) -> str:
    how = f"{verdict.gain:.3g} times as fast" if verdict.gain else "as fast"
    of = " of live traffic" if verdict.live else ""
    return f"{now} instead of {was}, measured {how} in {verdict.rounds} rounds{of}"
