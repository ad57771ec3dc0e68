"""Recorded batches on the simulated device: replayed in their slot, equal to the program, or not used at all."""

import random
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from halfeven.models.engines.cuda_graphs import (
    Graphs,
    NotRecorded,
    adds_in_any_order,
    agreement_of,
    agrees,
    host_reads,
)
from halfeven.models.engines.staging import cuda_streams
from halfeven.models.engines.torch_engine import TorchEngine
from halfeven.models.program import runnable
from torch import Tensor, nn

from tests.corpus.case import net as net_of
from tests.models.engines.adding_nets import ADDS, Added
from tests.models.engines.simulated_runs import PACES, SEEDS, Net, Parts, differs, rows, trial
from tests.programs import Original, original
from tests.simulated_gpu import SimulatedGpu

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def net() -> Original:
    return original(Net(), {"x": torch.randn(8, 24)})


@pytest.fixture(params=SEEDS)
def gpu(request: pytest.FixtureRequest) -> Iterator[SimulatedGpu]:
    with SimulatedGpu(random.Random(request.param), PACES[request.param % 3]) as gpu:
        yield gpu


def recorded(net: Original, gpu: SimulatedGpu, *sizes: int) -> TorchEngine:
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
    net: Original, gpu: SimulatedGpu
) -> None:
    here, there = TorchEngine(net.program, "fp32", CPU), recorded(net, gpu, 1, 2, 4)
    replays, batches = gpu.replays, mixed()
    assert trial(gpu, there, here, batches) == []
    assert gpu.replays - replays == sum(sum(map(len, parts[0])) != 3 for parts in batches)


def test_a_replay_takes_no_memory_and_no_one_else_gets_its_memory(gpu: SimulatedGpu) -> None:
    net = original(nn.Sequential(*[nn.Linear(24, 24) for _ in range(4)]), {"input": torch.randn(8, 24)})
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
    net: Original, gpu: SimulatedGpu
) -> None:
    here, there = TorchEngine(net.program, "fp32", CPU), recorded(net, gpu, 2)
    assert trial(gpu, there, here, [rows(n) for n in (2, 9, 2, 2, 9, 2)]) == []


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
    program = original(net_of(lambda self, x: ask(x)), {"x": torch.rand(8, 4) + 1}).program
    assert [found.split()[0] for found in host_reads(runnable(program))] == [operation]
    parts: Parts = [[np.ones((2, 4), np.float32)]]
    with SimulatedGpu(random.Random(0)) as gpu:
        there = TorchEngine(program, "fp32", gpu.device)
        there.warm_up(parts)
        with pytest.raises(NotRecorded, match=operation):
            there.record(parts)
        np.testing.assert_allclose(there.run(parts)[0], TorchEngine(program, "fp32", CPU).run(parts)[0])
        assert gpu.replays == 0


def test_what_a_device_cannot_record_is_computed_and_harms_no_batch(net: Original, gpu: SimulatedGpu) -> None:
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
    torch.cuda.empty_cache()  # the allocator is in the middle of nothing
    there._module = program
    for size in (4, 2):
        there.record(rows(size))
    assert trial(gpu, there, here, [rows(4), rows(2), rows(4)]) == [] and gpu.replays > replays + 3
    there.forget_recordings()
    torch.cuda.empty_cache()
    assert gpu.memory.in_pools == 0


@pytest.mark.slow
def test_an_engine_that_is_closed_harms_no_recording_of_another_and_gives_its_memory_back(
    net: Original, gpu: SimulatedGpu
) -> None:
    """Torch lets the workspaces of a stream go when a graph that was captured there is reset."""
    here = TorchEngine(net.program, "fp32", CPU)
    first, kept, last = (recorded(net, gpu, 2, 4) for _ in range(3))
    for other in (first, last):
        assert trial(gpu, other, here, [rows(2), rows(4)]) == []
        other.close()
        replays = gpu.replays
        assert trial(gpu, kept, here, [rows(2), rows(4), rows(4)]) == [] and gpu.replays == replays + 3
    again = recorded(net, gpu, 4)
    assert trial(gpu, again, here, [rows(4), rows(4)]) == trial(gpu, kept, here, [rows(2), rows(4)]) == []
    for one in (kept, again):
        one.close()
    torch.cuda.empty_cache()
    assert gpu.memory.in_pools == 0


def test_what_a_capture_without_memory_had_taken_is_free_for_the_next(gpu: SimulatedGpu) -> None:
    taken = list[weakref.ref[Tensor]]()

    def compute(x: Tensor) -> list[Tensor]:
        activations = x * 2
        taken.append(weakref.ref(activations))
        if len(taken) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if len(taken) == 3:
            assert taken[1]() is None
        return [x + 1]

    x = torch.ones(2, 4, device=gpu.device)
    Graphs(compute, cuda_streams(gpu.device)).record(x)
    assert len(taken) == 3


@pytest.mark.slow
def test_a_recording_takes_no_cached_memory_of_others_unless_there_is_no_other(
    net: Original, gpu: SimulatedGpu
) -> None:
    here, warm = TorchEngine(net.program, "fp32", CPU), TorchEngine(net.program, "fp32", gpu.device)
    warm.warm_up(rows(8))
    emptied, there = gpu.memory.emptied, recorded(net, gpu, 2, 4)
    assert gpu.memory.emptied == emptied
    fresh = gpu.memory.fresh
    assert trial(gpu, warm, here, [rows(8), rows(8)]) == [] and gpu.memory.fresh == fresh
    gpu.memory.capacity = gpu.memory.taken + gpu.memory.cached  # a pool finds only what others keep
    there.record(rows(1))
    replays = gpu.replays
    assert gpu.memory.emptied > emptied and trial(gpu, there, here, [rows(1)]) == []
    assert gpu.replays == replays + 1


def test_without_a_stream_of_its_own_nothing_is_recorded(net: Original) -> None:
    with SimulatedGpu(random.Random(0)) as gpu:
        streams = cuda_streams(gpu.device)
        lent = [streams.take() for _ in range(29)]
        assert len({one.cuda_stream for one in lent}) == 29
        with pytest.raises(RuntimeError, match="all 32 streams of cuda:0 are taken"):
            streams.take()
        streams.give_back(lent[0])
        assert streams.take() is lent[0]


@pytest.mark.slow
@pytest.mark.parametrize("operation", ADDS)
def test_a_program_that_adds_in_any_order_is_recorded_and_said_by_name(operation: str) -> None:
    net, parts = original(Added(ADDS[operation]), {"x": torch.rand(8, 24)}), rows(4)
    for seed in SEEDS:
        with SimulatedGpu(random.Random(seed), PACES[seed % 3]) as gpu:
            there = TorchEngine(net.program, "fp32", gpu.device)
            assert [found.split()[0].removesuffix("_") for found in there.in_any_order] == [operation]
            there.warm_up(parts)
            there.record(parts)
            (replayed,) = there.run(parts)
            assert gpu.replays == 5, "two in each slot when they are recorded, and one"
            there.forget_recordings()
            assert not differs(there.run(parts), [replayed])


def test_only_what_adds_in_any_order_may_differ_and_only_within_the_gate() -> None:
    puts = original(Added(lambda x, at: x.index_put((at,), x)), {"x": torch.rand(8, 24)})
    assert adds_in_any_order(runnable(puts.program)) == []
    assert agreement_of("fp16", []) == 0.0 and agreement_of("bf16", ["cumsum"]) == 4 * 2.0**-8
    allowed, at = agreement_of("fp16", ["cumsum"]), torch.tensor([4.0, -1.0, torch.inf, torch.nan])
    assert allowed == 4 * 2.0**-11
    near, far = at + 0.9 * 4.0 * allowed, at + 1.1 * 4.0 * allowed
    assert agrees(near, at, allowed) and not agrees(far, at, allowed) and not agrees(near, at, 0.0)
    assert agrees(at.clone(), at, 0.0) and not agrees(at.half(), at, allowed)
    assert not agrees(torch.tensor([1]), torch.tensor([2]), allowed)
    assert not agrees(torch.full((4,), torch.inf), at, allowed)


def test_a_replay_that_differs_from_the_program_is_not_used(net: Original, gpu: SimulatedGpu) -> None:
    here, there = TorchEngine(net.program, "fp32", CPU), TorchEngine(net.program, "fp32", gpu.device)
    program, calls = there._module, list[Tensor]()

    def counts(x: Tensor) -> object:
        """The program plus a number that the host has counted: a recording adds the same number for ever."""
        calls.append(x)
        y, *others = program(x)
        return [y + 0 * len(calls) + (1e-3 * len(calls) if len(calls) < 20 else 0), *others]

    there._module = counts  # type: ignore[assignment]
    there.warm_up(rows(4))
    with pytest.raises(NotRecorded, match="differs"):
        there.record(rows(4))
    calls += [torch.empty(0)] * 20
    assert trial(gpu, there, here, [rows(4), rows(4), rows(4)]) == []


def test_recordings_that_are_forgotten_are_not_replayed(net: Original, gpu: SimulatedGpu) -> None:
    here, there = TorchEngine(net.program, "fp32", CPU), recorded(net, gpu, 2, 4)
    there.forget_recordings()
    replays = gpu.replays
    assert trial(gpu, there, here, [rows(4), rows(2)]) == [] and gpu.replays == replays
