"""Recorded batches on the simulated device: replayed in their slot, equal to the program, or not used at all."""

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from halfeven.models.engines.cuda_graphs import NotRecorded, host_reads
from halfeven.models.engines.staging import cuda_streams
from halfeven.models.engines.torch_engine import TorchEngine
from halfeven.models.program import runnable
from torch import Tensor, nn

from tests.models.engines.test_on_simulated_gpu import PACES, SEEDS, Net, Parts, differs, rows, trial
from tests.programs import Whole, whole
from tests.simulated_gpu import SimulatedGpu

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def net() -> Whole:
    return whole(Net(), {"x": torch.randn(8, 24)})


@pytest.fixture(params=SEEDS)
def gpu(request: pytest.FixtureRequest) -> Iterator[SimulatedGpu]:
    with SimulatedGpu(random.Random(request.param), PACES[request.param % 3]) as gpu:
        yield gpu


def recorded(net: Whole, gpu: SimulatedGpu, *sizes: int) -> TorchEngine:
    there = TorchEngine(net.program, "fp32", gpu.device)
    there.warm_up(rows(max(sizes)))
    for size in sizes:
        there.record(rows(size))
    return there


def mixed(count: int = 10) -> list[Parts]:
    """Batches of recorded sizes, joined of several requests or not, and of one that was not recorded."""
    chance = random.Random(0)
    return [rows(*chance.choice([(4,), (1, 3), (2,), (1, 1), (3,), (1,)])) for _ in range(count)]


def test_recorded_batches_two_in_flight_are_right_and_the_host_waits_for_nothing(
    net: Whole, gpu: SimulatedGpu
) -> None:
    here, there = TorchEngine(net.program, "fp32", CPU), recorded(net, gpu, 1, 2, 4)
    replays, batches = gpu.replays, mixed()
    assert trial(gpu, there, here, batches) == []
    assert gpu.replays - replays == sum(sum(map(len, parts[0])) != 3 for parts in batches)


def test_a_replay_takes_no_memory_and_no_one_else_gets_its_memory(gpu: SimulatedGpu) -> None:
    net = whole(nn.Sequential(*[nn.Linear(24, 24) for _ in range(4)]), {"input": torch.randn(8, 24)})
    here, there = TorchEngine(net.program, "fp32", CPU), recorded(net, gpu, 4)
    with torch.cuda.stream(cuda_streams(gpu.device)._streams["compute"]):
        others = [torch.full((512,), 7, dtype=torch.uint8, device=gpu.device) for _ in range(24)]
        count, batches = gpu.memory.count, [rows(4) for _ in range(there.in_flight)]
        launched = [there.launch(parts) for parts in batches]
        assert gpu.memory.count == count
        assert not any(
            differs(one.wait(), here.run(parts)) for one, parts in zip(launched, batches, strict=True)
        )
        assert all((one == 7).all().item() for one in others)


def test_larger_batches_than_were_recorded_are_computed_and_the_recordings_are_not_mistaken_for_them(
    net: Whole, gpu: SimulatedGpu
) -> None:
    here, there = TorchEngine(net.program, "fp32", CPU), recorded(net, gpu, 2)
    assert trial(gpu, there, here, [rows(n) for n in (2, 9, 2, 2, 9, 2)]) == []


class Said(nn.Module):
    def __init__(self, ask: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        return self.ask(x)


@pytest.mark.parametrize(
    ("ask", "operation"),
    [
        (lambda x: x * x.nonzero().sum(), "nonzero"),
        (lambda x: x * x[x > 0].sum(), "index"),
        (lambda x: x * torch.masked_select(x, x > 0).sum(), "masked_select"),
    ],
)
def test_a_program_that_needs_the_host_is_not_recorded_and_goes_on_as_it_is(
    ask: Callable[[Tensor], Tensor], operation: str
) -> None:
    program = whole(Said(ask), {"x": torch.rand(8, 4) + 1}).program
    assert [found.split()[0] for found in host_reads(runnable(program))] == [operation]
    parts: Parts = [[np.ones((2, 4), np.float32)]]
    with SimulatedGpu(random.Random(0)) as gpu:
        there = TorchEngine(program, "fp32", gpu.device)
        there.warm_up(parts)
        with pytest.raises(NotRecorded, match=operation):
            there.record(parts)
        np.testing.assert_allclose(there.run(parts)[0], TorchEngine(program, "fp32", CPU).run(parts)[0])
        assert gpu.replays == 0


def test_what_a_device_cannot_record_is_computed_and_harms_no_batch(net: Whole, gpu: SimulatedGpu) -> None:
    here, there = TorchEngine(net.program, "fp32", CPU), TorchEngine(net.program, "fp32", gpu.device)
    there.host_reads = ()
    program, asked = there._module, list[str]()

    def waits(x: Tensor) -> object:
        asked.append(str(x.sum().item()) if gpu.queues.captured else "")
        return program(x)

    there._module = waits  # type: ignore[assignment]
    there.warm_up(rows(4))
    with pytest.raises(torch.AcceleratorError, match="stream is capturing"):
        there.record(rows(4))
    replays = gpu.replays
    assert trial(gpu, there, here, [rows(4), rows(2), rows(4)]) == [] and gpu.replays == replays


def test_a_replay_that_differs_from_the_program_is_not_used(net: Whole, gpu: SimulatedGpu) -> None:
    here, there = TorchEngine(net.program, "fp32", CPU), TorchEngine(net.program, "fp32", gpu.device)
    program, calls = there._module, list[Tensor]()

    def counts(x: Tensor) -> object:
        """Adds what the host has counted: a recording adds the same for ever."""
        calls.append(x)
        y, *others = program(x)
        return [y + 0 * len(calls) + (1e-3 * len(calls) if len(calls) < 20 else 0), *others]

    there._module = counts  # type: ignore[assignment]
    there.warm_up(rows(4))
    with pytest.raises(NotRecorded, match="differs"):
        there.record(rows(4))
    calls += [torch.empty(0)] * 20
    assert trial(gpu, there, here, [rows(4), rows(4), rows(4)]) == []


def test_recordings_that_are_forgotten_are_not_replayed(net: Whole, gpu: SimulatedGpu) -> None:
    here, there = TorchEngine(net.program, "fp32", CPU), recorded(net, gpu, 2, 4)
    there.forget_recordings()
    replays = gpu.replays
    assert trial(gpu, there, here, [rows(4), rows(2)]) == [] and gpu.replays == replays
