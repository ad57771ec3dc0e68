"""A half that was proven on a CPU and has no kernels on the device is planned again for it. The device is simulated."""

import contextlib
import io
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from halfeven.exporters.conversion.road import travel
from halfeven.exporters.inputs.samples import Samples
from halfeven.exporters.proof.subject import Subject
from halfeven.exporters.torch.forms import ProgramForms
from halfeven.models.folder.package import Precision
from halfeven.models.store.store import Store, Version
from halfeven.serve.batching.place import Place
from halfeven.serve.versions.loading import planned_again
from halfeven.serve.versions.loading.candidate_forms import VersionHere
from halfeven.serve.versions.loading.planned_again import plan_again
from halfeven.serve.versions.loading.ready import proven_halves
from torch import Tensor, nn

from tests.patience import PATIENCE_S
from tests.programs import original
from tests.serve.versions.loading.simulated_place import simulated_place


class Net(nn.Module):
    """Two products with a sine between them, which O3 has in half."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.sin(self.first(x)))


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Version:
    net = original(Net(), {"x": torch.randn(8, 4)})
    samples = Samples({"x": np.random.default_rng().standard_normal((32, 4)).astype(np.float32)})
    subject = Subject(net.program, net.spec, samples, Precision("O3"), ("torch",), "name = 'net'", {})
    store = Store(tmp_path_factory.mktemp("store"))
    return travel(subject, ProgramForms(subject), store, lambda _: None)


@pytest.fixture
def place() -> Iterator[Place]:
    with simulated_place(without_half={"sin"}) as (_, place):
        yield place


@pytest.fixture
def begun(place: Place, monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The processes that are begun, each carried out in a thread of this one."""
    threads: list[threading.Thread] = []

    def run(command: Sequence[str], **_: Any) -> SimpleNamespace:
        assert list(command[1:4]) == ["-P", "-m", planned_again.__name__]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            place.call(lambda: planned_again.main(command[4:]))
        return SimpleNamespace(returncode=0, stdout=printed.getvalue(), stderr="")

    def noted(version: Version, device: torch.device) -> threading.Thread | None:
        if (thread := plan_again(version, device)) is not None:
            threads.append(thread)
        return thread

    monkeypatch.setattr(planned_again.subprocess, "run", run)
    monkeypatch.setattr("halfeven.serve.versions.loading.ready.plan_again", noted)
    return threads


@pytest.mark.slow
def test_what_the_device_lacks_is_kept_in_the_next_version_which_is_active_and_proven_there(
    published: Version, place: Place, begun: list[threading.Thread]
) -> None:
    store = Store(published.folder.parents[2])
    halves, refusals, _ = proven_halves(VersionHere.of(published, place))
    assert halves == []
    assert "not implemented for 'Half'" in refusals[0] and "planned again for this device" in refusals[0]
    begun[0].join(PATIENCE_S)
    assert store.live_number("net") == 2
    again = store.version("net", 2)
    assert [(one["op"], one["reason"]) for one in again.json("precision.json")["kept"]] == [
        ("sin", "no half kernel on cuda")
    ]
    (half,), refusals, _ = proven_halves(VersionHere.of(again, place))
    assert refusals == [] and half.engine.precision == "fp16" and len(begun) == 1


@pytest.mark.slow
def test_while_its_planner_runs_a_version_is_not_planned_once_more(
    published: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, ran = threading.Event(), list[Sequence[str]]()

    def run(command: Sequence[str], **_: Any) -> SimpleNamespace:
        ran.append(command)
        assert ended.wait(PATIENCE_S)
        return SimpleNamespace(returncode=1, stdout="", stderr="no kernel")

    monkeypatch.setattr(planned_again.subprocess, "run", run)
    device = torch.device("cuda")
    thread = plan_again(published, device)
    assert thread is not None and plan_again(published, device) is thread
    ended.set()
    thread.join(PATIENCE_S)
    again = plan_again(published, device)
    assert again is not None and again is not thread
    again.join(PATIENCE_S)
    assert len(ran) == 2


@pytest.mark.slow
def test_a_version_that_was_planned_for_a_device_is_not_planned_again(
    published: Version, place: Place, begun: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(published.manifest, "lineage", {"by": "device", "device": "cuda:0"})
    _, refusals, _ = proven_halves(VersionHere.of(published, place))
    assert "not implemented for 'Half'" in refusals[0] and "planned again" not in refusals[0] and begun == []
