"""The rules by which a choice is corrected, each by given numbers: rivals, margins, rounds, budget, live batches."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from halfeven.models.engines.cpu.setup import (
    NO_SPINNING,
    PACKED_PRODUCTS,
    SHARED_ROWS,
    WITHOUT_LOCK,
    CpuSetup,
)
from halfeven.serve.versions.choices.budget import MeasuringBudget
from halfeven.serve.versions.choices.live import (
    expected_seconds,
    of_new_sizes,
    off_by,
    rows_per_batch,
    seconds_by_rows,
    share_on_core,
    since,
)
from halfeven.serve.versions.choices.live_trial import LiveTrial, Window, live_gain
from halfeven.serve.versions.choices.rivals import HYSTERESIS, THREADS, gain_needed, setup_rivals, wins
from halfeven.serve.versions.choices.rounds import MOST_ROUNDS, BatchToTime, Side, Stopwatch, Verdict, contest
from halfeven.serve.versions.choices.rows_per_batch import better_rows
from halfeven.serve.versions.loading.cpu_choice import MUST_GAIN, TimedSetup, mean
from halfeven.serve.versions.loading.tuned import Way
from halfeven.serve.versions.loading.useful_rows import AHEAD, ONE_BY_ONE


def way(threads: int = 4, *passes: str, form: str = "torch", precision: str = "fp32") -> Way:
    return Way(form, precision, CpuSetup(threads, frozenset(passes)))


@pytest.mark.parametrize(
    ("setup", "change", "cores", "short", "found"),
    [
        (CpuSetup(1), THREADS, 4, False, [CpuSetup(4)]),
        (CpuSetup(4), THREADS, 4, False, [CpuSetup(1)]),
        (CpuSetup(2), THREADS, 4, False, [CpuSetup(4), CpuSetup(1)]),
        (CpuSetup(1), THREADS, 1, False, []),
        (CpuSetup(1), THREADS, 4, True, []),
        (CpuSetup(4), THREADS, 4, True, [CpuSetup(1)]),
        (CpuSetup(1), PACKED_PRODUCTS, 4, False, [CpuSetup(1, frozenset({PACKED_PRODUCTS}))]),
        (CpuSetup(1, frozenset({PACKED_PRODUCTS})), PACKED_PRODUCTS, 4, False, [CpuSetup(1)]),
        (CpuSetup(1), NO_SPINNING, 4, False, []),  # the engine does not allow it
    ],
)
def test_rivals_differ_by_one_change_and_only_by_one_that_is_possible(
    setup: CpuSetup, change: str, cores: int, short: bool, found: list[CpuSetup]
) -> None:
    assert setup_rivals(setup, change, {PACKED_PRODUCTS, SHARED_ROWS}, cores, short, False) == found


@pytest.mark.parametrize("long_rows", [True, False])
def test_only_long_rows_are_shared_and_short_ones_may_stop_to_be(long_rows: bool) -> None:
    shared = CpuSetup(4, frozenset({SHARED_ROWS}))
    assert bool(setup_rivals(CpuSetup(4), SHARED_ROWS, {SHARED_ROWS}, 4, False, long_rows)) == long_rows
    assert setup_rivals(shared, SHARED_ROWS, {SHARED_ROWS}, 4, False, long_rows) == [CpuSetup(4)]


@pytest.mark.parametrize(
    ("less", "more", "gain"),
    [
        (way(1), way(4), 1.1),
        *((way(4), way(4, name), gain) for name, gain in MUST_GAIN.items()),
        (way(), way(precision="bf16"), 1.1),
        (way(form="onnx"), way(precision="fp16"), 1.1),
    ],
    ids=str,
)
def test_the_way_there_needs_what_a_load_asks_for_and_the_way_back_leaves_room(
    less: Way, more: Way, gain: float
) -> None:
    there, back = gain_needed(less, more), gain_needed(more, less)
    assert there == pytest.approx(gain)
    assert there * back == pytest.approx(HYSTERESIS), (
        "a gain between the two changes nothing, in either direction"
    )


def test_forms_of_equal_rank_need_the_same_room_both_ways() -> None:
    assert gain_needed(way(), way(form="onnx")) == gain_needed(way(form="onnx"), way()) == HYSTERESIS
    halves = way(precision="bf16"), way(precision="fp16")
    assert gain_needed(*halves) == HYSTERESIS


def test_no_size_of_batch_may_lose_by_a_pass_and_threads_count_on_the_original() -> None:
    assert not wins(way(4), way(4, PACKED_PRODUCTS), [0.8, 2.0], crowded=False)
    assert wins(way(4), way(4, PACKED_PRODUCTS), [0.96, 2.0], crowded=False)
    assert wins(way(1), way(4), [0.8, 2.0], crowded=False)


def test_a_crowded_round_speaks_for_more_threads_and_for_fewer_only_where_they_are_far_better() -> None:
    assert not wins(way(4), way(1), [1.9], crowded=True)
    assert wins(way(4), way(1), [1.9], crowded=False)
    assert wins(way(4), way(1), [7.0], crowded=True)
    assert wins(way(1), way(4), [3.0], crowded=True)


@pytest.mark.parametrize("rival", [way(1), way(4, form="onnx"), way(4, precision="bf16")], ids=str)
def test_without_live_traffic_a_crowded_round_speaks_for_no_other_form_and_no_fewer_threads(
    rival: Way,
) -> None:
    """Beside two busy programs a bf16 encoder once took four times as long as the ONNX form, and half as long alone."""
    assert wins(way(4), rival, [4.0, 4.0], crowded=True)
    assert not wins(way(4), rival, [4.0, 4.0], crowded=True, live=False)
    assert wins(way(4), rival, [4.0, 4.0], crowded=False, live=False)


def fought_live(
    *gains: float, idle: bool = False, traffic: Sequence[float] = ()
) -> tuple[Verdict | None, list[bool]]:
    """The verdict about a rival that live batches of 10 ms showed to be so many times as fast, and who served when.

    ``traffic``: how many times as fast each of the next windows is, whoever serves, because callers send other batches.
    """
    now, batches, served = [0.0], dict[int, tuple[int, int]](), list[bool]()
    left, changes = list(gains), list(traffic)

    def serve(pause: float) -> None:
        now[0] += pause
        if not idle:
            gain = left.pop(0) if served and served[-1] else 1.0
            gain *= changes.pop(0) if changes else 1.0
            count, spent_ns = batches.get(8, (0, 0))
            batches[8] = count + round(50 * gain), spent_ns + int(pause * 1e9)

    trial = LiveTrial(lambda: dict(batches), lambda: now[0], MeasuringBudget(lambda: now[0]))
    before = Window(400, 50, 0.5, 0.5)
    steps = trial.verdict(before, served.append, lambda gain: gain >= 1.1)
    while True:
        try:
            serve(next(steps))
        except StopIteration as end:
            return end.value, served


@pytest.mark.parametrize(
    ("gains", "won", "rounds"),
    [
        ((1.5, 1.5), True, 2),
        ((1.2, 1.5, 1.2), True, 3),
        ((1.0, 1.0), False, 2),
        ((1.2, 1.0, 1.2, 1.2, 1.2), True, 5),
        ((1.2, 1.0, 1.5, 1.5), True, 4),
        ((1.2, 1.2, 1.0, 1.2, 1.2), False, 5),
        ((0.3,), False, 1),
    ],
    ids=["clear", "better", "as good", "at last", "clear at last", "never three times", "hopeless"],
)
def test_in_a_trial_two_clear_rounds_of_live_traffic_or_three_have_to_agree(
    gains: tuple[float, ...], won: bool, rounds: int
) -> None:
    verdict, served = fought_live(*gains)
    assert verdict is not None and (verdict.wins, verdict.rounds, verdict.live) == (won, rounds, True)
    assert served == [True, False] * rounds, "what served before serves at the end"
    assert verdict.gain == pytest.approx(gains[-1], rel=0.02)


def test_a_round_in_which_the_traffic_changed_speaks_for_nobody() -> None:
    """Callers came, so that the rival's window has more rows than the one before it: no merit of the rival's."""
    verdict, _ = fought_live(1.0, 1.0, 1.0, traffic=[3.0, 3.0, 3.0, 3.0, 3.0, 3.0])
    assert verdict is not None and verdict.outcomes == [False, False] and verdict.rounds == 3
    assert verdict.crowded, "what it says is asked again soon"
    steady, _ = fought_live(1.0, 1.0)
    assert steady is not None and not steady.crowded
    never, _ = fought_live(*[2.0] * 5, traffic=[1.0, 2.0, 2.0, 1.0, 1.0, 2.0, 2.0, 1.0, 1.0, 2.0])
    assert never is not None and not never.wins and never.outcomes == []


def test_without_traffic_a_trial_says_nothing() -> None:
    verdict, served = fought_live(idle=True)
    assert verdict is None and served == [True, False]


def test_where_callers_do_not_always_wait_the_cost_of_a_row_counts() -> None:
    waiting = Window(100, 10, 0.45, 0.5)
    assert live_gain(waiting, Window(150, 10, 0.5, 0.5)) == pytest.approx(1.5)
    assert live_gain(Window(100, 10, 0.2, 0.5), Window(100, 10, 0.1, 0.5)) == pytest.approx(2.0)
    assert live_gain(Window(100, 10, 0.2, 0.5), Window(100, 10, 0.5, 0.5)) == pytest.approx(0.4)


class Timing:
    """Engines by name, and the seconds that their next runs take."""

    def __init__(self, **seconds: list[float]) -> None:
        self.seconds = {name: iter(taken) for name, taken in seconds.items()}
        self.runs: list[tuple[str, int]] = []
        self.now = self.own_s = 0.0
        self.look_s = 0.0  # processor time of the thread that looks for what disturbs

    def batch_seconds(self, engine: Any, parts: Any) -> float:
        self.runs.append((engine.name, parts))
        taken = next(self.seconds[engine.name])
        self.now += taken
        return taken

    def stopwatch(self, idle: bool = True, allowance_s: float = 15.0, disturbance: float = 0.0) -> Stopwatch:
        budget = MeasuringBudget(lambda: self.now, allowance_s=allowance_s)
        rows: Any = lambda rows: rows  # noqa: E731
        self.counted_s = 0.0

        @contextmanager
        def counted() -> Iterator[None]:
            self.own_s += self.look_s
            began_s = self.now
            yield
            self.own_s += self.look_s
            self.counted_s += self.now - began_s

        def look() -> float:
            self.own_s += self.look_s
            return disturbance

        def crowding(at_once: bool) -> Any:
            look()
            return SimpleNamespace(counted=counted, disturbance=look)

        return Stopwatch(
            lambda run: run(),
            rows,
            self.batch_seconds,
            budget,
            lambda: idle,
            lambda: self.now,
            crowding,
            own_clock=lambda: self.own_s,
        )


def named(name: str, form: str = "torch") -> Any:
    """A stand-in for an engine."""
    return SimpleNamespace(name=name, form=form)


def ended(steps: Generator[float, None, Any], pauses: list[float] | None = None) -> Any:
    while True:
        try:
            pause = next(steps)
        except StopIteration as end:
            return end.value
        if pauses is not None:
            pauses.append(pause)


def fought(gains: list[float], crowded: float = 0.0) -> Verdict:
    """The verdict about a pass with such a gain in each round, both of a round's runs alike."""
    theirs = [0.03] + [0.03 for _ in gains for _ in range(2)]
    mine = [0.03 * gains[0]] + [0.03 * gain for gain in gains for _ in range(2)]
    timing = Timing(active=mine, rival=theirs)
    engines = named("active"), named("rival")
    sides = [
        Side(one, engine, TimedSetup(one.setup, {}))
        for one, engine in zip((way(4), way(4, PACKED_PRODUCTS)), engines, strict=True)
    ]
    return ended(contest(sides[0], sides[1], [8], timing.stopwatch(disturbance=crowded), mean))


@pytest.mark.parametrize(
    ("gains", "wins", "rounds"),
    [
        ([1.5, 1.5], True, 2),
        ([0.9, 0.9], False, 2),
        ([1.5, 0.9, 1.5, 1.5], True, 4),
        ([0.9, 1.5, 0.9, 0.9], False, 4),
        ([1.5, 0.9, 1.5, 0.9, 1.5], False, MOST_ROUNDS),
    ],
)
def test_two_rounds_in_a_row_decide_and_where_none_agree_what_serves_stays(
    gains: list[float], wins: bool, rounds: int
) -> None:
    verdict = fought(gains)
    assert (verdict.wins, verdict.rounds) == (wins, rounds)


def test_a_verdict_says_whether_it_was_crowded() -> None:
    assert fought([1.5, 1.5], crowded=0.5).crowded and not fought([1.5, 1.5]).crowded


def test_what_disturbs_is_measured_while_batches_run_and_not_while_the_budget_is_waited_for() -> None:
    """Runs of a second a minute, all of them disturbed, seemed undisturbed: nothing waited in between."""
    timing = Timing(a=[0.06, 0.06])
    watch, taken = timing.stopwatch(allowance_s=0.0), TimedSetup(CpuSetup(1), {})
    steps = watch.time(*[BatchToTime(named("a"), 1, taken)] * 2)
    for pause in steps:
        timing.now += pause
    assert timing.now > 3.0 and timing.counted_s == pytest.approx(0.12)


def test_the_look_for_what_disturbs_is_paid_from_the_budget() -> None:
    """With many processes it takes far longer than a brief batch, and was not counted."""
    timing = Timing(a=[0.06, 0.06])
    timing.look_s = 0.004
    watch, taken = timing.stopwatch(), TimedSetup(CpuSetup(1), {})
    ended(watch.time(*[BatchToTime(named("a"), 1, taken)] * 2))
    watch.anew()
    assert not watch.was_disturbed()
    assert watch.budget.spent_s == pytest.approx(2 * (0.06 + 2 * 0.004) + 3 * 0.004), "made twice, asked once"


def test_a_short_batch_is_run_twice_and_the_second_run_counts() -> None:
    """The first finds another engine's weights in the caches."""
    timing = Timing(a=[0.02, 0.01, 0.06])
    watch, taken = timing.stopwatch(), TimedSetup(CpuSetup(2), {})
    ended(watch.time(BatchToTime(named("a"), 1, taken)))
    ended(watch.time(BatchToTime(named("a"), 8, taken)))
    assert taken.seconds == {1: 0.01, 8: 0.06}
    assert watch.budget.spent_s == pytest.approx(2 * (0.02 + 0.01 + 0.06)), "two threads, all runs"


def test_a_brief_batch_is_run_until_a_difference_can_be_seen() -> None:
    timing = Timing(a=[0.0009, 0.0003, 0.0002, 0.0004, 0.0003])
    taken = TimedSetup(CpuSetup(1), {})
    ended(timing.stopwatch().time(BatchToTime(named("a"), 1, taken)))
    assert taken.seconds == {1: 0.0002} and len(timing.runs) == 5
    briefest = Timing(a=[1e-5] * 10)
    ended(briefest.stopwatch().time(BatchToTime(named("a"), 1, taken)))
    assert len(briefest.runs) == 10


def test_under_load_callers_get_three_times_what_was_taken_from_them() -> None:
    pauses: list[float] = []
    job = BatchToTime(named("a"), 8, TimedSetup(CpuSetup(1), {}))
    ended(Timing(a=[0.04]).stopwatch(idle=False).time(job), pauses)
    ended(Timing(a=[0.04]).stopwatch(idle=True).time(job), pauses)
    assert pauses == [pytest.approx(0.12), 0.005]


def test_what_a_crowded_machine_took_from_callers_counts_not_what_the_run_took_on_a_core() -> None:
    """Two threads on a full machine hold callers up for a second, of which they compute for a moment."""
    timing, pauses = Timing(a=[0.04]), list[float]()
    watch = timing.stopwatch(idle=False)
    on_core = watch.batch_seconds

    def waiting(engine: Any, parts: Any) -> float:
        timing.now += 1.0
        return on_core(engine, parts)

    watch.batch_seconds = waiting
    taken = TimedSetup(CpuSetup(2), {})
    ended(watch.time(BatchToTime(named("a"), 8, taken)), pauses)
    assert pauses == [pytest.approx(3 * 1.04)] and taken.seconds == {8: 0.04}
    assert watch.budget.spent_s == pytest.approx(1.04)


def test_a_step_runs_as_many_short_batches_as_one_batch_may_last() -> None:
    pauses: list[float] = []
    job = BatchToTime(named("a"), 1, TimedSetup(CpuSetup(1), {}))
    timing = Timing(a=[0.005] * 12)
    ended(timing.stopwatch().time(*[job] * 6), pauses)
    assert len(pauses) == 2 and len(timing.runs) == 12, "five in the first step, one in the second"
    pauses.clear()
    ended(
        Timing(a=[0.04] * 3).stopwatch().time(*[BatchToTime(named("a"), 8, TimedSetup(CpuSetup(1), {}))] * 3),
        pauses,
    )
    assert len(pauses) == 3


def test_threads_of_onnx_runtime_stop_spinning_before_another_engine_runs() -> None:
    pauses: list[float] = []
    job = BatchToTime(named("a", "onnx"), 1, TimedSetup(CpuSetup(1), {}))
    ended(Timing(a=[0.001] * 6).stopwatch().time(job, job, job), pauses)
    assert pauses == [0.005] * 3


def test_nothing_is_run_before_the_budget_allows_it() -> None:
    timing, job = Timing(a=[1.0, 1.0]), BatchToTime(named("a"), 8, TimedSetup(CpuSetup(1), {}))
    watch = timing.stopwatch(allowance_s=0.5)
    ended(watch.time(job))
    steps = watch.time(job)
    wait_s = next(steps)
    assert wait_s == pytest.approx((1.0 - 0.5) / 0.02 - 1.0) and len(timing.runs) == 1
    timing.now += wait_s
    ended(steps)
    assert len(timing.runs) == 2


def test_the_budget_is_two_percent_and_an_allowance() -> None:
    now = [100.0]
    budget = MeasuringBudget(lambda: now[0], share=0.02, allowance_s=15.0)
    assert budget.wait_s() == budget.wait_s(15.0) == 0.0
    budget.spend(15.0)
    assert budget.wait_s() == 0.0 and budget.wait_s(1.0) == pytest.approx(50.0)
    now[0] += 3600.0
    assert budget.wait_s(1.0) == 0.0
    budget.spend(72.0)
    assert budget.wait_s(1.0) == pytest.approx(50.0), "an hour gives 72 s"


def test_live_batches_are_held_against_what_was_measured() -> None:
    before = {1: (10, 10_000_000), 8: (5, 100_000_000)}
    now = {1: (10, 10_000_000), 8: (15, 500_000_000), 32: (2, 200_000_000)}
    fresh = since(before, now)
    assert fresh == {8: (10, 400_000_000), 32: (2, 200_000_000)}
    assert seconds_by_rows(fresh) == {8: 0.04, 32: 0.1}
    assert seconds_by_rows(fresh, on_core=0.5) == {8: pytest.approx(0.02), 32: pytest.approx(0.05)}
    assert off_by(fresh, {1: 0.005, 8: 0.04, 32: 0.1}) == pytest.approx(1.0)
    assert off_by(fresh, {1: 0.005, 8: 0.02, 32: 0.05}) == pytest.approx(2.0)
    assert off_by(fresh, {}) is None
    assert off_by({8: (2, 40_000_000)}, {8: 0.01}) is None, "so few batches say nothing"


@pytest.mark.parametrize(
    ("had_s", "waited_s", "share"),
    [
        (0.2, 0.1, 0.75),  # threads of the engine worked on while the device thread slept
        (0.3, 0.1, 0.75),
        (1.5, 0.5, 0.75),  # in batches of other models and in loading, too
        (0.1, 3.9, 0.1),
        (0.0, 0.0, 1.0),
    ],
)
def test_a_models_batches_get_their_share_of_the_waits_of_the_device_thread(
    had_s: float, waited_s: float, share: float
) -> None:
    assert share_on_core({8: (10, 400_000_000)}, had_s, waited_s) == pytest.approx(share)


def test_batches_outside_of_every_expected_size_come_from_other_callers_and_are_not_off() -> None:
    one_by_one = {1: (200, 600_000_000)}  # 3 ms, where a share of a batch of 16 would take 1.4 ms
    assert off_by(one_by_one, {16: 0.022}) is None
    assert of_new_sizes(one_by_one, {16: 0.022}) == of_new_sizes(one_by_one, {}) == one_by_one
    both = {1: (200, 600_000_000), 16: (50, 2_200_000_000)}
    assert of_new_sizes(both, {16: 0.022}) == one_by_one
    assert off_by(both, {16: 0.022}) == pytest.approx(2.0)
    assert rows_per_batch(both) == pytest.approx(4.0) and rows_per_batch({}) == 0


@pytest.mark.parametrize(
    ("rows", "seconds"), [(1, 0.01), (8, 0.04), (16, 0.08), (24, 0.12), (4, 0.01 + 0.03 * 3 / 7)]
)
def test_between_sizes_a_row_costs_the_same(rows: int, seconds: float) -> None:
    assert expected_seconds({1: 0.01, 8: 0.04, 24: 0.12}, rows) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("seconds", "limit", "found"),
    [
        ({1: 0.01, 2: 0.011, 4: 0.014, 8: 0.02, 16: 0.035, 32: 0.065}, 1, 32),
        ({1: 0.02, 2: 0.04, 4: 0.08, 8: 0.16}, 4, 4),
        ({1: 0.02, 2: 0.04, 4: 0.08}, 32, 4),  # eight times the wait for no more rows
        ({1: 0.02, 2: 0.04, 4: 0.078}, 8, 8),  # twice the wait is within what serves
        ({1: 0.06, 2: 0.061, 4: 0.12}, 1, 2),
    ],
)
def test_the_rows_that_serve_stay_where_they_are_as_good(
    seconds: dict[int, float], limit: int, found: int
) -> None:
    assert better_rows(seconds, limit, ONE_BY_ONE) == found


def test_where_cores_share_rows_fewer_than_they_share_are_not_useful() -> None:
    assert better_rows({1: 0.01, 8: 0.04, 16: 0.08}, 1, AHEAD) == 8
    assert WITHOUT_LOCK in MUST_GAIN
