"""Serving versions replace wrong choices on every processor: threads, passes, form, useful rows, by given facts."""

import json
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from halfeven.exporters.inputs.samples import Samples
from halfeven.models.engines.cpu.setup import (
    PACKED_CONVOLUTIONS,
    PACKED_PRODUCTS,
    WITHOUT_LOCK,
    CpuSetup,
)
from halfeven.models.store.store import LIVE, Store, Version
from halfeven.serve.batching.interface import PreparedVersion, ServableForm
from halfeven.serve.versions.choices import sweep as sweep_file
from halfeven.serve.versions.choices.budget import MeasuringBudget
from halfeven.serve.versions.choices.live_trial import WINDOW_S
from halfeven.serve.versions.choices.rounds import SHORT_S
from halfeven.serve.versions.choices.sweep import Decided, Machine, Sweep
from halfeven.serve.versions.choices.what_serves import Gone
from halfeven.serve.versions.loading import candidate_forms, tuned
from halfeven.serve.versions.loading.candidate_forms import HALF_MUST_GAIN, ModelHere
from halfeven.serve.versions.loading.cpu_choice import TimedSetup
from halfeven.serve.versions.loading.kept_setups import keep_setup, kept_setup
from halfeven.serve.versions.loading.tuned import Way, Winner, save_tuned, tuned_for

from tests.serve.versions.choices.processors import (
    AMX,
    AVX512,
    BF16,
    CPU,
    FORMS,
    PROCESSORS,
    SPEC,
    Engine,
    Processor,
    World,
    by_chance,
    ways,
)

PLAIN_ONE = Way("torch", "fp32", CpuSetup(1))


@dataclass(eq=False)
class Loaded:
    """A stand-in for a loaded version: engines are exchanged at once, and closed where nothing needs them."""

    version: Version
    prepared: PreparedVersion
    spec: Any = SPEC
    name: str = "net"
    number: int = 1
    fell_back: bool = False
    gone: bool = False
    served: list[Way] = field(default_factory=list)
    lender: PreparedVersion | None = None
    batches: dict[int, tuple[int, int]] = field(default_factory=dict)

    def counters(self) -> Any:
        return SimpleNamespace(batches=dict(self.batches))

    def lend(self, engine: Any, rival: PreparedVersion) -> bool:
        if not self.serves_by(engine):
            return False
        self.lender, self.prepared = self.prepared, rival
        return True

    def take_back(self) -> bool:
        assert self.lender is not None
        self.lender, self.prepared = None, self.lender
        return not self.gone

    def serves_by(self, engine: Any) -> bool:
        return not self.gone and self.prepared.engine is engine

    def exchange(self, engine: Any, new: PreparedVersion) -> bool:
        if not self.serves_by(engine):
            return False
        old, self.prepared = self.prepared, new
        for unused in (old.engine, old.original):
            if unused is not None and unused not in (new.engine, new.original):
                unused.close()
        self.served.append(self.way)
        return True

    @property
    def way(self) -> Way:
        engine: Any = self.prepared.engine
        return engine.way


@pytest.fixture(autouse=True)
def given_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.zeros((64, 4), np.float32)
    monkeypatch.setattr(candidate_forms, "stored_samples", lambda version: Samples({"x": rows}))
    monkeypatch.setattr(ModelHere, "invariance_of", lambda *given: "the same bits")
    monkeypatch.setattr(tuned, "this_processor", lambda: "a given processor")
    monkeypatch.setattr(tuned, "usable_cores", lambda: 4)


def published(root: Path) -> Version:
    with Store(root).draft("net") as draft:
        draft.write_json("spec.json", SPEC.to_json())
        return draft.publish(LIVE, {"half": None, "parent": None})


@pytest.fixture
def version(tmp_path: Path) -> Version:
    return published(tmp_path)


@dataclass(eq=False)
class Bench:
    """Sweeps over one version on one processor, until a sweep changes nothing."""

    version: Version
    world: World
    loaded: Loaded
    budget: MeasuringBudget
    events: list[tuple[str, str, str, Any]] = field(default_factory=list)
    decided: Decided = field(default_factory=Decided)
    pauses: list[float] = field(default_factory=list)
    free_bytes: int = 1 << 40
    sweeps: int = 0
    # Each has the turns so far, and the share of the best then.
    rates: list[tuple[int, float]] = field(default_factory=list)
    busy: bool = False  # live batches never end: one runs before each step
    over_s: float = 0.0  # that may be spent beyond the budget's rule
    callers: int = 64  # that wait: a batch has no more rows than they send
    # A live batch takes so many times as long beside the callers' programs.
    beside: Callable[[Way], float] = lambda way: 1.0

    def sweep(self) -> Sweep:
        machine = Machine(
            lambda: not self.busy,
            self.world.clock,
            lambda: self.world.processor.cores,
            self.world.crowding,
            self.world.seconds,
            self.world.clock,
            lambda: self.free_bytes,
            lambda exchanged: None,
            units=self.world.processor.units,
        )
        given: Any = self.loaded
        place: Any = self.world
        return Sweep(
            given,
            place,
            machine,
            self.budget,
            lambda *event: self.events.append(event),
            lambda loaded: None,
            self.decided,
        )

    def run(self, end_s: float = float("inf")) -> bool:
        """One sweep; whether it changed anything. Time goes by in the pauses, and not more than one engine is tried."""
        steps = self.sweep().steps()
        self.sweeps += 1
        while self.world.now < end_s:
            try:
                pause = next(steps)
            except StopIteration as end:
                return end.value
            self.pauses.append(pause)
            if pause == WINDOW_S and self.loaded.lender is None:
                self.rates.append((self.pauses.count(WINDOW_S), self.share_of_best()))
            self.serve(pause) if self.busy else self.pass_by(pause)
            rule_s = 0.02 * self.world.now + 15.0 + self.over_s
            assert self.budget.spent_s <= rule_s + 4 * SHORT_S * self.world.processor.cores
        steps.close()
        return False

    def pass_by(self, pause: float) -> None:
        self.world.now += pause

    def serve(self, pause: float) -> None:
        """Serve live batches as large as batches are now, for as long as the pause, at least one."""
        end = self.world.now + pause
        while True:
            rows = min(self.rows, self.callers)
            seconds = self.world.processor.seconds(self.loaded.way, rows) * self.beside(self.loaded.way)
            count, spent_ns = self.loaded.batches.get(rows, (0, 0))
            self.loaded.batches[rows] = count + 1, spent_ns + int(seconds * 1e9)
            self.world.now += seconds
            if self.world.now >= end:
                break

    @property
    def rows(self) -> int:
        return self.loaded.prepared.useful_rows or self.loaded.spec.max_batch_size

    def live_s(self) -> float:
        """Seconds of a batch as large as batches are now."""
        return self.world.processor.seconds(self.loaded.way, self.rows)

    def rate(self) -> float:
        """Rows per second under load."""
        return self.rows / self.live_s()

    def run_until(self, end_s: float) -> None:
        """Sweep until ``end_s``, or until a sweep changes nothing; a trial that is under way is ended."""
        self.rates = [(0, self.share_of_best())]
        changed = True
        while changed and self.world.now < end_s:
            changed = self.run(end_s)

    def share_of_best(self) -> float:
        """The rate in the half's terms, of that of the best way there is in its best batches."""

        def worth(way: Way, rows: int) -> float:
            seconds = self.world.processor.seconds(way, rows)
            return rows / seconds / (1.0 if way.precision == "fp32" else HALF_MUST_GAIN)

        best = max(worth(way, rows) for way in ways(self.world.processor) for rows in (8, 16, 32))
        return worth(self.loaded.way, self.rows) / best

    def windows_before(self, share: float) -> int:
        """The turns of live traffic after which so much of the best was served, and from then on."""
        return next((turn for turn, reached in reversed(self.rates) if reached < share), 0)

    def settle(self, most: int = 8) -> None:
        while self.run():
            assert self.sweeps < most, "it switches to and fro"
        self.decided.clear()


def bench(
    version: Version, processor: Processor, way: Way, rows: int = 0, forms: Any = FORMS, **world: Any
) -> Bench:
    made = World(processor, **world)
    loaded = Loaded(version, made.prepared(way, forms, rows))
    return Bench(version, made, loaded, MeasuringBudget(made.clock))


def handicapped(processor: Processor, way: Way) -> float:
    return processor.seconds(way, 16) * (1.0 if way.precision == "fp32" else HALF_MUST_GAIN)


@pytest.mark.parametrize("processor", PROCESSORS, ids=lambda one: one.name)
@pytest.mark.parametrize("start", range(8))
def test_from_any_way_the_best_one_of_the_processor_is_found_and_kept(
    processor: Processor, start: int, version: Version
) -> None:
    every = list(ways(processor))
    chance = random.Random(f"{processor.name} {start}")
    way = (
        PLAIN_ONE if start == 0 else chance.choice([one for one in every if processor.seconds(one, 1) < 0.1])
    )
    one = bench(version, processor, way, rows=chance.choice([0, 1, 4, 32]))
    one.settle()
    best = min(handicapped(processor, other) for other in every)
    assert handicapped(processor, one.loaded.way) <= 1.12 * best, one.loaded.way
    served = one.loaded.served
    assert len(served) == len(set(served)) or one.loaded.prepared.useful_rows, "a way came back"
    assert (
        one.world.loaded == [one.loaded.prepared.engine] or one.loaded.prepared.original in one.world.loaded
    )
    assert one.world.most_loaded <= 3, "what serves, its original, and one that is tried"
    kept = kept_setup(version, one.loaded.way.form, one.loaded.way.precision, CPU)
    if served and served[-1].setup != way.setup:
        assert kept is not None and kept.setup == one.loaded.way.setup
    assert all(event[1] == "choice_replaced" for event in one.events)


def test_a_planted_setup_is_replaced_within_the_allowance_and_told(version: Version) -> None:
    one = bench(version, AVX512, PLAIN_ONE, forms=[("torch", "fp32")])
    one.settle()
    assert one.loaded.way.setup == CpuSetup(
        4, frozenset({PACKED_CONVOLUTIONS, PACKED_PRODUCTS, WITHOUT_LOCK})
    )
    assert one.world.now < 60 and one.budget.spent_s < 15
    name, kind, sentence, numbers = one.events[0]
    assert (name, kind) == ("net", "choice_replaced")
    assert (
        "torch fp32, 4 threads, packed products, without Python's lock instead of torch fp32, 1 thread"
        in sentence
    )
    assert numbers["what"] == "setup" and numbers["gain"] > 2 and numbers["rounds"] == 2
    assert one.loaded.prepared.reason.startswith("made up; while serving: torch fp32, 4 threads")
    assert one.loaded.prepared.reason.count("while serving") == 1, "the last correction alone"
    assert one.loaded.prepared.setup == one.loaded.way.setup, "GET /v1/models shows it"


ENCODER = replace(BF16, cores=2, row_s=6e-3, batch_s=2e-3)  # about the one of the benchmarks
WITHOUT_CONVOLUTIONS = frozenset({PACKED_PRODUCTS, WITHOUT_LOCK})
MOST_TURNS = 80  # of 0.5 s: with loading and runs between live batches less than a minute


@pytest.mark.parametrize(
    ("way", "rows"),
    [
        (PLAIN_ONE, 32),
        (Way("torch", "bf16", CpuSetup(1)), 32),
        (Way("onnx", "fp32", CpuSetup(2)), 0),
        (Way("torch", "bf16", CpuSetup(2, WITHOUT_CONVOLUTIONS)), 1),
    ],
    ids=["one thread in FP32", "one thread, no passes", "the wrong form", "one row"],
)
@pytest.mark.parametrize("processor", PROCESSORS, ids=lambda one: one.name)
def test_under_load_that_never_idles_a_planted_choice_is_replaced_within_so_many_turns(
    processor: Processor, way: Way, rows: int, version: Version
) -> None:
    """An encoder's batches, a second for each load, and runs that take up to a tenth longer by chance."""
    processor, chance = replace(processor, cores=2, row_s=6e-3, batch_s=2e-3), random.Random(processor.name)
    if processor.seconds(way, 1) > processor.seconds(PLAIN_ONE, 1):  # a load would never serve that
        way = replace(way, precision="fp32")
    for form, precision in FORMS:  # a bad moment for all of them
        keep_setup(version, form, precision, CPU, CpuSetup(1), [])
    one = bench(version, processor, way, rows=rows, load_s=1.0, noise=lambda: 1 + chance.random() / 10)
    one.busy, one.beside = True, lambda way: 1 + chance.random() / 10
    one.run_until(60.0)
    assert one.share_of_best() >= 0.9, (one.loaded.way, one.rows)
    assert one.windows_before(0.9) <= MOST_TURNS
    assert one.budget.spent_s <= 15.0 + 0.02 * one.world.now + 1.0
    for (
        run,
        size,
        seconds,
    ) in one.world.runs:  # a new engine is warmed up with all rows, a slow one is run with one
        assert seconds <= 4 * SHORT_S or size == 32 or size == 1, (run, size, seconds)


def test_on_processors_that_nobody_has_seen_nearly_all_choices_by_chance_are_replaced(tmp_path: Path) -> None:
    """The server may need more than a minute: 784 of 800 served at 0.9 of the best or more after one, and all but three
    of 2,400 at 0.8 after a minute and a half. A way that is nearly as good, and two changes away from the best, may
    stay."""
    shares = dict[int, float]()
    for seed in np.random.default_rng().integers(1 << 32, size=24).tolist():
        chance = random.Random(seed)
        processor = by_chance(chance)
        slowest_s = 4 * processor.seconds(PLAIN_ONE, 1)  # a load chooses nothing slower
        way = chance.choice([one for one in ways(processor) if processor.seconds(one, 1) <= slowest_s])
        one = bench(published(tmp_path / str(seed)), processor, way, chance.choice([0, 1, 32]), load_s=0.5)
        one.busy = True
        one.over_s = (
            2 * WINDOW_S
        )  # a window with few batches is up to three times as long as the budget allowed
        one.run_until(60.0)
        shares[seed] = one.share_of_best()
    assert sum(share < 0.9 for share in shares.values()) <= 4, shares


@pytest.mark.parametrize(
    ("processor", "first"),
    [(AVX512, ("torch", "fp32")), (AMX, ("torch", "bf16"))],
    ids=lambda one: str(one)[:20],
)
def test_the_halves_that_a_processor_has_to_convert_are_tried_last(
    processor: Processor, first: tuple[str, str], version: Version
) -> None:
    one = bench(version, processor, Way("onnx", "fp32", CpuSetup(4)))
    one.settle()
    others = [way for way, _, _ in one.world.runs if (way.form, way.precision) != ("onnx", "fp32")]
    assert (others[0].form, others[0].precision) == first


@pytest.mark.slow
def test_beside_programs_that_come_and_go_the_best_is_served_a_minute_later(version: Version) -> None:
    """Ten starts. For 15 s up to three programs take a core by chance, from two threads more than from one."""
    found = []
    for seed in range(10):
        chance = random.Random(seed)
        ends = [sorted(chance.uniform(0, 15) for _ in range(20)) for _ in range(chance.randint(1, 3))]
        one = bench(version, ENCODER, PLAIN_ONE, rows=32, load_s=1.0)

        def busy(one: Bench = one, ends: list[list[float]] = ends) -> int:
            """The programs that compute now: each from one of its moments to the next, and then not."""
            return sum(sum(end <= one.world.now for end in each) % 2 for each in ends)

        one.busy = True
        one.beside = lambda way, busy=busy: 1 + busy() * (0.75 if way.threads > 1 else 0.5)
        crowding = lambda busy=busy: 0.3 * busy()  # noqa: E731
        one.world.crowding = lambda at_once=True, crowding=crowding: SimpleNamespace(
            disturbance=crowding, share=crowding, counted=nullcontext
        )
        one.run_until(60.0)
        found.append(one.share_of_best())
    assert min(found) >= 0.85, found


def test_a_way_that_loses_beside_the_callers_programs_is_tried_by_them_and_not_taken(
    version: Version,
) -> None:
    """Alone four threads are 3.4 times as fast as one; beside what needs the other cores they are slower."""
    one = bench(version, AVX512, PLAIN_ONE, forms=[("torch", "fp32")], rows=8)
    one.busy, one.beside = True, lambda way: 50.0 if way.threads > 1 else 1.0
    one.settle()
    assert one.loaded.way.threads == 1 and PACKED_PRODUCTS in one.loaded.way.setup.passes
    assert {event[3]["what"] for event in one.events}.isdisjoint({"threads", "setup"})
    one.beside = lambda way: 1.0
    one.settle(12)
    assert one.loaded.way.threads == 4
    assert "of live traffic" in one.events[-1][2]


def test_a_form_is_tried_in_batches_of_its_own_size(version: Version) -> None:
    """The half would be slower in batches of one row, which are right for the form that serves."""

    class Sizes(Processor):
        def seconds(self, way: Way, rows: int) -> float:
            if way.precision == "fp32":
                return 5e-3 * rows
            return 6e-3 + 1e-3 * rows

    processor = Sizes("batches gain in one form alone", {}, cores=1)
    one = bench(version, processor, PLAIN_ONE, forms=[("torch", "fp32"), ("torch", "bf16")], rows=1)
    one.busy = True
    one.run()
    assert one.loaded.way.precision == "bf16" and one.loaded.prepared.useful_rows == 32


@pytest.mark.parametrize("gains", [lambda rows: rows >= 24, lambda rows: rows <= 16], ids=["large", "small"])
def test_a_form_is_tried_in_batches_no_smaller_than_those_that_serve_and_in_its_own(
    gains: Callable[[int], bool], version: Version
) -> None:
    """Alone the rival is as fast in batches of 16 rows as in larger ones; beside callers one of the two gains."""

    class Sizes(Processor):
        def seconds(self, way: Way, rows: int) -> float:
            return rows * (6e-3 if way.precision == "fp32" else 5e-3)

    def beside(way: Way) -> float:
        return 1.0 if way.precision == "fp32" or gains(one.rows) else 1.15

    one: Bench
    forms = [("torch", "fp32"), ("torch", "bf16")]
    one = bench(version, Sizes("alone", {}, cores=1), PLAIN_ONE, forms=forms, rows=32)
    one.busy, one.beside = True, beside
    one.settle()
    assert one.loaded.way.precision == "bf16"


class SlowerAlone(Processor):
    """A half that is slower with one row, and three times as fast with many."""

    def seconds(self, way: Way, rows: int) -> float:
        return 3e-3 * rows if way.precision == "fp32" else 4e-3 + 0.8e-3 * rows


@pytest.mark.parametrize("start", [PLAIN_ONE, Way("torch", "bf16", CpuSetup(1))], ids=["FP32", "the half"])
def test_what_a_lone_caller_shows_does_not_replace_what_is_right_for_many(
    start: Way, version: Version
) -> None:
    one = bench(
        version, SlowerAlone("two sizes", {}, cores=1), start, forms=[("torch", "fp32"), ("torch", "bf16")]
    )
    one.busy, one.callers = True, 1
    one.run()
    assert one.loaded.way.precision == start.precision
    one.decided.clear()
    one.callers = 64
    one.settle()
    assert one.loaded.way.precision == "bf16"


def test_what_gains_a_little_for_many_callers_is_not_taken_where_one_loses_much(version: Version) -> None:
    """Packed products halve the time of one row, and cost a tenth of that of many."""

    class PackedForFew(Processor):
        def seconds(self, way: Way, rows: int) -> float:
            packed = PACKED_PRODUCTS in way.setup.passes
            return (2e-3 if packed else 6e-3) + rows * (2.2e-3 if packed else 1.9e-3)

    start = Way("torch", "fp32", CpuSetup(1, frozenset({PACKED_PRODUCTS})))
    one = bench(version, PackedForFew("two sizes", {}, cores=1), start, forms=[("torch", "fp32")])
    one.busy = True
    one.settle()
    assert PACKED_PRODUCTS in one.loaded.way.setup.passes


def test_beside_other_programs_a_run_that_seems_hopeless_leaves_it_to_live_traffic(version: Version) -> None:
    """Between live batches an engine with several threads took 140 times as long; under load it was the best."""

    class Hidden(Processor):
        def seconds(self, way: Way, rows: int) -> float:
            alone = replace(AVX512, cores=2).seconds(way, rows)
            return alone * (50 if way.threads > 1 and one.loaded.way != way else 1)

    one: Bench
    one = bench(version, Hidden("hidden", {}, cores=2), PLAIN_ONE, rows=16, forms=[("torch", "fp32")])
    one.busy = True
    one.world.crowded = 0.5
    one.run()
    assert one.loaded.way.threads == 2


@pytest.mark.parametrize("callers", [64, 8])
@pytest.mark.parametrize(("crowded", "threads"), [(0.5, 1), (0.0, 2), (0.0, 1)])
def test_what_runs_between_live_batches_takes_no_win_of_live_traffic_back(
    crowded: float, threads: int, callers: int, version: Version
) -> None:
    """Between live batches the rival takes three times as long; callers are answered 1.6 times as fast, in batches of
    16 rows, or of half as many. One thread that nothing disturbs tells what one caller would get; such a rival is not
    taken."""

    class Beside(Processor):
        def seconds(self, way: Way, rows: int) -> float:
            rival = way.form == "torch"
            return rows * (1.0 if not rival else 3.0 if one.loaded.way != way else 0.6) * 5e-3

    one: Bench
    start = Way("onnx", "fp32", CpuSetup(threads))
    forms = [("torch", "fp32"), ("onnx", "fp32")]
    one = bench(version, Beside("beside", {}, cores=threads), start, forms=forms, rows=16)
    one.busy, one.world.crowded, one.callers = True, crowded, callers
    one.run()
    assert one.loaded.way.form == ("torch" if crowded or threads > 1 else "onnx")


def test_a_lone_caller_does_not_hide_that_more_rows_in_a_batch_gain(version: Version) -> None:
    one = bench(version, ENCODER, Way("torch", "fp32", CpuSetup(2)), rows=1, forms=[("torch", "fp32")])
    one.busy, one.callers = True, 1
    one.settle()
    assert one.rows >= 4


def test_a_version_that_goes_in_a_trial_gets_its_engine_back_and_the_rival_is_closed(
    version: Version,
) -> None:
    one = bench(version, AVX512, PLAIN_ONE, rows=8)
    one.busy = True
    steps = one.sweep().steps()
    with pytest.raises(Gone):
        for pause in steps:
            one.serve(pause)
            one.loaded.gone = one.loaded.lender is not None
    assert one.loaded.way == PLAIN_ONE and one.world.loaded == [one.loaded.prepared.engine]


@pytest.mark.parametrize("gone", [False, True])
def test_a_sweep_that_is_ended_in_a_trial_gives_the_engine_back_and_closes_the_rival(
    gone: bool, version: Version
) -> None:
    one = bench(version, AVX512, PLAIN_ONE, rows=8)
    one.busy = True
    steps = one.sweep().steps()
    while one.loaded.lender is None or len(one.world.loaded) < 2:
        one.serve(next(steps))
    one.loaded.gone = gone
    with pytest.raises(Gone) if gone else nullcontext():
        steps.close()
    assert one.loaded.way == PLAIN_ONE and one.world.loaded == [one.loaded.prepared.engine]


def test_what_is_kept_has_the_spread_of_its_measurements_and_is_not_confirmed_yet(version: Version) -> None:
    one = bench(version, AVX512, PLAIN_ONE, forms=[("torch", "fp32")])
    one.settle()
    (path,) = (version.folder.parent / "tuned").glob("setups-*.json")
    entry = json.loads(path.read_text())["1 torch fp32"]
    assert entry["rounds"] == 0 and not entry["crowded"]
    for row in entry["measured"]:
        assert row["seconds"] <= row["median"] <= row["longest"] and row["runs"] >= 2


def test_the_wrong_form_of_a_tuning_is_replaced_and_the_tuning_corrected(version: Version) -> None:
    wrong = Winner("onnx", "fp32", 4, 0, 50, 100.0)
    save_tuned(version, CPU, wrong, "2026-01-01", {"measurements": []})
    one = bench(version, BF16, Way("onnx", "fp32", CpuSetup(4)))
    one.settle()
    assert (one.loaded.way.form, one.loaded.way.precision) == ("torch", "bf16")
    found = tuned_for(version, CPU)
    assert found is not None and (found.winner.form, found.winner.precision) == ("torch", "bf16")
    assert found.winner.queue_delay_us == 50 and found.date == "2026-01-01"
    assert "corrected by what was served on " in str(found)
    facts = json.loads(tuned.tuned_path(version, CPU).read_text())
    assert facts["corrected"]["was"]["form"] == "onnx", "the first winner, however often it is corrected"


@pytest.mark.parametrize(
    ("batch_s", "rows", "expected"),
    [(30e-3, 1, 16), (0.0, 32, 8), (4e-3, 1, 8), (4e-3, 16, 16)],
    ids=["one row where batches gain", "far more rows than gain", "one row", "right"],
)
def test_useful_rows_are_corrected_by_the_rule_of_the_load(
    batch_s: float, rows: int, expected: int, version: Version
) -> None:
    """8 ms a row on one core; the batches that are as good as the best and last long enough are those of the load."""
    processor = Processor("one core", {}, 1, row_s=8e-3, batch_s=batch_s)
    one = bench(version, processor, PLAIN_ONE, rows=rows, forms=[("torch", "fp32")])
    one.settle()
    found = one.loaded.prepared.useful_rows
    assert found == expected
    assert (found == rows) == (not [event for event in one.events if event[3]["what"] == "useful rows"])


def test_without_traffic_useful_rows_that_other_programs_disturbed_stay(version: Version) -> None:
    """Batches of one row seemed as fast as those of 16: another server computed meanwhile."""
    processor = Processor("one core", {}, 1, row_s=8e-3, batch_s=0.0)
    one = bench(version, processor, PLAIN_ONE, rows=32, forms=[("torch", "fp32")])
    one.world.crowded = 0.5
    one.run()
    assert one.loaded.prepared.useful_rows == 32
    one.world.crowded = 0.0
    one.settle()
    assert one.loaded.prepared.useful_rows == 8


def test_noise_of_a_tenth_switches_nothing_that_is_right(version: Version) -> None:
    """Ten processors' worth of chance: a way within the margins stays, and nothing goes to and fro."""
    for seed in range(10):
        chance = random.Random(seed)
        start = Way(
            "torch", "fp32", CpuSetup(4, frozenset({PACKED_CONVOLUTIONS, PACKED_PRODUCTS, WITHOUT_LOCK}))
        )
        one = bench(
            version,
            AVX512,
            start,
            rows=8,
            forms=[("torch", "fp32")],
            noise=lambda chance=chance: 1 + chance.random() / 10,
        )
        one.settle()
        assert one.loaded.way == start, (seed, one.events)


def test_disturbed_runs_do_not_hide_the_better_way(version: Version) -> None:
    """Every fourth run lasts three times as long: another program had the core."""
    chance = random.Random(1)
    one = bench(version, AVX512, PLAIN_ONE, noise=lambda: 3.0 if chance.random() < 0.25 else 1.0)
    one.settle(12)
    best = min(handicapped(AVX512, other) for other in ways(AVX512))
    assert handicapped(AVX512, one.loaded.way) <= 1.2 * best


def test_on_a_crowded_machine_threads_that_lose_a_little_stay(version: Version) -> None:
    """Four threads are slower than one beside a program that has the other cores, for as long as that program runs."""

    class Beside(Processor):
        def seconds(self, way: Way, rows: int) -> float:
            return AVX512.seconds(replace(way, setup=CpuSetup(1, way.setup.passes)), rows) * (
                1.5 if way.threads > 1 else 1.0
            )

    start = Way("torch", "fp32", CpuSetup(4, frozenset({PACKED_CONVOLUTIONS, PACKED_PRODUCTS, WITHOUT_LOCK})))
    beside = Beside("beside another program", AVX512.factors)
    one = bench(version, beside, start, forms=[("torch", "fp32")], crowded=0.5)
    one.run()
    assert one.loaded.way.threads == 4
    alone = bench(version, beside, start, forms=[("torch", "fp32")], crowded=0.0)
    alone.run()
    assert alone.loaded.way.threads == 1, "where nobody else computes, the measurement counts"


def test_on_a_crowded_machine_not_even_a_hopeless_rival_is_decided(version: Version) -> None:
    one = bench(version, AVX512, PLAIN_ONE, crowded=0.5)
    one.run()
    assert not one.decided.ways | one.decided.keys
    alone = bench(version, AVX512, PLAIN_ONE)
    alone.run()
    assert "torch fp16" in alone.decided.keys


def test_a_half_needs_the_margin_of_a_load_and_goes_only_clearly_below_it(version: Version) -> None:
    def world(factor: float) -> Processor:
        return Processor("half", {"torch bf16": factor, WITHOUT_LOCK: 1.2}, 1)

    kinds = [("torch", "fp32"), ("torch", "bf16")]
    half = Way("torch", "bf16", CpuSetup(1))
    for factor, start, serves in [
        (1 / 1.05, PLAIN_ONE, "fp32"),
        (1 / 1.2, PLAIN_ONE, "bf16"),
        (1 / 1.08, half, "bf16"),  # between the margins what serves stays
        (1 / 1.02, half, "fp32"),
    ]:
        one = bench(version, world(factor), start, forms=kinds)
        one.settle()
        assert one.loaded.way.precision == serves, factor


def test_a_half_takes_the_original_that_served_beside_it_and_gives_it_up_again(version: Version) -> None:
    kinds = [("torch", "fp32"), ("torch", "bf16")]
    one = bench(version, BF16, PLAIN_ONE, forms=kinds)
    one.settle()
    prepared = one.loaded.prepared
    original: Any = prepared.original
    assert prepared.precision == "bf16" and prepared.digest == "sha of torch bf16"
    assert original is not None and original.precision == "fp32" and not original.closed
    assert one.world.loaded == [original, prepared.engine] or set(one.world.loaded) == {
        original,
        prepared.engine,
    }
    slow = replace(BF16, factors=BF16.factors | {"torch bf16": 3.0})
    one.world.processor = slow  # as if it had been chosen at a bad moment
    one.settle(12)
    assert one.loaded.prepared.precision == "fp32" and one.loaded.prepared.original is None
    assert one.world.loaded == [one.loaded.prepared.engine] and original.closed


def test_after_drift_no_half_comes_back(version: Version) -> None:
    one = bench(version, AMX, PLAIN_ONE)
    one.loaded.fell_back = True
    one.settle()
    assert one.loaded.way.precision == "fp32"
    assert all(way.precision == "fp32" for way, _, _ in one.world.runs)


def test_an_original_that_took_the_place_of_the_half_that_was_asked_for_keeps_its_setup(
    version: Version,
) -> None:
    one = bench(version, AMX, PLAIN_ONE, forms=[("torch", "fp16")])
    one.loaded.fell_back = True
    assert not one.run()
    assert one.loaded.way == PLAIN_ONE and one.world.most_loaded == 1


def test_a_fault_after_the_exchange_does_not_close_what_serves(
    version: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = bench(version, AVX512, PLAIN_ONE, forms=[("torch", "fp32")])
    monkeypatch.setattr(sweep_file, "keep_setup", lambda *given, **more: 1 / 0)
    one.run()
    serves: Any = one.loaded.prepared.engine
    assert one.loaded.served and not serves.closed
    assert one.world.loaded == [serves]


def test_a_form_that_a_load_found_hopeless_is_not_run_in_the_way_of_callers(version: Version) -> None:
    slow = Way("torch", "fp16", CpuSetup(1))
    seconds = AVX512.seconds(slow, 1)
    keep_setup(version, "torch", "fp16", CPU, CpuSetup(1), [TimedSetup(CpuSetup(1), {1: seconds})])
    one = bench(version, AVX512, PLAIN_ONE)
    one.settle()
    assert all(way.precision != "fp16" or way.form == "onnx" for way, _, _ in one.world.runs)


def test_every_step_is_one_short_batch_and_hopeless_rivals_are_run_with_one_row(version: Version) -> None:
    one = bench(version, AVX512, PLAIN_ONE, rows=32)
    one.settle()
    longest = max(seconds for _, _, seconds in one.world.runs if seconds)
    alone = AVX512.seconds(Way("torch", "fp16", CpuSetup(1)), 1)
    assert longest <= max(2 * SHORT_S, alone)
    assert {rows for way, rows, _ in one.world.runs if (way.form, way.precision) == ("torch", "fp16")} == {1}


def test_an_engine_that_cannot_be_loaded_or_run_leaves_what_serves(
    version: Version, caplog: pytest.LogCaptureFixture
) -> None:
    one = bench(version, AVX512, PLAIN_ONE, forms=[("torch", "fp32")])

    def refused(setup: CpuSetup) -> Engine:
        if PACKED_PRODUCTS in setup.passes:
            raise MemoryError("no room")
        engine = one.world.engine("torch", "fp32", setup)
        if PACKED_CONVOLUTIONS in setup.passes:
            engine.run = lambda parts: (_ for _ in ()).throw(RuntimeError("no kernel"))  # type: ignore[method-assign]
        return engine

    form = one.loaded.prepared.forms[0]
    one.loaded.prepared.forms = [ServableForm("torch", "fp32", form.digest, form.nbytes, refused)]
    one.settle()
    assert one.loaded.way.setup == CpuSetup(4, frozenset({WITHOUT_LOCK}))
    assert "no room" in caplog.text and "no kernel" in caplog.text
    assert one.world.loaded == [one.loaded.prepared.engine]


def test_without_memory_for_one_more_engine_nothing_is_loaded(version: Version) -> None:
    one = bench(version, AVX512, PLAIN_ONE)
    one.free_bytes = 3000
    assert not one.run()
    assert one.world.most_loaded == 1


def test_a_version_that_leaves_meanwhile_ends_the_sweep_and_its_rival_is_closed(version: Version) -> None:
    one = bench(version, AVX512, PLAIN_ONE, rows=8)
    steps = one.sweep().steps()
    with pytest.raises(Gone):
        for _ in steps:
            if len(one.world.loaded) == 2:
                one.loaded.gone = True
    assert one.world.loaded == [one.loaded.prepared.engine]


def test_a_sweep_that_is_ended_closes_its_rival(version: Version) -> None:
    one = bench(version, AVX512, PLAIN_ONE, rows=8)
    steps = one.sweep().steps()
    while len(one.world.loaded) < 2:
        next(steps)
    steps.close()
    assert one.world.loaded == [one.loaded.prepared.engine]


def test_a_model_without_a_batch_is_measured_as_it_is(version: Version) -> None:
    spec = replace(SPEC, max_batch_size=0)
    one = bench(version, AVX512, PLAIN_ONE, forms=[("torch", "fp32")])
    one.loaded.spec = spec
    one.loaded.version = SimpleVersion(version, spec)  # type: ignore[assignment]
    one.settle()
    assert one.loaded.way.setup.threads == 4 and PACKED_PRODUCTS in one.loaded.way.setup.passes


class SimpleVersion:
    """A version with another spec."""

    def __init__(self, version: Version, spec: Any) -> None:
        self._version, self._spec = version, spec

    def __getattr__(self, name: str) -> Any:
        return getattr(self._version, name)

    def spec(self) -> Any:
        return self._spec


def test_a_brief_model_never_gets_more_threads(version: Version) -> None:
    brief = replace(AVX512, row_s=1e-5, batch_s=5e-5)
    one = bench(version, brief, Way("torch", "fp32", CpuSetup(4)), forms=[("torch", "fp32")])
    one.settle()
    assert 1 in [way.threads for way, _, _ in one.world.runs], "fewer threads are tried"
    calm = bench(version, brief, PLAIN_ONE, forms=[("torch", "fp32")])
    calm.settle()
    assert {way.threads for way, _, _ in calm.world.runs} == {1}
