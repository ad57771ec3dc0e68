"""A conversion for a device other than a CPU: planned by its kernels, proven on it. The device is simulated."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from halfeven.exporters.conversion.convert import Options, convert
from halfeven.exporters.conversion.road import travel
from halfeven.exporters.inputs.samples import Samples
from halfeven.exporters.on_device.environment import environment
from halfeven.exporters.on_device.reprove import holds_here
from halfeven.exporters.proof.subject import Subject
from halfeven.exporters.torch.autocast.kernels import HalfKernels
from halfeven.exporters.torch.forms import ProgramForms
from halfeven.models.errors import BadSetting
from halfeven.models.folder.package import Precision
from halfeven.models.store.store import Store, Version
from torch import Tensor, nn

from tests.model_folders import write_folder
from tests.programs import Original, original
from tests.simulated_gpu import SimulatedGpu

CPU = torch.device("cpu")


class Net(nn.Module):
    """Two products with a Bessel function between them, for which a CPU has no half kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.special.bessel_j0(self.first(x)))


@pytest.fixture(scope="module")
def net() -> Original:
    return original(Net(), {"x": torch.randn(8, 4)})


@pytest.fixture
def gpu() -> Iterator[SimulatedGpu]:
    with SimulatedGpu(random.Random(0)) as gpu:
        yield gpu


def published(net: Original, folder: Path, device: torch.device) -> Version:
    samples = Samples(
        {net.spec.inputs[0].name: np.random.default_rng().standard_normal((32, 4)).astype(np.float32)}
    )
    subject = Subject(net.program, net.spec, samples, Precision(), ("torch",), "", {}, device=str(device))
    return travel(subject, ProgramForms(subject), Store(folder), lambda _: None)


def kept(version: Version) -> dict[str, str]:
    return {one["op"]: one["reason"] for one in version.json("precision.json")["kept"]}


@pytest.mark.slow
def test_a_plan_asks_its_device_and_the_proof_holds_there_alone(
    net: Original, gpu: SimulatedGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raised(self: HalfKernels, call: Any, instead: torch.dtype | None) -> str:
        return "\"addmm\" not implemented for 'Half'" if call.op_name == "linear" and not instead else ""

    here = published(net, tmp_path / "here", CPU)
    monkeypatch.setattr(HalfKernels, "raised", raised)
    there = published(net, tmp_path / "there", gpu.device)
    assert kept(here) == {"special_bessel_j0": "no half kernel on cpu"}
    assert kept(there) == {"linear": "no half kernel on cuda"}
    assert there.json("parity.json")["environment"] == environment(gpu.device) != environment(CPU)
    assert holds_here(there, gpu.device) and not holds_here(there, CPU)
    assert holds_here(here, CPU) and not holds_here(here, gpu.device)


@pytest.mark.slow
def test_the_proof_runs_on_the_device(gpu: SimulatedGpu, tmp_path: Path) -> None:
    net = original(nn.Linear(4, 4), {"input": torch.randn(8, 4)})
    before = gpu.queues.done
    version = published(net, tmp_path, gpu.device)
    assert version.manifest["forms"]["torch"]["passed"] and gpu.queues.done > before


def test_a_file_and_a_live_model_are_not_planned_for_another_device(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "net")
    with pytest.raises(BadSetting, match="expected cpu"):
        convert(folder, Store(tmp_path), Options(("live",), device="cuda:0"))
