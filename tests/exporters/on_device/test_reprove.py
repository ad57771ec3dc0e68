"""A half is proven again in every way in which the server may run it on the device."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from halfeven.exporters.conversion.road import travel
from halfeven.exporters.inputs.samples import Samples, stored_samples
from halfeven.exporters.on_device import reprove as reproving
from halfeven.exporters.on_device.device_proofs import keep_proof, kept_proof, proofs_of
from halfeven.exporters.on_device.reprove import reprove
from halfeven.exporters.proof.subject import Subject
from halfeven.exporters.torch.forms import ProgramForms
from halfeven.models.engines.cpu.setup import PACKED, PACKED_PRODUCTS, PLAIN, CpuSetup
from halfeven.models.engines.engine import Engine
from halfeven.models.engines.load import load_half
from halfeven.models.folder.package import Precision
from halfeven.models.store.store import Store, Version
from torch import nn

from tests.programs import original

CPU = torch.device("cpu")
pytestmark = pytest.mark.slow  # a conversion


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> Version:
    net = original(nn.Linear(4, 4), {"input": torch.randn(8, 4)}, max_batch_size=4)
    samples = Samples({"input": np.random.default_rng().standard_normal((32, 4)).astype(np.float32)})
    asked = Precision(dtype="bf16")
    subject = Subject(net.program, net.spec, samples, asked, ("torch",), "name = 'net'", {})
    return travel(subject, ProgramForms(subject), Store(tmp_path_factory.mktemp("store")), lambda _: None)


def loaded(version: Version, setup: CpuSetup, wrong: Sequence[frozenset[str]] = ()) -> Engine:
    """The half on a processor that packs products; its answers are ``wrong`` with these of the packed passes."""
    engine = load_half(version, "torch", CPU, PLAIN)
    engine.setup, engine.possible = setup, {PACKED_PRODUCTS}
    if setup.passes & PACKED in wrong:
        run = engine.run
        engine.run = lambda parts: [output + np.float32(0.5) for output in run(parts)]  # type: ignore[method-assign]
    return engine


@pytest.mark.parametrize("served", [frozenset[str](), frozenset({PACKED_PRODUCTS})])
@pytest.mark.parametrize("wrong", [frozenset[str](), frozenset({PACKED_PRODUCTS})])
def test_a_bf16_half_is_judged_in_the_kernels_that_a_sweep_may_take_later(
    version: Version, served: frozenset[str], wrong: frozenset[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[CpuSetup] = []

    def load(version: Version, form: str, device: Any, setup: CpuSetup) -> Engine:
        judged.append(setup)
        return loaded(version, setup, faults)

    monkeypatch.setattr(reproving, "load_half", load)
    for faults in ([wrong], []):
        half = loaded(version, CpuSetup(1, served), faults)
        report = reprove(version, half, CPU, stored_samples(version))
        assert report.passed is not bool(faults)
    assert judged == [CpuSetup(1, frozenset({PACKED_PRODUCTS}) - served)] * 2


def test_a_proof_of_one_kernel_alone_holds_no_more(version: Version) -> None:
    """An earlier release judged the half in the way in which it was loaded."""
    report = reprove(version, load_half(version, "torch", CPU), CPU, stored_samples(version))
    keep_proof(version, "torch", "half.pt2", CPU, report)
    assert kept_proof(version, "torch", "half.pt2", CPU) is not None
    (note,) = version.folder.parent.glob("proofs-*.json")
    written = json.loads(note.read_text())
    note.write_text(json.dumps([{key: one[key] for key in one if key != "kernels"} for one in written]))
    assert proofs_of(version) and kept_proof(version, "torch", "half.pt2", CPU) is None
