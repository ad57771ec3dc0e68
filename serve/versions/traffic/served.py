"""One name and its loaded versions: the stable one, the canary, the shadow and the previous one.

`TrafficState` says which version has which role. It is replaced as one object, so a request sees one state of it. A
version that has no role any more is closed by the roster.

`submit` goes through a chain of objects that all have `submit` (`batching.interface.Submit`): a traffic split, a shadow
and a version trial where there are any, then the loaded version.
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
from ....models.spec.spec import ModelSpec
from ...batching.batcher import Batcher
from ...batching.counters import Counters
from ...batching.interface import NO_TERMS, Answer, PreparedVersion, Submit, Terms
from .automatic_decisions import AutomaticDecisions
from .comparison import scale_of
from .loaded_version import LoadedVersion
from .recent import Recent
from .rules import TrialRules
from .shadow import Shadow
from .split import Sticky
from .version_trial import VersionTrial

LABELS = ("stable", "canary", "shadow", "previous")
SHORTEST_DIGEST = 8


@dataclass(frozen=True, slots=True)
class TrafficState:
    """``front``: what takes every request; it is here so that no request goes to another version than the spec of
    `ServedModel` is of. ``on_trial``: the stable version is watched against the previous one, kept until ``until``."""

    stable: LoadedVersion
    front: Submit
    previous: LoadedVersion | None = None
    until: float = 0.0
    on_trial: bool = False
    canary: LoadedVersion | None = None
    canary_percent: float = 0.0
    shadow: LoadedVersion | None = None
    shadow_percent: float = 0.0

    def loaded_versions(self) -> dict[LoadedVersion, str]:
        """Each loaded version once, under its first label."""
        named: dict[LoadedVersion, str] = {}
        for label in LABELS:
            loaded: LoadedVersion | None = getattr(self, label)
            if loaded is not None:
                named.setdefault(loaded, label)
        return named


class ServedModel:
    """``judge`` compares answers and makes decisions durable; ``clock`` gives seconds."""

    def __init__(
        self, stable: LoadedVersion, rules: TrialRules, decisions: AutomaticDecisions, judge: Executor,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.name = stable.name
        self.traffic = TrafficState(stable, stable)
        self.shadow: Shadow | None = None
        self.leaving: list[LoadedVersion] = []
        self.recent = Recent(clock)
        self._trials: dict[tuple[LoadedVersion, LoadedVersion], VersionTrial] = {}
        self._rules, self._decisions, self._judge, self._clock = rules, decisions, judge, clock
        self._lock = threading.RLock()
        self._check(stable)

    # The methods that every caller sees (`batching.interface.Served`).

    def submit(
        self, arrays: Sequence[np.ndarray], rows: int, terms: Terms = NO_TERMS
    ) -> asyncio.Future[Answer]:
        """Queue one checked request with the version that is to answer it."""
        return self.traffic.front.submit(arrays, rows, terms)

    @property
    def spec(self) -> ModelSpec:
        return self.traffic.stable.spec

    @property
    def batcher(self) -> Batcher:
        return self.traffic.stable.batcher

    @property
    def prepared(self) -> PreparedVersion:
        return self.traffic.stable.prepared

    def counters(self) -> Counters:
        return self.traffic.stable.counters()

    def loaded_versions(self) -> list[LoadedVersion]:
        """Every loaded version, the active one first."""
        return list(self.traffic.loaded_versions())

    def loaded(self, version: str) -> LoadedVersion:
        """A loaded version by number, label or the first digits of a digest. Raises UnknownName."""
        loaded_versions = self.traffic.loaded_versions()
        for loaded in loaded_versions:
            if str(loaded.number) == version:
                return loaded
        if version in LABELS and (labelled := getattr(self.traffic, version)) is not None:
            return labelled
        if len(version) >= SHORTEST_DIGEST:
            found = [
                loaded for loaded in loaded_versions if any(d.startswith(version) for d in _digests(loaded))
            ]
            if len(found) == 1:
                return found[0]
        loaded = ", ".join(f"{loaded.number} ({label})" for loaded, label in loaded_versions.items())
        raise UnknownName(
            f"Request for unknown model: '{self.name}' version {version[:80]} is not found: loaded are {loaded}; "
            "ask by number, label or eight digits of the digest"
        )

    def describe(self) -> list[dict[str, Any]]:
        """Each loaded version with its label and its share of the traffic, as JSON."""
        traffic = self.traffic
        percent = {"canary": traffic.canary_percent, "stable": 100.0 - traffic.canary_percent}
        return [
            {
                "version": loaded.number,
                "label": label,
                "percent": percent.get(label, 0.0),
                "digest": loaded.prepared.digest,
                "precision": loaded.prepared.precision,
                "reason": loaded.prepared.reason,
            }
            | ({"on_trial": self._trial_numbers(loaded)} if self._trial_numbers(loaded) else {})
            | ({"shadow": self.shadow.numbers()} if self.shadow and self.shadow.loaded is loaded else {})
            for loaded, label in traffic.loaded_versions().items()
        ]

    def _trial_numbers(self, loaded: LoadedVersion) -> dict[str, Any]:
        return next((trial.numbers() for (own, _), trial in self._trials.items() if own is loaded), {})

    # Changes; each takes effect between two requests.

    def activate(self, loaded: LoadedVersion) -> None:
        """Make ``loaded`` the active version and the active one the previous. A newer version is on trial while the
        previous one is kept, where that takes the same requests. A canary or shadow that takes others ends. The same
        version loaded again only takes the place."""
        self._check(loaded)
        with self._lock:
            old = self.traffic
            kept = (
                old.stable if old.stable.number != loaded.number and self._rules.keep_previous_s > 0 else None
            )
            changes: dict[str, Any] = {"stable": loaded, "previous": kept}
            changes["until"] = self._clock() + self._rules.keep_previous_s
            changes["on_trial"] = kept is not None and loaded.number > kept.number
            for role in ("canary", "shadow"):
                if (held := getattr(old, role)) is not None and held.number == loaded.number:
                    changes |= {role: None, f"{role}_percent": 0.0}
            self._post(**changes)

    def set_canary(self, loaded: LoadedVersion | None, percent: float = 0.0) -> None:
        if loaded is not None:
            self._check(loaded)
        with self._lock:
            self._post(canary=loaded, canary_percent=percent if loaded else 0.0)

    def set_shadow(self, loaded: LoadedVersion | None, percent: float = 0.0) -> None:
        with self._lock:
            self._post(shadow=loaded, shadow_percent=percent if loaded else 0.0)

    def let_previous_go(self) -> None:
        """Keep the previous version no longer: the trial is over, or memory is needed."""
        with self._lock:
            self._post(previous=None, on_trial=False)

    def let_go_in_time(self) -> None:
        with self._lock:
            if self.traffic.previous is not None and self._clock() >= self.traffic.until:
                self.let_previous_go()

    def look_at_time(self) -> None:
        """Compare the batch times of the versions on trial with the others'. From any thread but the device's."""
        for (own, other), trial in list(self._trials.items()):
            if own.may_be_timed_beside(other):
                trial.look_at_time(own.counters(), other.counters(), partial(_timed, own, other))

    def note_recent(self) -> None:
        """Take the traffic of the last seconds into `recent`; a shadow's answers are nobody's."""
        self.recent.note(
            lambda: [
                counters
                for loaded, label in self.traffic.loaded_versions().items()
                if label != "shadow"
                for counters in loaded.all_counters()
            ]
        )

    def has(self, loaded: LoadedVersion) -> bool:
        """True if this version is active, the canary, the shadow or the previous one, or was and waits to be
        closed."""
        with self._lock:
            return loaded in self.traffic.loaded_versions() or loaded in self.leaving

    def take_leaving(self) -> list[LoadedVersion]:
        with self._lock:
            leaving, self.leaving = self.leaving, []
            return leaving

    def end(self) -> list[LoadedVersion]:
        """Every loaded version, to be closed."""
        with self._lock:
            for trial in self._trials.values():
                trial.clear()
            return [*self.take_leaving(), *self.traffic.loaded_versions()]

    # The decisions of the server itself.

    def drifted(self, loaded: LoadedVersion, numbers: dict[str, Any]) -> None:
        """Fall back: from now on the original answers in the half's place. A canary or a version on trial is rejected
        too."""
        why = (
            f"drift: {numbers['recent_over']} of the last {numbers['recent']} live requests that the FP32 original "
            f"answered too lie beyond the gate's limit"
        )
        if loaded.fall_back(why):
            self._decisions.fell_back(loaded, why, numbers)
        self.reject(loaded, why, numbers)

    def reject(self, loaded: LoadedVersion, why: str, numbers: dict[str, Any]) -> None:
        """Reject a canary or a version on trial, at once; the decision is made durable on the judge's thread."""
        with self._lock:
            traffic = self.traffic
            if loaded is traffic.canary:
                self._post(canary=None, canary_percent=0.0)
                self._later(partial(self._decisions.canary_ended, loaded, why, numbers))
            elif loaded is traffic.stable and traffic.on_trial and traffic.previous is not None:
                good = traffic.previous
                self._post(stable=good, previous=None, on_trial=False)
                self._later(partial(self._decisions.rolled_back, loaded, good, why, numbers))

    def exchanged(self, loaded: LoadedVersion) -> None:
        """Another form of the version serves: a half is checked against its original from now on."""
        self._check(loaded)

    def _later(self, deed: Callable[[], None]) -> None:
        try:
            self._judge.submit(deed)
        except RuntimeError:  # the server is shutting down
            deed()

    def _check(self, loaded: LoadedVersion) -> None:
        if loaded.drift is None:
            scale = scale_of(loaded.version, loaded.prepared.engine.form)
            most = self._rules.keep_drifted
            keep = partial(self._decisions.keep_inputs, loaded, most=most) if most else None
            loaded.check(scale, self._rules, self._judge, partial(self.drifted, loaded), keep)

    def _post(self, **changes: Any) -> None:
        old, asked = self.traffic, replace(self.traffic, **changes)
        new = self._fitting(asked)
        self._shadow_for(new)
        self.traffic = replace(new, front=self._route(new))
        for loaded, label in new.loaded_versions().items():
            loaded.label = label
        used = new.loaded_versions()
        # A version that waited to be closed may be in use again.
        before = dict.fromkeys([*self.leaving, *old.loaded_versions(), *asked.loaded_versions()])
        self.leaving = [loaded for loaded in before if loaded not in used]

    def _fitting(self, traffic: TrafficState) -> TrafficState:
        """The traffic without a canary, a shadow or a trial whose version has other inputs or outputs than the active
        version: it cannot answer the same requests."""
        stable, canary, shadow, previous = traffic.stable, traffic.canary, traffic.shadow, traffic.previous
        why = f"{stable} is active and has other inputs or outputs"
        changes: dict[str, Any] = {}
        if canary is not None and not takes_requests_of(stable.spec, canary.spec):
            changes |= {"canary": None, "canary_percent": 0.0}
            self._later(partial(self._decisions.canary_ended, canary, why, {}))
        if shadow is not None and not takes_requests_of(stable.spec, shadow.spec):
            changes |= {"shadow": None, "shadow_percent": 0.0}
            self._later(partial(self._decisions.shadow_ended, shadow, why))
        if previous is not None and not takes_requests_of(stable.spec, previous.spec):
            changes["on_trial"] = False
        return replace(traffic, **changes)

    def _shadow_for(self, traffic: TrafficState) -> None:
        old, loaded = self.shadow, traffic.shadow
        if old is not None and (old.loaded is not loaded or old.percent != traffic.shadow_percent):
            old.end()
            self.shadow = None
        if loaded is not None and self.shadow is None:
            scale = scale_of(traffic.stable.version)
            self.shadow = Shadow(loaded, traffic.shadow_percent, scale, self._judge)

    def _route(self, traffic: TrafficState) -> Submit:
        trials = dict(self._trials_of(traffic))
        for pair, trial in self._trials.items():
            if pair not in trials:
                trial.clear()
        self._trials = trials
        stable, canary = traffic.stable, traffic.canary
        front: Submit = stable
        if traffic.previous is not None and traffic.on_trial:
            front = trials[stable, traffic.previous]
        if self.shadow is not None:
            front = self.shadow.behind(front)
        if canary is None:
            return front
        share = Sticky(traffic.canary_percent / 100, f"{self.name}@{canary.number}")
        return _Split(front, trials[canary, stable], share, canary.spec.max_request_rows)

    def _trials_of(
        self, traffic: TrafficState
    ) -> Iterator[tuple[tuple[LoadedVersion, LoadedVersion], VersionTrial]]:
        """The trials of this traffic: those under way, and new ones."""
        pairs: list[tuple[LoadedVersion, LoadedVersion, bool]] = []
        if traffic.previous is not None and traffic.on_trial:
            pairs.append((traffic.stable, traffic.previous, False))
        if traffic.canary is not None:
            pairs.append((traffic.canary, traffic.stable, True))
        for own, other, spills in pairs:
            known = self._trials.get((own, other))
            reject = partial(self.reject, own)
            yield (own, other), known or VersionTrial(own.spec, own, other, self._rules, reject, spills)


class _Split:
    """The traffic split: the canary's share of the requests goes to the canary, unless a request is too large for
    it."""

    def __init__(self, stable: Submit, canary: Submit, share: Sticky, most_rows: int) -> None:
        self._stable, self._canary, self._share, self._most_rows = stable, canary, share, max(most_rows, 1)

    def submit(
        self, arrays: Sequence[np.ndarray], rows: int, terms: Terms = NO_TERMS
    ) -> asyncio.Future[Answer]:
        to_canary = self._share.takes(terms.key) and rows <= self._most_rows
        return (self._canary if to_canary else self._stable).submit(arrays, rows, terms)


def _timed(own: LoadedVersion, other: LoadedVersion, rows: int) -> tuple[float, float] | None:
    """Seconds of a batch of each version, run one after the other; None where one of them cannot be run now."""
    mine, theirs = own.batch_seconds(rows), other.batch_seconds(rows)
    return None if mine is None or theirs is None else (mine, theirs)


def _digests(loaded: LoadedVersion) -> tuple[str, ...]:
    return (loaded.prepared.digest, loaded.version.digest)


def takes_requests_of(mine: ModelSpec, theirs: ModelSpec) -> bool:
    """True if a request that was checked against the spec ``mine`` is valid for the spec ``theirs`` too. Ranges of
    ids are compared where both specs have them; elsewhere the engine checks the ids."""
    plain = [tuple(replace(tensor, range=None) for tensor in spec.inputs) for spec in (mine, theirs)]
    ranges = [(one.range, other.range) for one, other in zip(mine.inputs, theirs.inputs, strict=False)]
    return (plain[0], mine.outputs, mine.batched) == (plain[1], theirs.outputs, theirs.batched) and all(
        one is None or other is None or one.within(other) for one, other in ranges
    )
