"""One name and its loaded versions: who is on duty, who is tried, who watches, and who stands by.

A posting says it all and is replaced as a whole; a request sees one posting. What a posting no longer names is
left for the roster to close.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ....models.errors import UnknownName
from ....models.spec import ModelSpec
from ...batching.batcher import Batcher
from ...batching.interface import NO_TERMS, Answer, OnDuty, Statistics, Submit, Terms
from .comparison import scale_of
from .decisions import Decisions
from .loaded_version import Lane
from .rules import Rules
from .shadow import Shadow
from .split import Sticky
from .trial import Trial

LABELS = ("stable", "canary", "shadow", "previous")
SHORTEST_DIGEST = 8


@dataclass(frozen=True, slots=True)
class Posting:
    """``on_trial``: the stable version is watched against the previous one, which is kept until ``until``."""

    stable: Lane
    previous: Lane | None = None
    until: float = 0.0
    on_trial: bool = False
    canary: Lane | None = None
    canary_percent: float = 0.0
    shadow: Lane | None = None
    shadow_percent: float = 0.0

    def lanes(self) -> dict[Lane, str]:
        """Each loaded version once, under its first label."""
        named: dict[Lane, str] = {}
        for label in LABELS:
            lane: Lane | None = getattr(self, label)
            if lane is not None:
                named.setdefault(lane, label)
        return named


class ServedModel:
    """``judge`` compares answers and makes decisions durable; ``clock`` gives seconds."""

    def __init__(
        self, stable: Lane, rules: Rules, decisions: Decisions, judge: Executor,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.name = stable.name
        self.posting = Posting(stable)
        self.shadow: Shadow | None = None
        self.leaving: list[Lane] = []
        self._trials: dict[tuple[Lane, Lane], Trial] = {}
        self._rules, self._decisions, self._judge, self._clock = rules, decisions, judge, clock
        self._lock = threading.RLock()
        self._front: Submit = stable
        self._check(stable)

    # As every caller sees it (`duty.Served`).

    def submit(
        self, arrays: Sequence[np.ndarray], rows: int, terms: Terms = NO_TERMS
    ) -> asyncio.Future[Answer]:
        """Queue one checked request with the version that is to answer it."""
        return self._front.submit(arrays, rows, terms)

    @property
    def spec(self) -> ModelSpec:
        return self.posting.stable.spec

    @property
    def batcher(self) -> Batcher:
        return self.posting.stable.batcher

    @property
    def duty(self) -> OnDuty:
        return self.posting.stable.duty

    def statistics(self) -> Statistics:
        return self.posting.stable.statistics()

    def lanes(self) -> list[Lane]:
        """Every loaded version, the one on duty first."""
        return list(self.posting.lanes())

    def lane(self, version: str) -> Lane:
        """A loaded version by number, label or the first digits of a digest. Raises UnknownName."""
        lanes = self.posting.lanes()
        for lane in lanes:
            if str(lane.number) == version:
                return lane
        if version in LABELS and (labelled := getattr(self.posting, version)) is not None:
            return labelled
        if len(version) >= SHORTEST_DIGEST:
            found = [lane for lane in lanes if any(d.startswith(version) for d in _digests(lane))]
            if len(found) == 1:
                return found[0]
        loaded = ", ".join(f"{lane.number} ({label})" for lane, label in lanes.items())
        raise UnknownName(
            f"Request for unknown model: '{self.name}' version {version[:80]} is not found: loaded are {loaded}; "
            "ask by number, label or eight digits of the digest"
        )

    def describe(self) -> list[dict[str, Any]]:
        """Each loaded version with its label and its share of the traffic, as JSON."""
        posting = self.posting
        percent = {"canary": posting.canary_percent, "stable": 100.0 - posting.canary_percent}
        return [
            {
                "version": lane.number,
                "label": label,
                "percent": percent.get(label, 0.0),
                "digest": lane.duty.digest,
                "precision": lane.duty.precision,
                "reason": lane.duty.reason,
            }
            | ({"on_trial": self._trial_numbers(lane)} if self._trial_numbers(lane) else {})
            | ({"shadow": self.shadow.numbers()} if self.shadow and self.shadow.lane is lane else {})
            for lane, label in posting.lanes().items()
        ]

    def _trial_numbers(self, lane: Lane) -> dict[str, Any]:
        return next((trial.numbers() for (own, _), trial in self._trials.items() if own is lane), {})

    # Changes; each takes effect between two requests.

    def put_on_duty(self, lane: Lane) -> None:
        """The version on duty becomes the previous one. A newer version is on trial for as long as that is kept.

        The same version loaded again simply takes the place.
        """
        self._check(lane)
        with self._lock:
            old = self.posting
            kept = (
                old.stable if old.stable.number != lane.number and self._rules.keep_previous_s > 0 else None
            )
            changes: dict[str, Any] = {"stable": lane, "previous": kept}
            changes["until"] = self._clock() + self._rules.keep_previous_s
            changes["on_trial"] = kept is not None and lane.number > kept.number
            for role in ("canary", "shadow"):
                if (held := getattr(old, role)) is not None and held.number == lane.number:
                    changes |= {role: None, f"{role}_percent": 0.0}
            self._post(**changes)

    def set_canary(self, lane: Lane | None, percent: float = 0.0) -> None:
        if lane is not None:
            self._check(lane)
        with self._lock:
            self._post(canary=lane, canary_percent=percent if lane else 0.0)

    def set_shadow(self, lane: Lane | None, percent: float = 0.0) -> None:
        with self._lock:
            self._post(shadow=lane, shadow_percent=percent if lane else 0.0)

    def let_previous_go(self) -> None:
        """The trial is over, or memory is wanted."""
        with self._lock:
            self._post(previous=None, on_trial=False)

    def let_go_in_time(self) -> None:
        with self._lock:
            if self.posting.previous is not None and self._clock() >= self.posting.until:
                self.let_previous_go()

    def look_at_time(self) -> None:
        """Hold the versions on trial against the others' batch times."""
        for (own, other), trial in list(self._trials.items()):
            trial.look_at_time(own.tally(), other.tally())

    def take_leaving(self) -> list[Lane]:
        with self._lock:
            leaving, self.leaving = self.leaving, []
            return leaving

    def end(self) -> list[Lane]:
        """Every lane, to be closed."""
        with self._lock:
            for trial in self._trials.values():
                trial.acquit()
            return [*self.take_leaving(), *self.posting.lanes()]

    # What is decided here.

    def drifted(self, lane: Lane, numbers: dict[str, Any]) -> None:
        """The whole answers in the half's place from now on; on trial or as a canary the version goes as well."""
        why = (
            f"drift: {numbers['recent_over']} of the last {numbers['recent']} live requests that the FP32 whole "
            f"answered too lie beyond the gate's limit"
        )
        if lane.relieve(why):
            self._decisions.relieved(lane, why, numbers)
        self.condemn(lane, why, numbers)

    def condemn(self, lane: Lane, why: str, numbers: dict[str, Any]) -> None:
        """A version on trial goes, at once; what makes it durable follows on the judge's thread."""
        with self._lock:
            posting = self.posting
            if lane is posting.canary:
                self._post(canary=None, canary_percent=0.0)
                self._later(partial(self._decisions.canary_ended, lane, why, numbers))
            elif lane is posting.stable and posting.on_trial and posting.previous is not None:
                good = posting.previous
                self._post(stable=good, previous=None, on_trial=False)
                self._later(partial(self._decisions.rolled_back, lane, good, why, numbers))

    def _later(self, deed: Callable[[], None]) -> None:
        try:
            self._judge.submit(deed)
        except RuntimeError:  # the server is shutting down
            deed()

    def _check(self, lane: Lane) -> None:
        if lane.drift is None:
            scale = scale_of(lane.version, lane.duty.engine.form)
            lane.check(scale, self._rules, self._judge, partial(self.drifted, lane))

    def _post(self, **changes: Any) -> None:
        old, new = self.posting, replace(self.posting, **changes)
        self._shadow_for(new)
        front = self._route(new)
        self.posting, self._front = new, front
        for lane, label in new.lanes().items():
            lane.label = label
        self.leaving += [lane for lane in old.lanes() if lane not in new.lanes()]

    def _shadow_for(self, posting: Posting) -> None:
        old, lane = self.shadow, posting.shadow
        if old is not None and (old.lane is not lane or old.percent != posting.shadow_percent):
            old.end()
            self.shadow = None
        if lane is not None and self.shadow is None:
            scale = scale_of(posting.stable.version)
            self.shadow = Shadow(lane, posting.shadow_percent, scale, self._judge)

    def _route(self, posting: Posting) -> Submit:
        trials = dict(self._trials_of(posting))
        for pair, trial in self._trials.items():
            if pair not in trials:
                trial.acquit()
        self._trials = trials
        stable, canary = posting.stable, posting.canary
        front: Submit = stable
        if posting.previous is not None and posting.on_trial:
            front = trials[stable, posting.previous]
        if self.shadow is not None:
            front = self.shadow.behind(front)
        if canary is None:
            return front
        share = Sticky(posting.canary_percent / 100, f"{self.name}@{canary.number}")
        return _Split(front, trials[canary, stable], share, canary.spec.max_batch_size)

    def _trials_of(self, posting: Posting) -> Iterator[tuple[tuple[Lane, Lane], Trial]]:
        """Those that go on, and new ones."""
        pairs: list[tuple[Lane, Lane, bool]] = []
        if posting.previous is not None and posting.on_trial:
            pairs.append((posting.stable, posting.previous, False))
        if posting.canary is not None:
            pairs.append((posting.canary, posting.stable, True))
        for own, other, spills in pairs:
            known = self._trials.get((own, other))
            condemn = partial(self.condemn, own)
            yield (own, other), known or Trial(own.spec, own, other, self._rules, condemn, spills)


class _Split:
    """A canary's share of the requests goes to the canary; one that its batches cannot take does not."""

    def __init__(self, stable: Submit, canary: Submit, share: Sticky, most_rows: int) -> None:
        self._stable, self._canary, self._share, self._most_rows = stable, canary, share, max(most_rows, 1)

    def submit(
        self, arrays: Sequence[np.ndarray], rows: int, terms: Terms = NO_TERMS
    ) -> asyncio.Future[Answer]:
        to_canary = self._share.takes(terms.key) and rows <= self._most_rows
        return (self._canary if to_canary else self._stable).submit(arrays, rows, terms)


def _digests(lane: Lane) -> tuple[str, ...]:
    return (lane.duty.digest, lane.version.digest)
