"""The real staging and engine on a device that is late on purpose; every rule of order has a mutant that is caught."""

import random

import numpy as np
import pytest
import torch
from halfeven.models.engines.faults import device_lost, out_of_memory
from halfeven.models.engines.staging import CudaStreams, Staging
from halfeven.models.engines.torch_engine import TorchEngine

from tests.corpus import captured
from tests.models.engines.simulated_runs import (
    MUTANTS,
    PACES,
    SEEDS,
    WIDTH,
    Net,
    differs,
    rows,
    trial,
)
from tests.planting import plant
from tests.programs import Original, exported_as_it_is
from tests.simulated_gpu import SimulatedGpu
from tests.slow import drawn

CPU = torch.device("cpu")
ZOO = ("digits", "mlp", "cnn28", "resnet", "unet", "lstm", "bert", "gpt", "vit", "recommender")


@pytest.fixture(scope="module")
def net() -> Original:
    return exported_as_it_is(Net(), {"x": torch.randn(8, WIDTH)})


def problems(net: Original, seed: int) -> list[str]:
    chance = random.Random(seed)
    here = TorchEngine(net.program, "fp32", CPU)
    with SimulatedGpu(chance, pace=PACES[seed % 3]) as gpu:
        # This is a load beside: its memory is free on the host, its work undone.
        busy = torch.ones(4096, device=gpu.device)
        for _ in range(3):
            busy = busy * 2
        del busy
        there = TorchEngine(net.program, "fp32", gpu.device)
        batches = [rows(*[chance.randint(1, 4) for _ in range(chance.randint(1, 3))]) for _ in range(8)]
        try:
            return trial(gpu, there, here, batches)
        except Exception as error:
            return [f"{type(error).__name__}: {error}"]


@pytest.mark.slow
def test_in_whatever_order_streams_work_answers_are_right_and_the_host_waits_for_nothing_else(
    net: Original,
) -> None:
    assert [fault for seed in SEEDS for fault in problems(net, seed)] == []


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_rule_of_order_is_caught(name: str, net: Original, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, *MUTANTS[name])
    assert any(problems(net, seed) for seed in SEEDS)


def computed_when_loaded(gpu: SimulatedGpu) -> list[str]:
    """An engine whose weights are made on the device, as it is loaded, and used at once."""
    weight = torch.ones(WIDTH, device=gpu.device).mul(3.0)
    module = torch.fx.symbolic_trace(lambda x: [x * 2])
    there = TorchEngine(module, "fp32", gpu.device)
    there.change_inputs(lambda x: [x * weight])
    parts = rows(2)
    return ["wrong"] if differs(there.run(parts), [parts[0][0] * 6]) else []


def test_what_was_computed_at_load_is_there_before_the_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> list[str]:
        shown = []
        for seed in SEEDS:
            with SimulatedGpu(random.Random(seed), pace=0.0) as gpu:
                shown += computed_when_loaded(gpu)
        return shown

    assert found() == []
    old = 'self._streams["compute"].wait_stream(torch.cuda.current_stream(self._device))'
    plant(monkeypatch, CudaStreams.adopt, old, "pass")
    assert found(), "the mutant that does not wait for it is not caught"


def short_of_memory(net: Original, seed: int) -> list[str]:
    """A launch finds no memory at its n-th allocation; the one before it and those behind it are answered."""
    here = TorchEngine(net.program, "fp32", CPU)
    shown: list[str] = []
    with SimulatedGpu(random.Random(seed), pace=PACES[seed % 3]) as gpu:
        there = TorchEngine(net.program, "fp32", gpu.device)
        for parts in (rows(4), rows(4)):
            there.run(parts)  # slots have their memory
        for n in range(1, 4):  # two products and an argmax
            batches = [rows(4), rows(2, 2), rows(4)]
            ahead = there.launch(batches[0])
            gpu.run_out(n)
            with pytest.raises(torch.OutOfMemoryError) as caught:
                there.launch(rows(4))
            assert out_of_memory(caught.value) and not device_lost(caught.value)
            flying = [ahead, there.launch(batches[1])]
            for at, parts in enumerate(batches):
                came = flying[at].wait()
                if at == 0:
                    flying.append(there.launch(batches[2]))
                shown += [f"batch {at} after allocation {n}"] if differs(came, here.run(parts)) else []
    return shown


@pytest.mark.slow
def test_a_launch_without_memory_disturbs_no_other_batch_at_whichever_allocation(
    net: Original, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [fault for seed in SEEDS for fault in short_of_memory(net, seed)] == []
    plant(monkeypatch, Staging._abandon, "self._streams.enqueue(stream, _nothing).synchronize()", "pass")
    assert any(short_of_memory(net, seed) for seed in SEEDS), "a slot that is used too soon is not caught"


@pytest.mark.parametrize("after", [0, 1, 4, 9])
def test_a_sticky_error_reaches_the_caller_and_no_wrong_answer_does(net: Original, after: int) -> None:
    here = TorchEngine(net.program, "fp32", CPU)
    with SimulatedGpu(random.Random(after), pace=0.3) as gpu:
        there = TorchEngine(net.program, "fp32", gpu.device)
        there.run(rows(2))
        gpu.fail(after)
        lost = None
        for _ in range(9):
            try:
                batches = [rows(2), rows(3)]
                launched = [there.launch(parts) for parts in batches]
                for one, parts in zip(launched, batches, strict=True):
                    assert not differs(one.wait(), here.run(parts))
            except torch.AcceleratorError as error:
                lost = error
        assert lost is not None and device_lost(lost) and not out_of_memory(lost)
        with pytest.raises(torch.AcceleratorError):
            there.run(rows(1))


@pytest.mark.slow
@pytest.mark.parametrize("name", [f"zoo {name}" for name in drawn(2, ZOO)])
def test_the_models_of_the_zoo_pass_two_in_flight(name: str) -> None:
    captured_net = captured(name)
    here = TorchEngine(captured_net.program, "fp32", CPU)
    example = [tensor.numpy() for tensor in captured_net.example]
    batches = [[[np.repeat(array, times, axis=0)] for array in example] for times in (1, 2, 1, 2)]
    for seed in range(2):
        with SimulatedGpu(random.Random(seed), pace=0.3) as gpu:
            there = TorchEngine(captured_net.program, "fp32", gpu.device)
            assert trial(gpu, there, here, batches) == []
