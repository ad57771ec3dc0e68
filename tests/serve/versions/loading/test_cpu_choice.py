"""A pass that is not measured faster on this processor is not taken: it has to gain beside the plain program."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from halfeven.models.engines.cpu.setup import (
    BRIEF_SPINNING,
    NO_SPINNING,
    PACKED_CONVOLUTIONS,
    PACKED_PRODUCTS,
    SHARED_ROWS,
    WITHOUT_LOCK,
    CpuSetup,
)
from halfeven.models.engines.engine import Engine
from halfeven.models.errors import NotReady
from halfeven.models.machine import core_wait
from halfeven.serve.versions.loading import cpu_choice
from halfeven.serve.versions.loading.cpu_choice import CpuChoice, choose_setup
from halfeven.serve.versions.loading.tuned import Way

from tests.serve.versions.choices.processors import Processor, World

Seconds = Callable[[CpuSetup, int], float]  # of a batch, by its setup and rows
CORES = 4


@dataclass(frozen=True, eq=False)
class Given(Processor):
    """A processor whose batches take as long as a formula says."""

    of: Seconds = lambda setup, rows: 0.0

    def seconds(self, way: Way, rows: int) -> float:
        return self.of(way.setup, rows)


def chosen(passes: set[str], of: Seconds, most_rows: int = 32, crowded: float = 0.0) -> CpuChoice:
    def batch_of(rows: int) -> list[list[np.ndarray]]:
        return [[np.zeros(rows or 1)]]

    world = World(Given("given", {}, CORES, of=of), crowded=crowded, possible=lambda *_: passes)
    with pytest.MonkeyPatch.context() as patched:
        world.take_over(patched)
        choice = choose_setup(
            lambda setup: world.engine("torch", "fp32", setup), batch_of, most_rows, world.call
        )
    assert world.loaded == [], "an engine that was only measured stays loaded"
    return choice


def times(**factors: float) -> Seconds:
    """1 ms a row on one core, shared evenly by the threads, times a factor for each pass (``_`` for a space)."""

    def seconds(setup: CpuSetup, rows: int) -> float:
        product = 1e-3 * rows / setup.threads
        for name, factor in factors.items():
            product *= factor if name.replace("_", " ") in setup.passes else 1.0
        return product

    return seconds


def test_a_pass_that_gains_with_large_batches_and_loses_with_one_row_is_not_taken() -> None:
    def seconds(setup: CpuSetup, rows: int) -> float:
        factor = (1.2 if rows == 1 else 0.5) if PACKED_CONVOLUTIONS in setup.passes else 1.0
        return factor * 1e-3 * rows / setup.threads

    assert chosen({PACKED_CONVOLUTIONS}, seconds).setup.passes == frozenset()
    both = {PACKED_CONVOLUTIONS, PACKED_PRODUCTS}
    assert chosen(both, times()).setup == CpuSetup(CORES), "no gain, no pass"


@pytest.mark.parametrize("name", [WITHOUT_LOCK, BRIEF_SPINNING, NO_SPINNING])
def test_a_pass_whose_gain_shows_beside_other_work_is_taken_unless_it_costs_more_than_noise(
    name: str,
) -> None:
    def costing(factor: float) -> Seconds:
        return lambda setup, rows: 1e-3 * rows / setup.threads * (factor if name in setup.passes else 1.0)

    assert chosen({name}, costing(1.0)).setup.passes == {name}
    assert chosen({name}, costing(1.02)).setup.passes == {name}
    assert chosen({name}, costing(1.04)).setup.passes == frozenset()


def test_more_threads_have_to_gain_a_tenth_and_a_brief_batch_never_gets_them() -> None:
    assert (
        chosen(set(), lambda setup, rows: 1e-3 * rows / (1.05 if setup.threads > 1 else 1)).setup.threads == 1
    )
    assert (
        chosen(set(), lambda setup, rows: 1e-3 * rows / (1.2 if setup.threads > 1 else 1)).setup.threads
        == CORES
    )
    brief = chosen(set(), lambda setup, rows: 1e-5 * rows / setup.threads)
    assert brief.setup.threads == 1 and len(brief.measured) == 1


def test_on_a_crowded_machine_a_long_batch_gets_every_core_and_nothing_is_kept() -> None:
    """Two threads on one core look slow for as long as the other program runs, and would be chosen for ever."""
    choice = chosen(set(), lambda setup, rows: 1e-3 * rows, crowded=0.5)
    assert choice.setup.threads == CORES and choice.crowded


def test_the_waits_of_an_engine_count_although_its_threads_end_when_it_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the threads of an engine with several wait, half of the time, and every such engine is closed."""
    world = World(Given("given", {}, CORES, of=lambda setup, rows: 1e-3 * rows), possible=lambda *_: set())
    world.take_over(monkeypatch)
    monkeypatch.setattr(cpu_choice, "Crowding", core_wait.Crowding)
    monkeypatch.setattr(core_wait.time, "perf_counter", lambda: world.now)
    monkeypatch.setattr(core_wait, "_other_programs_worked_s", lambda: world.now)
    monkeypatch.setattr(core_wait, "stolen_s", lambda: 0.0)
    monkeypatch.setattr(core_wait, "throttled_s", lambda: 0.0)
    monkeypatch.setattr(
        core_wait,
        "waits_of_threads",
        lambda: {id(engine): world.now / 2 for engine in world.loaded if engine.way.setup.threads > 1},
    )
    choice = choose_setup(
        lambda setup: world.engine("torch", "fp32", setup), lambda rows: [[np.zeros(rows)]], 32, world.call
    )
    assert len(choice.measured) == 2 and world.loaded == []
    assert choice.crowded


@pytest.mark.parametrize(("factor", "taken"), [(0.7, True), (1.5, True), (8.0, False)])
def test_beside_other_programs_a_pass_is_taken_unless_it_is_far_slower(factor: float, taken: bool) -> None:
    choice = chosen({PACKED_PRODUCTS}, times(packed_products=factor), crowded=0.5)
    assert (PACKED_PRODUCTS in choice.setup.passes) == taken and choice.crowded


@pytest.mark.parametrize(("row_s", "shared"), [(5e-3, True), (1e-3, False)])
def test_rows_are_shared_where_they_are_long(row_s: float, shared: bool) -> None:
    possible = {WITHOUT_LOCK, SHARED_ROWS}
    choice = chosen(possible, lambda setup, rows: row_s * rows / setup.threads)
    assert (SHARED_ROWS in choice.setup.passes) == shared


def test_a_setup_that_fails_is_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    def seconds(setup: CpuSetup, rows: int) -> float:
        if PACKED_PRODUCTS in setup.passes:
            raise RuntimeError("no kernel")
        return 1e-3 * rows / setup.threads

    assert chosen({PACKED_PRODUCTS}, seconds).setup == CpuSetup(CORES)
    assert "no kernel" in caplog.text


def test_a_row_that_lasts_long_is_measured_alone_and_once_for_each_setup() -> None:
    runs: list[int] = []

    def seconds(setup: CpuSetup, rows: int) -> float:
        runs.append(rows)
        return 2.0 * rows / setup.threads

    choice = chosen({PACKED_PRODUCTS}, seconds)
    assert choice.setup == CpuSetup(CORES)
    assert set(runs) == {1} and len(runs) <= 4


def test_a_model_that_is_not_batched_is_measured_as_it_is() -> None:
    assert chosen({PACKED_PRODUCTS}, times(packed_products=0.5), most_rows=0).setup.passes == {
        PACKED_PRODUCTS
    }


def test_a_server_that_stops_meanwhile_blames_no_setup(caplog: pytest.LogCaptureFixture) -> None:
    world = World(Given("given", {}, CORES, of=times()))

    def load(setup: CpuSetup) -> Engine:
        if setup.threads > 1:
            raise NotReady("the server is shutting down")
        return world.engine("torch", "fp32", setup)

    with pytest.MonkeyPatch.context() as patched, pytest.raises(NotReady):
        world.take_over(patched)
        choose_setup(load, lambda rows: [[np.zeros(rows)]], 32, world.call)
    assert world.loaded == [] and caplog.text == ""
