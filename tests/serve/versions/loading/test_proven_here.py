"""The gate's findings on a device are kept for it, its driver and libraries, shown, and reused at the next start."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from halfeven.exporters.conversion.road import travel
from halfeven.exporters.inputs.samples import Samples
from halfeven.exporters.on_device import environment
from halfeven.exporters.on_device.device_proofs import proofs_of
from halfeven.exporters.on_device.reprove import reprove
from halfeven.exporters.proof.subject import Subject
from halfeven.exporters.torch.forms import ProgramForms
from halfeven.models.folder.package import Precision
from halfeven.models.store.store import Store, Version
from halfeven.serve.batching.place import Place
from halfeven.serve.http.routes.versions import history_of
from halfeven.serve.versions.loading import candidate_forms
from halfeven.serve.versions.loading import ready as readying
from halfeven.serve.versions.loading.candidate_forms import VersionHere
from halfeven.serve.versions.loading.ready import proven_halves
from torch import nn

from tests.programs import original
from tests.serve.versions.loading.simulated_place import simulated_place

pytestmark = pytest.mark.slow  # a conversion, proven again


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> Version:
    net = original(nn.Linear(4, 4), {"input": torch.randn(8, 4)}, max_batch_size=4)
    samples = Samples({"input": np.random.default_rng().standard_normal((32, 4)).astype(np.float32)})
    subject = Subject(net.program, net.spec, samples, Precision(), ("torch",), "name = 'net'", {})
    store = Store(tmp_path_factory.mktemp("store"))
    return travel(subject, ProgramForms(subject), store, lambda _: None)


@pytest.fixture
def place() -> Iterator[Place]:
    with simulated_place() as (_, place):
        yield place


@pytest.fixture
def proven(version: Version, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The devices on which the gate has run, one entry each time. It has run on none before the test."""
    for note in version.folder.parent.glob("proofs-*.json"):
        note.unlink()
    runs: list[str] = []

    def noted(version: Version, half: Any, device: torch.device, *rest: Any) -> Any:
        runs.append(str(device))
        return reprove(version, half, device, *rest)

    monkeypatch.setattr(readying, "reprove", noted)
    return runs


def start(version: Version, place: Place) -> list[str]:
    """Load the half as at a start; gives the refusals."""
    halves, refusals, _ = proven_halves(VersionHere.of(version, place))
    assert len(halves) == (not refusals)
    return refusals


def test_a_device_is_proven_once_for_its_driver_and_libraries_and_its_report_says_so(
    version: Version, place: Place, proven: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert start(version, place) == start(version, place) == []
    assert proven == ["cuda:0"]
    for change in (
        lambda: monkeypatch.setattr(environment, "_driver", lambda: "580.95"),
        lambda: monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91500),
        lambda: monkeypatch.setattr(environment, "_version", lambda *names: "1.99"),
    ):
        change()
        before = len(proven)
        assert start(version, place) == start(version, place) == []
        assert len(proven) == before + 1
    newest = proofs_of(version)[-1]
    assert set(newest.buckets) == {1, 2, 4} <= set(newest.batch_sizes) and newest.passed
    page = history_of(Store(version.folder.parents[2]), lambda _: {}).report(version.name, "1")
    assert "On other devices" in page and "a simulated device" in page
    assert "580.95" in page and "91500" in page and "passed" in page


def test_a_half_that_was_refused_on_this_device_is_refused_again_without_a_run(
    version: Version, place: Place, proven: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = candidate_forms.load_half

    def off(*given: Any) -> Any:
        engine = load(*given)
        run = engine.run
        engine.run = lambda parts: [output + np.float32(0.5) for output in run(parts)]  # type: ignore[method-assign]
        return engine

    monkeypatch.setattr(candidate_forms, "load_half", off)
    first, *_ = start(version, place)
    second, *_ = start(version, place)
    assert first == second and "not equal on cuda:0" in first and proven == ["cuda:0"]


def test_a_changed_file_or_a_damaged_note_is_proven_anew(
    version: Version, place: Place, proven: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start(version, place)
    (note,) = version.folder.parent.glob("proofs-*.json")
    note.write_text(note.read_text().replace(version.manifest["files"]["half.pt2"], "0" * 64))
    start(version, place)
    original = json.loads(note.read_text())[-1]
    damaged = [{**original, "passed": "false"}, {**original, "environment": 1}, {**original, "buckets": 1.5}]
    for one in damaged:
        note.write_text(json.dumps([one]))
        assert proofs_of(version) == []
    note.write_text("{")
    start(version, place)
    assert len(proven) == 3 and len(proofs_of(version)) == 1
