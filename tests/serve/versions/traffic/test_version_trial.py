"""A version on trial: nobody fails by it, and only what it alone gets wrong is held against it."""

import asyncio
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from halfeven.models.errors import BadRequest, EngineFailed, NotReady, Overloaded, TimedOut
from halfeven.serve.batching.admission import UNCOUNTED
from halfeven.serve.batching.counters import BOUNDS_NS, Counters
from halfeven.serve.batching.interface import NO_TERMS, Answer, PreparedVersion, Terms
from halfeven.serve.versions.traffic.rules import TrialRules
from halfeven.serve.versions.traffic.version_trial import VersionTrial, slowness

from tests.serve.batching import stage
from tests.serve.batching.stage import async_test
from tests.serve.versions.traffic.conftest import Engine, spec

X = [np.ones((1, 4), np.float32)]
Future = asyncio.Future[Answer]


@dataclass(eq=False)
class Queue:
    """A queue that answers at once with ``value``, or fails with ``fault``, or refuses; ``holds`` keeps the futures."""

    number: int
    value: float = 1.0
    fault: Exception | None = None
    refusal: Exception | None = None
    rescued: int = 0
    holds: bool = False
    futures: list[Future] = field(default_factory=list)
    timeouts_ns: list[int] = field(default_factory=list)

    def submit(self, arrays: Any, rows: int, terms: Terms = NO_TERMS) -> Future:
        self.timeouts_ns.append(terms.timeout_ns)
        if self.refusal is not None:
            raise self.refusal
        future: Future = asyncio.get_running_loop().create_future()
        self.futures.append(future)
        if not self.holds:
            self.settle(future)
        return future

    def settle(self, future: Future) -> None:
        if self.fault is not None:
            future.set_exception(self.fault)
        else:
            prepared = PreparedVersion(str(self.number), "d", "fp16", Engine(self.number))
            batch = np.full((3, 4), self.value, np.float32)
            future.set_result(Answer([batch[1:2]], prepared, 0, 0, 3, rescued=self.rescued))


class Court:
    """A trial of version 2 against version 1 and what came of it."""

    def __init__(self, spills: bool = False, **rules: Any) -> None:
        self.new, self.old = Queue(2), Queue(1)
        self.verdicts: list[tuple[str, dict[str, Any]]] = []
        self.now_ns = 0
        self.trial = VersionTrial(
            spec(), self.new, self.old, TrialRules(**rules), lambda *found: self.verdicts.append(found), spills,
            clock=lambda: self.now_ns,
        )  # fmt: skip

    async def ask(self, times: int = 1) -> list[str]:
        answered = [(await self.trial.submit(X, 1)).prepared.version for _ in range(times)]
        for _ in range(4):
            await asyncio.sleep(0)  # what it looks at once the caller has his answer
        return answered


@async_test
async def test_what_the_new_version_fails_the_old_one_answers_and_three_such_end_the_trial() -> None:
    court = Court()
    court.new.fault = EngineFailed("new kernels, old bug")
    assert await court.ask(2) == ["1", "1"]
    assert not court.verdicts
    assert await court.ask(3) == ["1", "1", "1"]
    ((why, numbers),) = court.verdicts
    assert "3 of 3 answers were faults that the other version did not commit; the last: new kernels" in why
    assert numbers["faults"]["failed"] == 3


@async_test
async def test_the_other_version_has_what_is_left_of_the_requests_timeout() -> None:
    court = Court()
    court.new.holds = True
    court.new.fault = EngineFailed("new kernels, old bug")
    answers = [court.trial.submit(X, 1, Terms(timeout_ns=1000)) for _ in range(2)]
    court.now_ns = 900
    court.new.settle(court.new.futures[0])
    assert (await answers[0]).prepared.version == "1"
    assert court.old.timeouts_ns == [100]
    court.now_ns = 1000
    court.new.settle(court.new.futures[1])
    with pytest.raises(TimedOut, match="no time was left"):
        await answers[1]
    assert court.old.timeouts_ns == [100], "it is not asked"


@async_test
async def test_what_only_the_new_versions_engine_refuses_the_old_one_answers() -> None:
    court = Court()
    court.new.fault = BadRequest("index 9 is outside of a table of 8 rows")
    assert await court.ask(3) == ["1", "1", "1"]
    assert len(court.verdicts) == 1
    court.old.fault = BadRequest("index 9 is outside here too")
    with pytest.raises(BadRequest, match="a table of 8 rows"):
        await court.ask()


@async_test
async def test_a_request_that_fails_with_both_is_its_own_fault() -> None:
    court = Court()
    court.new.fault, court.old.fault = EngineFailed("poison"), EngineFailed("poison here too")
    for _ in range(5):
        with pytest.raises(EngineFailed, match=r"poison$"):
            await court.ask()
    assert not court.verdicts


@async_test
async def test_answers_that_only_the_new_version_has_not_finite_end_the_trial() -> None:
    court = Court()
    court.new.value = np.nan
    assert await court.ask(3) == ["2", "2", "2"]
    assert "not finite" in court.verdicts[0][0]


@async_test
async def test_a_model_that_answers_infinities_by_right_is_not_blamed() -> None:
    court = Court()
    court.new.value = court.old.value = np.inf
    await court.ask(10)
    assert not court.verdicts


@async_test
async def test_rows_that_had_to_be_rescued_are_faults_unless_the_old_version_needs_it_too() -> None:
    court = Court()
    court.new.rescued = court.old.rescued = 1
    await court.ask(5)
    assert not court.verdicts
    court.old.rescued = 0
    await court.ask(3)
    assert "rescued" in court.verdicts[0][0]


@async_test
async def test_a_rare_fault_among_many_answers_is_borne() -> None:
    court = Court(fault_share=0.05)
    await court.ask(300)
    court.new.fault = EngineFailed("now and then")
    await court.ask(10)
    assert not court.verdicts, "10 of 300 is below 5 %"
    await court.ask(10)
    assert court.verdicts


@async_test
async def test_faults_of_long_ago_weigh_less() -> None:
    court = Court(fault_share=0.0)
    court.new.fault = EngineFailed("once")
    await court.ask(2)
    court.new.fault = None
    await court.ask(2001)
    assert court.trial.faults["failed"] == 0
    assert not court.verdicts


@async_test
async def test_a_caller_who_leaves_is_taken_from_the_queue_that_has_him() -> None:
    court = Court()
    court.new.holds = True
    future = court.trial.submit(X, 1)
    future.cancel()
    await asyncio.sleep(0)
    assert court.new.futures[0].cancelled()
    court.new.holds, court.old.holds = False, True
    court.new.fault = EngineFailed("asked elsewhere")
    future = court.trial.submit(X, 1)
    while not court.old.futures:
        await asyncio.sleep(0)
    future.cancel()
    await asyncio.sleep(0)
    assert court.old.futures[0].cancelled()


@async_test
async def test_a_full_queue_spills_over_from_a_canary_only() -> None:
    stable, canary = Court(), Court(spills=True)
    for court in (stable, canary):
        court.new.refusal = Overloaded("full")
    with pytest.raises(Overloaded):
        await stable.ask()
    assert await canary.ask() == ["1"]
    stable.new.refusal = NotReady("on its way out")
    assert await stable.ask() == ["1"]


@async_test
async def test_a_refusal_counts_only_where_the_caller_was_refused() -> None:
    toy = stage.spec(queue=1)
    async with (
        stage.serving(stage.Fake(), toy) as (canary, canary_device),
        stage.serving(stage.Fake(), toy) as (stable, stable_device),
    ):
        trial = VersionTrial(toy, canary, stable, TrialRules(), lambda *_: None, spills=True)
        canary_device.hold()
        waits = trial.submit(stage.rows_of(stage.POISON), 1)
        assert (await trial.submit(stage.rows_of(2), 1)).outputs[0] == 2

        def rejected() -> list[int]:
            return [one.all_counters()[0].rejected for one in (canary, stable)]

        assert rejected() == [0, 0], "the stable version has answered"
        stable_device.hold()
        stable_waits = stable.submit(stage.rows_of(3), 1)
        with pytest.raises(Overloaded):
            trial.submit(stage.rows_of(4), 1)
        assert rejected() == [0, 1]
        with UNCOUNTED, pytest.raises(Overloaded):  # as another trial asks this one
            trial.submit(stage.rows_of(5), 1)
        assert rejected() == [0, 1]
        canary_device.release()
        with pytest.raises(EngineFailed, match="poison"):
            await waits
        assert rejected() == [0, 1], "its caller was told of the canary's error"
        stable_device.release()
        await stable_waits


@async_test
async def test_a_trial_ends_once_and_an_cleared_one_never() -> None:
    court = Court()
    court.new.value = np.nan
    await court.ask(20)
    assert len(court.verdicts) == 1
    free = Court()
    free.trial.clear()
    free.new.value = np.nan
    await free.ask(20)
    assert not free.verdicts


@dataclass
class Runs:
    """The seconds of both versions' batches that are run in turns, and the sizes that were asked for."""

    seconds: list[tuple[float, float] | None]
    rows: list[int] = field(default_factory=list)

    def __call__(self, rows: int) -> tuple[float, float] | None:
        self.rows.append(rows)
        return self.seconds.pop(0)


def counters(**batches: tuple[int, int]) -> Counters:
    """The counters after given batches. ``r8=(5, 1000)``: five batches of 8 rows took 1000 ns together, each as long as
    the others."""
    made = Counters("1")
    made.batches = {int(rows[1:]): found for rows, found in batches.items()}
    for count, took_ns in batches.values():
        made.compute_buckets[bisect_left(BOUNDS_NS, took_ns // count)] += count
    return made


def test_times_are_compared_at_equal_batch_sizes_only() -> None:
    old = counters(r1=(100, 100_000), r8=(100, 400_000))
    found = slowness(counters(r8=(50, 200_000), r64=(1000, 99_000_000)), old)
    assert found[:2] == (1.0, 50), "larger batches under load are nobody's fault"
    assert slowness(counters(r1=(50, 200_000)), old)[:2] == (4.0, 50)
    assert slowness(counters(r2=(50, 200_000)), old)[:2] == (1.0, 0)


@async_test
async def test_a_version_that_is_too_slow_ends_its_trial_once_enough_batches_say_so() -> None:
    court = Court(slower=3.0, timed_batches=100)
    old = counters(r1=(100, 100_000))
    runs = Runs([(3.2, 1.0)] * 3)
    court.trial.look_at_time(counters(r1=(99, 99_000_000)), old, runs)
    court.trial.look_at_time(counters(r1=(500, 1_400_000)), old, runs)
    assert not (court.verdicts or runs.rows)
    court.trial.look_at_time(counters(r1=(100, 310_000)), old, runs)
    assert "3.20 times as long" in court.verdicts[0][0]


@async_test
async def test_batches_of_a_calmer_hour_decide_nothing_where_both_take_as_long_now() -> None:
    court = Court(slower=3.0, timed_batches=100)
    old = counters(r1=(100, 100_000), r8=(100, 400_000))
    runs = Runs([(9.0, 2.0), (5.0, 4.0), (9.0, 1.0), None])
    for batches in (100, 149):
        busy = counters(r1=(batches, 4_000 * batches), r8=(batches, 40_000 * batches))
        court.trial.look_at_time(busy, old, runs)
    assert runs.rows == [8, 8] and not court.verdicts, "the shortest of each counts, where most time was lost"
    court.trial.look_at_time(counters(r1=(300, 1_200_000)), old, runs)
    assert len(runs.rows) == 4 and not court.verdicts, "what cannot be run now decides nothing"
