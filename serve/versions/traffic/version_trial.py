"""A new version on trial beside the one that it replaces or, as a canary, may replace.

A request that the new version cannot answer is answered by the other one, so that no caller fails because of it. A
fault of the new version alone is counted; a request that fails with both versions is the request's own fault.
"""

import asyncio
import math
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ....models.errors import (
    BadRequest,
    CannotServe,
    EngineFailed,
    HalfevenError,
    NotReady,
    Overloaded,
    TimedOut,
)
from ....models.spec.spec import ModelSpec
from ...batching.admission import UNCOUNTED
from ...batching.counters import Counters
from ...batching.interface import NO_TERMS, Answer, Submit, Terms
from .rules import TrialRules

Future = asyncio.Future[Answer]
Reject = Callable[[str, dict[str, Any]], None]
# Seconds of a batch of so many rows of both versions, the new one's first; None where one cannot be run now.
Timed = Callable[[int], tuple[float, float] | None]
RUNS = 3  # of both versions, before the new one is rejected for its time
ANSWERS_REMEMBERED = 1000  # then both counts are halved: long-past faults weigh less
MOST_SECOND_OPINIONS = 8
# The request is put to the other version after these errors: BadRequest is an engine's too, for an id that is outside
# of its table, and the other version's table may be larger.
_FAILED = (EngineFailed, BadRequest)
LOOKED_AT = 2**20  # elements: of a larger batch only that many are checked on the event loop


class VersionTrial:
    """Stands in front of ``own``, the new version. ``reject`` is called once, with the reason and the numbers.

    ``spills``: while its queue is full, the other version answers (so for a canary). ``clock`` gives nanoseconds.
    """

    def __init__(
        self,
        spec: ModelSpec,
        own: Submit,
        other: Submit,
        rules: TrialRules,
        reject: Reject,
        spills: bool,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._spec, self._own, self._other, self._clock = spec, own, other, clock
        self._rules = rules
        self._reject: Reject | None = reject
        self._refusals: tuple[type[CannotServe], ...] = (NotReady, Overloaded) if spills else (NotReady,)
        self._when_asked = UNCOUNTED if spills else nullcontext()
        self._lock = threading.Lock()
        self._clean: list[weakref.ref[np.ndarray]] = []  # the batch whose outputs were found finite last
        self._asking = self._compared = 0
        self.answers = 0
        self.faults = {"failed": 0, "not finite": 0, "rescued": 0}

    def submit(self, arrays: Sequence[np.ndarray], rows: int, terms: Terms = NO_TERMS) -> Future:
        try:
            with self._when_asked:
                inner = self._own.submit(arrays, rows, terms)
        except self._refusals:
            return self._other.submit(arrays, rows, terms)
        outer: Future = asyncio.get_running_loop().create_future()
        timeout_ns = terms.timeout_ns or self._spec.batching.timeout_ms * 1_000_000
        until_ns = self._clock() + timeout_ns if timeout_ns else 0
        outer.add_done_callback(partial(_leave_with, inner))
        inner.add_done_callback(partial(self._came, outer, arrays, rows, terms, until_ns))
        return outer

    def _came(
        self,
        outer: Future,
        arrays: Sequence[np.ndarray],
        rows: int,
        terms: Terms,
        until_ns: int,
        inner: Future,
    ) -> None:
        if inner.cancelled() or outer.done():
            outer.cancel()
        elif (error := inner.exception()) is None:
            answer = inner.result()
            outer.set_result(answer)
            asyncio.get_running_loop().call_soon(self._look_at, arrays, rows, answer)
        elif isinstance(error, _FAILED):
            self._ask_other(outer, arrays, rows, terms, until_ns, error)
        else:
            outer.set_exception(error)

    def _ask_other(
        self,
        outer: Future,
        arrays: Sequence[np.ndarray],
        rows: int,
        terms: Terms,
        until_ns: int,
        error: BaseException,
    ) -> None:
        """Ask the other version, with what is left of the request's timeout (``until_ns``; 0: it has none)."""
        if until_ns:
            left_ns = until_ns - self._clock()
            if left_ns <= 0:
                outer.set_exception(_out_of_time(self._spec.name, error))
                return
            terms = replace(terms, timeout_ns=left_ns)
        try:
            with UNCOUNTED:
                second = self._other.submit(arrays, rows, terms)
        except HalfevenError:
            outer.set_exception(error)
            return
        outer.add_done_callback(partial(_leave_with, second))
        second.add_done_callback(partial(self._second_came, outer, error))

    def _second_came(self, outer: Future, error: BaseException, second: Future) -> None:
        if second.cancelled() or outer.done():
            outer.cancel()
        elif (theirs := second.exception()) is not None:
            outer.set_exception(theirs if isinstance(theirs, TimedOut) else error)
        else:
            outer.set_result(second.result())
            self._blame("failed", str(error))

    # Answers of the new version.

    def _look_at(self, arrays: Sequence[np.ndarray], rows: int, answer: Answer) -> None:
        self.answers += 1
        if self.answers >= ANSWERS_REMEMBERED:
            with self._lock:
                self.answers //= 2
                self.faults = {what: count // 2 for what, count in self.faults.items()}
        if what := self._fault_of(answer):
            self._second_opinion(what, arrays, rows)

    def _fault_of(self, answer: Answer) -> str | None:
        if answer.rescued:
            return "rescued"
        batch = [_batch_of(output) for output in answer.outputs]
        if len(batch) == len(self._clean) and all(map(_is_same, batch, self._clean)):
            return None
        if all(map(_is_finite, batch)):
            self._clean = list(map(weakref.ref, batch))
            return None
        return None if all(map(_is_finite, answer.outputs)) else "not finite"

    def _second_opinion(self, what: str, arrays: Sequence[np.ndarray], rows: int) -> None:
        """Ask the other version too. Infinities can be a model's right answer: a fault only where the other has
        none."""
        if self._asking >= MOST_SECOND_OPINIONS:
            return
        try:
            with UNCOUNTED:
                second = self._other.submit(arrays, rows)
        except HalfevenError:
            return
        self._asking += 1
        second.add_done_callback(partial(self._opinion_came, what))

    def _opinion_came(self, what: str, second: Future) -> None:
        self._asking -= 1
        if second.cancelled() or second.exception() is not None:
            return
        other = second.result()
        if not other.rescued and all(map(_is_finite, other.outputs)):
            self._blame(what, f"an answer was {what}, the other version's to the same request was not")

    def _blame(self, what: str, example: str) -> None:
        self.faults[what] += 1
        faults = sum(self.faults.values())
        if faults >= self._rules.faults and faults >= self._rules.fault_share * self.answers:
            share = f"{faults} of {max(self.answers, faults)} answers"
            self.end(f"{share} were faults that the other version did not commit; the last: {example}")

    # Time.

    def look_at_time(self, own: Counters, other: Counters, timed: Timed) -> None:
        """Compare mean batch times at equal batch sizes: load makes batches larger, which is no fault of a version.

        The other version's batches may be of a calmer hour, and of shorter requests: where its own seem too slow,
        ``timed`` lets both run the same batch in turns, and that decides. After each such comparison, ``timed_batches``
        more are needed for the next.
        """
        found, limit = slowness(own, other), self._rules.slower
        if found.ratio <= limit or found.batches - self._compared < self._rules.timed_batches:
            return
        self._compared = found.batches
        if (ratio := ratio_now(timed, found.rows, limit)) > limit:
            self.end(
                f"a batch of {found.rows} rows takes {ratio:.2f} times as long as the same batch of the other version "
                f"(at most {limit:g} is allowed), as do {found.batches} batches of callers",
                {"slower": ratio, "batches": found.batches},
            )

    def end(self, why: str, more: Mapping[str, Any] | None = None) -> None:
        """Reject, once."""
        with self._lock:
            reject, self._reject = self._reject, None
        if reject is not None:
            reject(why, self.numbers() | dict(more or {}))

    def clear(self) -> None:
        """End the trial without a decision."""
        with self._lock:
            self._reject = None

    def numbers(self) -> dict[str, Any]:
        return {"answers": self.answers, "faults": dict(self.faults)}


class Slowness(NamedTuple):
    """The ratio of the batches' time to the other version's, over how many batches, and the size at which most time was
    lost."""

    ratio: float = 1.0
    batches: int = 0
    rows: int = 0


def slowness(own: Counters, other: Counters) -> Slowness:
    """The slowness of ``own`` beside ``other``, of equal batch sizes only."""
    spent_ns = expected_ns = 0.0
    batches, lost_ns = 0, dict[int, float]()
    for rows, (count, took_ns) in own.batches.items():
        theirs, theirs_ns = other.batches.get(rows, (0, 0))
        if theirs:
            spent_ns += took_ns
            expected_ns += theirs_ns / theirs * count
            batches += count
            lost_ns[rows] = took_ns - theirs_ns / theirs * count
    if not expected_ns:
        return Slowness()
    return Slowness(spent_ns / expected_ns, batches, max(lost_ns, key=lost_ns.__getitem__))


def ratio_now(timed: Timed, rows: int, limit: float) -> float:
    """The ratio of a batch's time to the other version's: of each the shortest of `RUNS` runs, fewer where one is not
    above the limit. 1 where the two cannot be run."""
    own_s = other_s = math.inf
    for _ in range(RUNS):
        if (taken := timed(rows)) is None:
            return 1.0
        own_s, other_s = min(own_s, taken[0]), min(other_s, taken[1])
        if own_s <= limit * other_s:
            break
    return own_s / max(other_s, 1e-9)


def _out_of_time(model: str, error: BaseException) -> TimedOut:
    return TimedOut(
        f"Request timeout expired: the version of model '{model}' on trial failed ({error}), and no time was left to "
        "ask the other one; allow more time, or send the request again"
    )


def _leave_with(inner: Future, outer: Future) -> None:
    if outer.cancelled():
        inner.cancel()


def _batch_of(output: np.ndarray) -> np.ndarray:
    return output.base if isinstance(output.base, np.ndarray) else output


def _is_same(batch: np.ndarray, seen: weakref.ref[np.ndarray]) -> bool:
    return seen() is batch


def _is_finite(output: np.ndarray) -> bool:
    if output.dtype.kind in "iub":
        return True
    looked_at = output if output.size <= LOOKED_AT else output.reshape(-1)[:: output.size // LOOKED_AT]
    return bool(np.isfinite(looked_at).all())
