"""The selftest passes on devices that are right, and names what a planted error broke. The GPU is simulated."""

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from halfeven.exporters.torch.autocast import folding
from halfeven.exporters.torch.onnx_form.export import write_onnx
from halfeven.models.engines import cuda_graphs
from halfeven.models.engines.onnx_on_cuda import BoundRuns
from halfeven.models.engines.staging import Staging
from halfeven.models.engines.switched_off import (
    CUDA_GRAPHS,
    DEVICE,
    ONNX_HALF,
    PINNED_STAGING,
    TORCH_HALF,
    TWO_IN_FLIGHT,
    features_off,
)
from halfeven.models.engines.torch_engine import TorchEngine
from halfeven.models.spec.value_range import ValueRange
from halfeven.serve.selftest import check_fast_forms
from halfeven.serve.selftest.check_out_of_memory import NO_DEVICE_HAS
from halfeven.serve.selftest.nets import CPU, Net
from halfeven.serve.selftest.plain_way import FAILED, NOT_APPLICABLE, PASSED, Outcome
from halfeven.serve.selftest.selftest import CHECKS, reasons_of, run_checks

from tests.corpus import captured
from tests.models.engines.simulated_onnx import placed
from tests.models.engines.simulated_runs import MUTANTS
from tests.planting import plant
from tests.serve.selftest.planted import one_bit_off
from tests.simulated_gpu import SimulatedGpu
from tests.simulated_gpu.onnx_session import onnx_runtime_on

BITS, ORDER, SIZES, GRAPHS, MEMORY, OUT, ONNX = CHECKS


@pytest.fixture(scope="module")
def nets() -> list[Net]:
    model = captured("zoo mlp")
    return [Net("mlp", model.spec, model.program)]


@pytest.fixture(scope="module")
def half_file(nets: list[Net], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ONNX half, written beforehand: torch's exporter asks torch's C++ side for the device, which is not there."""
    path = tmp_path_factory.mktemp("onnx") / "half.onnx"
    write_onnx(nets[0].half(torch.device("cuda:0")), nets[0].spec, path, {})
    return path


Found = Callable[..., dict[str, Outcome]]


@pytest.fixture
def gpu() -> Iterator[SimulatedGpu]:
    with SimulatedGpu(random.Random(0)) as gpu, onnx_runtime_on(gpu):
        yield gpu
    assert not features_off(gpu.device), "what was tried without is on again"


@pytest.fixture
def on_gpu(gpu: SimulatedGpu, nets: list[Net], half_file: Path, monkeypatch: pytest.MonkeyPatch) -> Found:
    """A function that runs the checks of these names, or all, on a simulated device."""
    monkeypatch.setattr(
        check_fast_forms, "write_onnx", lambda program, spec, path, _: shutil.copy(half_file, path)
    )

    def found(*names: str) -> dict[str, Outcome]:
        checks = {name: CHECKS[name] for name in names or CHECKS}
        return run_checks(gpu.device, nets, lambda _: None, checks)

    return found


def on_cpu(nets: list[Net]) -> dict[str, Outcome]:
    return run_checks(CPU, nets, lambda _: None)


def test_on_a_cpu_autocast_is_checked_and_what_needs_cuda_is_not_applicable_by_name(nets: list[Net]) -> None:
    outcomes = on_cpu(nets)
    assert outcomes.pop(BITS).status == PASSED
    assert {outcome.status for outcome in outcomes.values()} == {NOT_APPLICABLE}
    assert all("only a CUDA device has" in outcome.evidence for outcome in outcomes.values())


@pytest.mark.slow
def test_on_a_device_that_is_right_all_pass_but_autocast_which_the_simulation_lacks(on_gpu: Found) -> None:
    outcomes = on_gpu()
    assert "autocast changes nothing" in outcomes.pop(BITS).evidence
    assert {name: outcome for name, outcome in outcomes.items() if outcome.status != PASSED} == {}
    assert reasons_of(outcomes) == {}


def test_a_rewrite_that_differs_from_autocast_by_one_bit_switches_the_torch_half_off(
    nets: list[Net], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(
        monkeypatch,
        folding._rounded,
        "known[key].as_strided(weight.shape, weight.stride(), 0)",
        "_one_bit_off(known[key]).as_strided(weight.shape, weight.stride(), 0)",
        _one_bit_off=one_bit_off,
    )
    outcomes = on_cpu(nets)
    assert outcomes[BITS].status == FAILED and outcomes[BITS].off == (TORCH_HALF,)
    assert "mlp: output" in outcomes[BITS].evidence


ANY_ORDER = {
    "computing does not wait for the copy in": PINNED_STAGING,
    "the copy out does not wait for computing": PINNED_STAGING,
    "two batches have one slot": TWO_IN_FLIGHT,
    "slots share memory on the device": TWO_IN_FLIGHT,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ANY_ORDER)
def test_a_stream_that_does_not_wait_or_a_slot_used_twice_switches_that_fast_way_off(
    name: str, on_gpu: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, *MUTANTS[name])
    outcome = on_gpu(ORDER)[ORDER]
    assert outcome.status == FAILED and outcome.off == (ANY_ORDER[name],)
    assert "batches differ from the FP32 program" in outcome.evidence


@pytest.mark.slow
def test_a_size_that_is_wrong_in_half_alone_switches_the_torch_half_off(
    on_gpu: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = "[one * (1 + (len(one) == 4) * (self.precision == 'fp16')) for one in self._module(*inputs)]"
    plant(monkeypatch, TorchEngine._eagerly, "self._module(*inputs)", wrong)
    outcome = on_gpu(SIZES)[SIZES]
    assert outcome.status == FAILED and outcome.off == (TORCH_HALF,) and "mlp fp16" in outcome.evidence


def test_a_size_that_is_wrong_in_fp32_whatever_is_off_switches_the_device_off(
    on_gpu: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = "[one * (1 + (len(one) == 4)) for one in self._module(*inputs)]"
    plant(monkeypatch, TorchEngine._eagerly, "self._module(*inputs)", wrong)
    outcome = on_gpu(SIZES)[SIZES]
    assert (
        outcome.status == FAILED and outcome.off == (DEVICE,) and "without any fast way" in outcome.evidence
    )


@pytest.mark.slow
def test_a_replay_that_differs_switches_cuda_graphs_off(
    on_gpu: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recording of one slot is replayed for another one: it reads that slot's memory."""
    plant(monkeypatch, TorchEngine._graphs_of_slot, "[self._staging.slot]", "[0]")
    plant(monkeypatch, cuda_graphs._key, "tensor.data_ptr()", "0")
    outcome = on_gpu(GRAPHS)[GRAPHS]
    assert outcome.status == FAILED and outcome.off == (CUDA_GRAPHS,)
    assert "differ from the program" in outcome.evidence


@pytest.mark.slow
def test_replays_of_what_adds_in_any_order_agree_within_the_gate_and_are_said_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, checks = captured("scatter add"), {GRAPHS: CHECKS[GRAPHS]}
    x, ids = model.spec.inputs
    spec = replace(model.spec, inputs=(x, replace(ids, range=ValueRange((0,), (9,)))))
    scattering = [Net("scattering", spec, model.program)]
    monkeypatch.setattr(Net, "half", lambda net, device: net.original)  # rounding would hide differences
    with SimulatedGpu(random.Random(0)) as gpu:
        outcome = run_checks(gpu.device, scattering, lambda _: None, checks)[GRAPHS]
        assert outcome.status == PASSED and "(within the gate: scatter_add 'scatter_add')" in outcome.evidence
        plant(monkeypatch, cuda_graphs.agreement_of, "if in_any_order", "if False")
        assert run_checks(gpu.device, scattering, lambda _: None, checks)[GRAPHS].status == FAILED


@pytest.mark.slow
def test_a_batch_that_keeps_its_memory_is_found(on_gpu: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    plant(
        monkeypatch,
        Staging.release,
        "slot.answers, slot.taken = (), []",
        "kept.append(slot.answers) if self.slots > 1 else None; slot.answers, slot.taken = (), []",
        kept=kept,
    )
    outcome = on_gpu(MEMORY)[MEMORY]
    assert outcome.status == FAILED and outcome.off == (TWO_IN_FLIGHT,) and "keep" in outcome.evidence


def test_an_engine_that_a_batch_without_memory_stops_switches_the_device_off(
    on_gpu: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot of that batch does not become free again: soon no batch is taken."""
    plant(monkeypatch, Staging._abandon, "self.release(slot)", "pass")
    outcome = on_gpu(OUT)[OUT]
    assert (
        outcome.status == FAILED and outcome.off == (DEVICE,) and "the batch after failed" in outcome.evidence
    )


def test_a_device_that_does_not_survive_it_is_switched_off_and_nothing_more_is_asked_of_it(
    on_gpu: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = torch.empty

    def deadly(*shape: Any, **options: Any) -> torch.Tensor:
        if shape == (NO_DEVICE_HAS,):
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", deadly)
    outcomes = on_gpu(OUT, ONNX)
    assert outcomes[OUT].status == FAILED and outcomes[OUT].off == (DEVICE,)
    assert outcomes[ONNX].status == NOT_APPLICABLE and OUT in outcomes[ONNX].evidence


def test_a_sticky_error_of_the_device_under_stress_switches_it_off(gpu: SimulatedGpu, on_gpu: Found) -> None:
    gpu.fail(100)
    outcomes = on_gpu(ORDER, SIZES)
    assert outcomes[ORDER].off == (DEVICE,) and "illegal memory access" in outcomes[ORDER].evidence
    assert outcomes[SIZES].status == NOT_APPLICABLE


def test_a_node_with_a_half_on_the_cpu_switches_the_onnx_half_off(
    on_gpu: Found, half_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    relu = next(node for node in onnx.load(half_file).graph.node if node.op_type == "Relu")
    placed(monkeypatch, CPU=[("Relu", relu.name)])
    outcome = on_gpu(ONNX)[ONNX]
    assert outcome.status == FAILED and outcome.off == (ONNX_HALF,)
    assert f"Relu '{relu.name}' with half tensors" in outcome.evidence


def test_an_onnx_half_that_answers_wrongly_is_switched_off(
    on_gpu: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, BoundRuns.__call__, "tensor.data_ptr()", "tensor.data_ptr() + 4")
    outcome = on_gpu(ONNX)[ONNX]
    assert outcome.status == FAILED and outcome.off == (ONNX_HALF,) and "mlp onnx" in outcome.evidence


def test_without_the_cuda_provider_no_onnx_placement_is_judged(
    on_gpu: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    outcome = on_gpu(ONNX)[ONNX]
    assert outcome.status == NOT_APPLICABLE and "CUDAExecutionProvider" in outcome.evidence
