"""CUDA graphs serve where they were measured faster, and what speaks against them is said. The GPU is simulated."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from halfeven.exporters.inputs.samples import Samples
from halfeven.models.engines.torch_engine import TorchEngine
from halfeven.serve.versions.loading import graph_choice
from halfeven.serve.versions.loading.candidate_forms import CandidateForm, ModelHere
from halfeven.serve.versions.loading.graph_choice import choose_graphs
from torch import Tensor, nn

from tests.programs import Original, original
from tests.serve.versions.loading.simulated_place import simulated_place
from tests.simulated_gpu import SimulatedGpu


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Chosen(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.nonzero().sum()


def net(module: nn.Module) -> Original:
    made = original(module, {"x": torch.rand(8, 3) + 1})
    return replace(made, spec=made.spec.with_max_batch_size(4))


@contextmanager
def loaded(model: Original) -> Iterator[tuple[SimulatedGpu, ModelHere, CandidateForm]]:
    samples = Samples({"x": np.ones((8, 3), np.float32)})
    with simulated_place() as (gpu, place):
        here = ModelHere(model.spec, samples, place)
        chosen = CandidateForm(place.call(lambda: TorchEngine(model.program, "fp16", gpu.device)), "half.pt2")
        here.warm(chosen)
        yield gpu, here, chosen


def timed(gpu: SimulatedGpu, seconds: float) -> Callable[[Callable[[], Any]], float]:
    """A run takes a second, and ``seconds`` where it is replayed."""

    def look(run: Callable[[], Any]) -> float:
        before = gpu.replays
        run()
        return seconds if gpu.replays > before else 1.0

    return look


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seconds", "sentence", "used"), [(0.5, "2 times as fast", True), (0.99, "not faster", False)]
)
def test_recordings_stay_where_they_are_clearly_faster(
    seconds: float, sentence: str, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net(Doubled())
    with loaded(model) as (gpu, here, chosen):
        monkeypatch.setattr(graph_choice, "shortest_seconds", timed(gpu, seconds))
        (found,) = choose_graphs(here, chosen)
        assert sentence in found
        for rows in (1, 2, 4):
            before = gpu.replays
            here.place.call(lambda rows=rows: chosen.engine.run([[np.ones((rows, 3), np.float32)]]))
            assert (gpu.replays > before) is used


@pytest.mark.slow
def test_a_model_that_needs_the_host_is_said_and_served_as_it_is() -> None:
    model = net(Chosen())
    with loaded(model) as (gpu, here, chosen):
        (found,) = choose_graphs(here, chosen)
        assert found.startswith("no CUDA graphs") and "nonzero" in found
        (came,) = here.place.call(lambda: chosen.engine.run([[np.ones((2, 3), np.float32)]]))
        assert gpu.replays == 0 and came.shape == (2, 3)


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["is emptied", "cannot be emptied"])
def test_a_capture_that_fails_never_fails_the_load(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device finds in the middle of the capture that the host has to wait; no name on a list says so before."""
    model = net(Doubled())
    with loaded(model) as (gpu, here, chosen):
        engine = chosen.engine
        assert isinstance(engine, TorchEngine)
        program = engine._module

        def waits(x: Tensor) -> object:
            if gpu.queues.captured:
                x.sum().item()
            return program(x)

        engine._module = waits  # type: ignore[assignment]
        if cache == "cannot be emptied":

            def raises() -> None:
                raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

            monkeypatch.setattr(torch.cuda, "empty_cache", raises)
        (found,) = choose_graphs(here, chosen)
        assert found.startswith("no CUDA graphs: AcceleratorError") and "capturing" in found
        for rows in (1, 2, 4):
            (came,) = here.place.call(lambda rows=rows: engine.run([[np.ones((rows, 3), np.float32)]]))
            assert came.tolist() == [[2.0] * 3] * rows
        assert gpu.replays == 0
        here.place.call(engine.close)


@pytest.mark.slow
def test_too_little_memory_for_recordings_is_said_and_the_batches_are_computed() -> None:
    model = net(Doubled())
    with loaded(model) as (gpu, here, chosen):
        gpu.memory.capacity = gpu.memory.taken
        (found,) = choose_graphs(here, chosen)
        assert "out of memory" in found
        gpu.memory.capacity = 1 << 40
        (came,) = here.place.call(lambda: chosen.engine.run([[np.ones((2, 3), np.float32)]]))
        assert came.tolist() == [[2.0] * 3] * 2 and gpu.replays == 0
