"""A version is measured again once it has served, at once where live batches disagree, and ever less often."""

import threading
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from halfeven.models.engines.cpu.setup import CpuSetup
from halfeven.models.errors import NotReady
from halfeven.models.store.store import LIVE, Store, Version
from halfeven.serve.batching.interface import PreparedVersion
from halfeven.serve.versions.choices import remeasuring
from halfeven.serve.versions.choices.remeasuring import FIRST_S, LONGEST_S, Remeasuring
from halfeven.serve.versions.choices.sweep import Gone, Machine
from halfeven.serve.versions.loading import tuned
from halfeven.serve.versions.loading.cpu_choice import TimedSetup
from halfeven.serve.versions.loading.kept_setups import keep_setup, kept_setup
from halfeven.serve.versions.loading.tuned import Way

from tests.serve.versions.choices.processors import AVX512, CPU, SPEC, World

SERVES = Way("torch", "fp32", CpuSetup(1))


@dataclass(eq=False)
class Loaded:
    version: Version
    prepared: PreparedVersion
    name: str = "net"
    batches: dict[int, tuple[int, int]] = field(default_factory=dict)
    confirmed: bool = False

    def counters(self) -> Any:
        return SimpleNamespace(batches=dict(self.batches))

    def serve(self, seconds: float, each_s: float = 0.02, rows: int = 8) -> None:
        count, spent_ns = self.batches.get(rows, (0, 0))
        self.batches[rows] = (count + round(seconds / each_s), spent_ns + round(seconds * 1e9))


@dataclass(eq=False)
class Stage:
    """A version that serves, with sweeps that a test ends: ``changes`` and ``fault`` of the next ones."""

    loaded: Loaded
    world: World
    remeasuring: Remeasuring
    traffic: Any
    sweeps: list[Loaded] = field(default_factory=list)
    changes: list[bool] = field(default_factory=list)
    fault: Exception | None = None
    busy: bool = False
    crowded: bool = False
    on_core: tuple[float, float] = (0.0, 0.0)
    slower: set[str] = field(default_factory=set)  # what a sweep that changes nothing finds clearly slower

    def after(self, seconds: float, serve: float = 0.0, each_s: float = 0.02, rows: int = 8) -> int:
        """The number of sweeps that began in ``seconds`` seconds, in which batches ran for ``serve`` seconds."""
        before = len(self.sweeps)
        for _ in range(max(round(seconds), 1)):
            self.world.now += 1.0
            self.loaded.serve(serve / max(round(seconds), 1), each_s, rows)
            for _ in range(4):
                self.remeasuring.turn()
        return len(self.sweeps) - before


@pytest.fixture
def version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Version:
    monkeypatch.setattr(tuned, "this_processor", lambda: "a given processor")
    monkeypatch.setattr(tuned, "usable_cores", lambda: 4)
    with Store(tmp_path).draft("net") as draft:
        draft.write_json("spec.json", SPEC.to_json())
        return draft.publish(LIVE, {"half": None, "parent": None})


@pytest.fixture
def stage(version: Version, monkeypatch: pytest.MonkeyPatch) -> Stage:
    world = World(AVX512)
    loaded = Loaded(version, world.prepared(SERVES))
    served: Any = SimpleNamespace(
        traffic=SimpleNamespace(stable=loaded, canary=None), exchanged=lambda loaded: None
    )
    place: Any = world
    machine = Machine(lambda: True, world.clock, core_seconds=lambda thread: made.on_core)
    thread = Remeasuring(place, lambda: [served], lambda *event: None, lambda: made.busy, machine)
    made = Stage(loaded, world, thread, served.traffic)

    class Swept:
        def __init__(self, loaded: Any, *given: Any) -> None:
            self.crowded, self.decided = made.crowded, given[-1]
            self.way, self.measured = SERVES, TimedSetup.of(SERVES.setup, {1: [0.006, 0.007], 8: [0.02]})
            made.sweeps.append(loaded)

        def steps(self) -> Any:
            yield 0.0
            if made.fault is not None:
                raise made.fault
            changed = made.changes.pop(0) if made.changes else False
            self.decided.keys |= {"threads"} if changed else made.slower
            return changed

    monkeypatch.setattr(remeasuring, "Sweep", Swept)
    return made


def test_a_version_that_serves_nobody_is_not_measured_again(stage: Stage) -> None:
    assert stage.after(100) == 0
    assert stage.after(10, serve=1.5) == 0
    assert stage.after(1, serve=1.0) == 1


def test_a_thousand_brief_batches_are_enough(stage: Stage) -> None:
    assert stage.after(5, serve=0.2, each_s=1e-4) == 1


def test_each_sweep_that_confirms_the_choice_doubles_the_time_to_the_next(
    stage: Stage, version: Version
) -> None:
    stage.after(5, serve=5)
    assert stage.after(FIRST_S - 10, serve=20) == 0
    assert stage.after(20, serve=10) == 1
    assert stage.after(2 * FIRST_S - 20, serve=20) == 0
    assert stage.after(30, serve=10) == 1
    kept = kept_setup(version, "torch", "fp32", CPU)
    assert kept is not None and kept.rounds == 6 and kept.seconds == {1: 0.006, 8: 0.02}


def test_a_sweep_that_tried_everything_confirms_also_where_a_form_was_clearly_slower(
    stage: Stage, version: Version
) -> None:
    stage.slower = {"onnx fp32"}
    assert stage.after(FIRST_S - 10, serve=FIRST_S) == 1
    kept = kept_setup(version, "torch", "fp32", CPU)
    assert kept is not None and kept.rounds == 2


def test_only_what_the_last_sweep_found_best_is_confirmed(stage: Stage) -> None:
    stage.changes = [True]
    stage.after(2, serve=5)
    assert len(stage.sweeps) == 1 and not stage.loaded.confirmed
    stage.after(20, serve=20)
    assert stage.loaded.confirmed
    stage.crowded = True  # nothing is confirmed from now on
    stage.after(10, serve=10, each_s=0.2)
    assert not stage.loaded.confirmed, "its batches take far longer than was measured"


def test_a_canary_is_measured_again_too(stage: Stage) -> None:
    canary = Loaded(stage.loaded.version, stage.world.prepared(SERVES))
    stage.traffic.canary = canary
    for _ in range(5):
        canary.serve(1)
        stage.after(1)
    assert stage.sweeps == [canary] and canary.confirmed and not stage.loaded.confirmed


def test_a_disturbed_sweep_confirms_nothing_and_is_made_again_soon(stage: Stage, version: Version) -> None:
    stage.crowded = True
    assert stage.after(5, serve=5) == 1
    assert stage.after(60, serve=60) >= 3
    assert kept_setup(version, "torch", "fp32", CPU) is None
    stage.crowded = False
    assert stage.after(20, serve=20) == 1
    kept = kept_setup(version, "torch", "fp32", CPU)
    assert kept is not None and kept.rounds == 2


def test_after_a_change_it_is_measured_again_as_soon_as_it_has_served(stage: Stage, version: Version) -> None:
    stage.changes = [True, True]
    assert stage.after(10, serve=10) == 3
    assert kept_setup(version, "torch", "fp32", CPU) is None, "the third left out what the others had decided"
    assert stage.after(20, serve=20) == 1
    kept = kept_setup(version, "torch", "fp32", CPU)
    assert kept is not None and kept.rounds == 2, "what was replaced confirms nothing"


def test_live_batches_beside_a_load_disagree_with_nothing(version: Version, stage: Stage) -> None:
    keep_setup(
        version, "torch", "fp32", CPU, SERVES.setup, [TimedSetup.of(SERVES.setup, {8: [0.02]})], rounds=6
    )
    stage.after(2, serve=2)
    stage.busy = True
    stage.after(4, serve=4, each_s=0.1)
    stage.busy = False
    stage.after(1, serve=1, each_s=0.1)
    assert stage.loaded.confirmed, "a part of that look was beside the load"


def test_waits_of_the_device_thread_beside_its_other_work_make_no_batch_seem_faster(
    version: Version, stage: Stage
) -> None:
    keep_setup(
        version, "torch", "fp32", CPU, SERVES.setup, [TimedSetup.of(SERVES.setup, {8: [0.02]})], rounds=6
    )
    for second in range(1, 5):
        stage.on_core = 0.8 * second, 0.2 * second
        stage.after(1, serve=0.3)
    assert stage.loaded.confirmed


def test_a_step_is_given_the_time_that_it_asks_for(stage: Stage) -> None:
    began = list[float]()

    def steps() -> Any:
        while True:
            began.append(stage.world.now)
            yield 2.4

    stage.remeasuring._steps = steps()
    stage.after(10)
    assert [later - earlier for earlier, later in pairwise(began)] == [3.0] * 3


def test_what_was_settled_before_this_start_is_trusted_for_longer(version: Version, stage: Stage) -> None:
    keep_setup(
        version, "torch", "fp32", CPU, SERVES.setup, [TimedSetup.of(SERVES.setup, {8: [0.02]})], rounds=6
    )
    assert stage.after(4 * FIRST_S - 20, serve=100) == 0
    assert stage.after(40, serve=10) == 1


def test_a_choice_that_was_confirmed_for_years_is_still_measured_no_more_often(
    version: Version, stage: Stage
) -> None:
    keep_setup(version, "torch", "fp32", CPU, SERVES.setup, [], rounds=2100)
    assert stage.after(FIRST_S, serve=100) == 0


@pytest.mark.parametrize("each_s", [0.05, 0.01])
def test_live_batches_that_disagree_twice_have_it_measured_at_once(
    version: Version, stage: Stage, each_s: float
) -> None:
    keep_setup(
        version, "torch", "fp32", CPU, SERVES.setup, [TimedSetup.of(SERVES.setup, {8: [0.02]})], rounds=6
    )
    assert stage.after(20, serve=20) == 0
    assert stage.after(1, serve=1, each_s=each_s) == 0, "one look may be chance"
    assert stage.after(4, serve=4, each_s=each_s) == 1


def test_one_caller_after_many_is_no_reason_to_measure_and_many_after_one_are(
    version: Version, stage: Stage
) -> None:
    """The choice was confirmed beside batches of one row: it was not tried under such a load."""
    assert stage.after(5, serve=5, each_s=0.006, rows=1) == 1
    assert stage.after(1, serve=1) == 0, "one look may be chance"
    assert stage.after(4, serve=4) == 1
    assert stage.after(20, serve=20, each_s=0.006, rows=1) == 0
    assert stage.after(20, serve=20) == 0, "confirmed beside both"
    kept = kept_setup(version, "torch", "fp32", CPU)
    assert kept is not None and kept.rows == 8, "also after a restart"


def test_a_kept_setup_that_is_not_the_one_that_serves_confirms_nothing(
    version: Version, stage: Stage
) -> None:
    keep_setup(version, "torch", "fp32", CPU, CpuSetup(4), [], rounds=10)
    assert stage.after(5, serve=5) == 1


def test_while_versions_are_loaded_nothing_is_measured(stage: Stage) -> None:
    stage.busy = True
    assert stage.after(10, serve=10) == 0
    stage.busy = False
    assert stage.after(1, serve=0.1) == 1


@pytest.mark.slow
def test_a_version_that_left_is_forgotten_and_a_fault_ends_no_thread(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.fault = Gone("it left")
    assert stage.after(3, serve=3) == 1 and "Traceback" not in caplog.text
    stage.fault = RuntimeError("a bad file")
    assert stage.after(5, serve=5) == 1 and "a bad file" in caplog.text
    assert stage.after(1000, serve=100) == 0, "not tried again and again"
    assert stage.after(LONGEST_S, serve=100) == 1


def test_a_server_that_stops_is_left_alone(stage: Stage) -> None:
    stage.fault = NotReady("the device is stopping")
    assert stage.after(3, serve=3) == 1
    assert stage.after(1000, serve=1000) == 0


def test_on_another_device_and_without_forms_nothing_runs(stage: Stage) -> None:
    stage.loaded.prepared.forms = ()
    assert stage.after(10, serve=10) == 0
    place: Any = SimpleNamespace(device=SimpleNamespace(type="cuda"), thread=SimpleNamespace(native_id=None))
    thread = Remeasuring(place, lambda: pytest.fail("asked"), lambda *event: None)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


def test_the_thread_ends_when_it_is_told_and_closes_what_is_under_way(stage: Stage) -> None:
    ended = threading.Event()
    stage.loaded.serve(10)

    def steps() -> Any:
        try:
            yield 0.0
        finally:
            ended.set()

    under_way = steps()
    next(under_way)
    stage.remeasuring._steps = under_way
    stage.remeasuring.leave()
    stage.remeasuring.start()
    stage.remeasuring.join(30)
    assert ended.is_set() and not stage.remeasuring.is_alive()


def test_a_rival_serves_no_longer_where_a_version_begins_to_be_loaded(stage: Stage) -> None:
    """Loading and proving take minutes, for which the rival would stay in its place."""
    serves = list[bool]()

    def lending(loaded: Any) -> Any:
        try:
            serves.append(True)
            yield 0.0
        finally:
            serves.append(False)

    stage.remeasuring._steps = lending(stage.loaded)
    stage.remeasuring.turn()
    assert serves == [True]
    stage.busy = True
    stage.remeasuring.turn()
    assert serves == [True, False]
