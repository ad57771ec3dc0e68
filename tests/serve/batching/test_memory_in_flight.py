"""The memory runs out with two batches in flight: each is tried alone before fewer rows are."""

import random
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from halfeven.models.engines.torch_engine import TorchEngine, run_in_every_slot
from halfeven.serve.batching.ceiling import Ceiling
from halfeven.serve.batching.engine_runner import EngineRunner, Run
from halfeven.serve.versions.loading.warming import warm
from torch import Tensor, nn

from tests.programs import original
from tests.serve.batching.stage import Fake, rows_of, spec
from tests.simulated_gpu import SimulatedGpu


@dataclass(eq=False)
class Item:
    arrays: list[np.ndarray]
    alone: bool = False

    @property
    def rows(self) -> int:
        return len(self.arrays[0])


class Tight(Fake):
    """An engine with memory for so many rows under way; a launched batch takes memory until it is waited for."""

    in_flight = 2

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.room, self.events = rows, list[str]()

    def launch(self, parts: Any) -> Any:
        rows = sum(map(len, parts[0]))
        self.events.append(f"launch {rows}")
        if rows > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.room -= rows

        def wait() -> list[np.ndarray]:
            self.room += rows
            return Fake.run(self, parts)

        return SimpleNamespace(wait=wait)

    def run(self, parts: Any) -> list[np.ndarray]:
        return self.launch(parts).wait()


def values(run: Run) -> list[float]:
    assert isinstance(run.result, list), run.result
    return run.result[0][:, 0].tolist()


def ran(runner: EngineRunner, first: float) -> list[Run]:
    """Two batches of four rows, begun together and finished in turn. Of two requests each: the traceback of a single
    one is logged, and the log that pytest keeps would keep the batch's memory."""
    begun = [runner.begin([Item(rows_of(*[first + n] * 2)) for _ in range(2)]) for n in range(2)]
    return [runner.finish(run) for run in begun]


def test_rows_that_fit_alone_leave_no_ceiling_and_the_next_such_batch_is_not_begun_beside_another(
    tmp_path: Path,
) -> None:
    engine, ceiling = Tight(rows=6), Ceiling(tmp_path / "ceiling.json")
    runner = EngineRunner(spec(), engine, time.monotonic_ns, ceiling)
    assert [values(run) for run in ran(runner, 0)] == [[0] * 4, [1] * 4]
    assert engine.events == ["launch 4"] * 3, "the second was tried again"
    assert not ceiling.known and not (tmp_path / "ceiling.json").exists()
    assert [values(run) for run in ran(runner, 5)] == [[5] * 4, [6] * 4]
    assert engine.events == ["launch 4"] * 5, "what is known is not tried"
    small = [runner.begin([Item(rows_of(n, n))]) for n in (1, 2)]
    assert engine.events[5:] == ["launch 2"] * 2, "fewer rows fit beside each other"
    assert [values(runner.finish(run)) for run in small] == [[1, 1], [2, 2]]


def test_a_batch_behind_the_one_that_has_to_be_alone_is_waited_for_and_answered_in_its_turn() -> None:
    engine = Tight(rows=6)
    runner = EngineRunner(spec(), engine, time.monotonic_ns, Ceiling())
    first, second = (runner.begin([Item(rows_of(*[n] * 4))]) for n in (0, 1))
    assert values(runner.finish(first)) == [0] * 4
    third = runner.begin([Item(rows_of(2, 2, 2))])
    assert engine.room < 4 or third.launched is None
    assert values(runner.finish(second)) == [1] * 4
    assert values(runner.finish(third)) == [2] * 3


def test_rows_that_do_not_fit_alone_either_are_halved_as_before(tmp_path: Path) -> None:
    engine, ceiling = Tight(rows=3), Ceiling(tmp_path / "ceiling.json")
    runner = EngineRunner(spec(), engine, time.monotonic_ns, ceiling)
    assert [values(run) for run in ran(runner, 0)] == [[0] * 4, [1] * 4]
    assert ceiling.smallest == 2 and (tmp_path / "ceiling.json").exists()


class TightAtTheWait(Fake):
    """An engine that notices too little memory for all that is under way only when a batch is waited for."""

    in_flight = 2

    def __init__(self, rows: int) -> None:
        super().__init__(device="cuda:0")
        self.room, self.under_way, self.launches = rows, 0, 0

    def launch(self, parts: Any) -> Any:
        rows = sum(map(len, parts[0]))
        self.under_way += rows
        self.launches += 1

        def wait() -> list[np.ndarray]:
            short = self.under_way > self.room
            self.under_way -= rows
            if short:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return Fake.run(self, parts)

        return SimpleNamespace(wait=wait)

    def run(self, parts: Any) -> list[np.ndarray]:
        return self.launch(parts).wait()


def test_a_lack_of_memory_seen_at_the_wait_is_tried_alone_once_the_batch_behind_has_ended() -> None:
    engine, ceiling = TightAtTheWait(rows=6), Ceiling()
    runner = EngineRunner(spec(), engine, time.monotonic_ns, ceiling)
    assert [values(run) for run in ran(runner, 0)] == [[0] * 4, [1] * 4]
    assert engine.launches == 3 and not ceiling.known, "the batch behind is not run again"


class Wide(nn.Module):
    """4 MB of answers a row, which stay until they are taken."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1].repeat(1, 1 << 20) * 2


@pytest.mark.slow
def test_the_real_engine_on_a_device_with_memory_for_one_and_a_half_batches() -> None:
    with SimulatedGpu(random.Random(0), capacity=40 << 20) as gpu:
        engine = TorchEngine(original(Wide(), {"x": torch.randn(8, 4)}).program, "fp32", gpu.device)
        toy, ceiling = spec(rows=4), Ceiling()
        runner = EngineRunner(toy, engine, time.monotonic_ns, ceiling)
        for first in (1, 3, 5):
            assert [values(run) for run in ran(runner, first)] == [[2 * first] * 4, [2 * first + 2] * 4]
        assert not ceiling.known and runner._beside.known


@pytest.mark.slow
def test_warm_up_keeps_a_bucket_that_fits_alone_and_measures_with_a_batch_in_every_slot() -> None:
    def batch_of(rows: int) -> list[list[np.ndarray]]:
        return [[np.ones((rows, 4), np.float32)]]

    class Warmed(Tight):
        def warm_up(self, parts: Any) -> None:
            run_in_every_slot(self, parts)

    engine, ceiling = Warmed(rows=6), Ceiling()
    assert warm(engine, spec(rows=4, buckets=(1, 2)), batch_of, ceiling, lambda fn: fn()) == 4
    assert not ceiling.known
    with SimulatedGpu(random.Random(0), capacity=44 << 20) as gpu:
        real = TorchEngine(original(Wide(), {"x": torch.randn(8, 4)}).program, "fp32", gpu.device)
        assert warm(real, spec(rows=16), batch_of, ceiling := Ceiling(), lambda fn: fn()) == 2
        assert ceiling.rows(4) == 2, "two batches of 4 rows take more than there is"
