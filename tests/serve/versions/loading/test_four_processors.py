"""The choices of a load on four processors, by given facts: the fastest threads, passes, form and useful rows."""

from collections.abc import Iterator

import numpy as np
import pytest
from halfeven.exporters.inputs.samples import Samples
from halfeven.models.engines.cpu.row_shares import LONG_ROW_SECONDS
from halfeven.models.engines.cpu.setup import BRIEF_SPINNING, NO_SPINNING, SHARED_ROWS, CpuSetup
from halfeven.serve.versions.loading.candidate_forms import HALF_MUST_GAIN, CandidateForm, ModelHere
from halfeven.serve.versions.loading.cpu_choice import choose_setup
from halfeven.serve.versions.loading.tuned import Way
from halfeven.serve.versions.loading.useful_rows import measure_useful_rows

from tests.serve.versions.choices.processors import (
    AMX,
    AVX2,
    AVX512,
    BF16,
    FORMS,
    PROCESSORS,
    SPEC,
    Processor,
    World,
    ways,
)

ROWS = 32
SAMPLES = Samples({"x": np.zeros((64, 4), np.float32)})
SERVES = {AVX2: ("onnx", "fp32"), AVX512: ("torch", "fp32"), BF16: ("torch", "bf16"), AMX: ("torch", "fp16")}


@pytest.fixture(params=PROCESSORS, ids=lambda one: one.name)
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(request.param)
    made.take_over(monkeypatch)
    yield made
    assert made.loaded == [], "an engine that was only measured stays loaded"


def chosen(world: World, form: str, precision: str) -> CpuSetup:
    def batch_of(rows: int) -> list[list[np.ndarray]]:
        return [[np.zeros((rows, 4))]]

    return choose_setup(lambda setup: world.engine(form, precision, setup), batch_of, ROWS, world.call).setup


def best_setup(processor: Processor, form: str, precision: str) -> CpuSetup:
    found = min(ways(processor, [(form, precision)]), key=lambda way: processor.seconds(way, ROWS)).setup
    # A pass whose gain is not seen alone is taken wherever it costs nothing.
    return found.having(BRIEF_SPINNING, NO_SPINNING) if form == "onnx" else found


@pytest.mark.parametrize(("form", "precision"), FORMS, ids=lambda one: one)
def test_threads_and_passes_are_the_fastest_ones(world: World, form: str, precision: str) -> None:
    found = chosen(world, form, precision)
    assert CpuSetup(found.threads, found.passes - {SHARED_ROWS}) == best_setup(
        world.processor, form, precision
    )
    on_one_core = world.processor.seconds(Way(form, precision, CpuSetup(1, found.passes)), ROWS)
    if SHARED_ROWS in found.passes:
        assert on_one_core / ROWS >= LONG_ROW_SECONDS


def test_the_fastest_form_serves_and_a_half_only_where_it_is_clearly_faster(world: World) -> None:
    setups = {kind: chosen(world, *kind) for kind in FORMS}
    candidates = [CandidateForm(world.engine(*kind, setup), "file") for kind, setup in setups.items()]
    best, _ = ModelHere(SPEC, SAMPLES, world).fastest(candidates)  # type: ignore[arg-type]
    assert (best.engine.form, best.engine.precision) == SERVES[world.processor]
    seconds = {
        kind: world.processor.seconds(Way(*kind, setup), ROWS) * (1 if kind[1] == "fp32" else HALF_MUST_GAIN)
        for kind, setup in setups.items()
    }
    assert seconds[SERVES[world.processor]] == min(seconds.values())
    best.engine.close()


def test_the_useful_rows_answer_within_a_twentieth_of_the_most_rows_per_second(world: World) -> None:
    way = Way("torch", "fp32", chosen(world, "torch", "fp32"))

    def seconds(rows: int) -> float:
        return world.processor.seconds(way, rows)

    def run_seconds(rows: int) -> float:
        world.now += seconds(rows)
        return seconds(rows)

    found = measure_useful_rows(run_seconds, ROWS, clock=world.clock)
    assert found / seconds(found) >= 0.95 * max(rows / seconds(rows) for rows in range(1, ROWS + 1))
