"""The live form from ``convert`` to prepared: proven here or again, refused when its text is another, never trained."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from halfeven.exporters.conversion.convert import Conversion, Options, convert
from halfeven.exporters.on_device import reprove
from halfeven.models.engines.live_engine import LiveEngine
from halfeven.models.errors import BadInput, EngineFailed
from halfeven.models.store.store import LIVE, REFUSED, Store
from halfeven.serve.batching.place import Place
from halfeven.serve.finetune.jobs.job_admission import JobAdmission
from halfeven.serve.versions.loading import candidate_forms
from halfeven.serve.versions.loading import ready as readying
from halfeven.serve.versions.loading.ready import make_ready

from tests.model_folders import samples_of, write_folder

NET = """
import torch
from torch import nn
import shared

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        if bool((x == 0).all()):
            raise ValueError("only zeros")
        return shared.finish(self.last(torch.tanh(self.first(x))))

def build():
    torch.manual_seed(3)
    return Net()
"""
FINE = "def finish(x):\n    return x\n"
LOUD = (
    "import torch\n\ndef finish(x):\n"
    "    return torch.nn.functional.linear(x * 3e3, torch.eye(3) * 3e3) / 9e6\n"
)


def folder(tmp_path: Path, shared: str = FINE, **settings: Any) -> Path:
    (tmp_path / "shared.py").write_text(shared)
    return write_folder(tmp_path / "net", NET, samples=samples_of({"x": [4]}, 24), path=[".."], **settings)


def published(tmp_path: Path, shared: str = FINE) -> Conversion:
    return convert(folder(tmp_path, shared), Store(tmp_path / "store"), Options(forms=("live",)))


def test_a_folder_is_converted_live_by_its_own_word_or_by_that_of_the_command_line(tmp_path: Path) -> None:
    one = published(tmp_path).version
    other = convert(folder(tmp_path, form="live"), Store(tmp_path / "store")).version
    for version in (one, other):
        assert version.status == LIVE and list(version.manifest["forms"]) == ["live"]
    report = one.json("parity.json")["forms"]["live"]
    assert "zeros" not in {verdict["input"] for verdict in report["adversarial"]}  # its own code refuses them


def test_what_an_import_root_holds_is_part_of_the_folder(tmp_path: Path) -> None:
    first = published(tmp_path)
    store, live = Store(tmp_path / "store"), Options(forms=("live",))
    assert convert(tmp_path / "net", store, live).unchanged
    (tmp_path / "shared.py").write_text(FINE.replace("return x", "return x + 1"))
    again = convert(tmp_path / "net", store, live)
    assert not again.unchanged and again.version.number == first.version.number + 1


@pytest.mark.slow
def test_a_proven_live_half_is_active_in_the_device_thread(tmp_path: Path, place: Place) -> None:
    version = published(tmp_path).version
    prepared = make_ready(version, place)
    assert isinstance(prepared.engine, LiveEngine) and prepared.precision == "fp16"
    assert prepared.digest == version.manifest["files"]["live.json"]
    answer = place.call(
        lambda: prepared.engine.run([[np.ones((1, 4), np.float32), np.ones((2, 4), np.float32)]])
    )
    assert answer[0].shape == (3, 3) and answer[0].dtype == np.float32


@pytest.mark.slow
def test_on_another_device_a_live_half_is_proven_again(
    tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = published(tmp_path).version
    monkeypatch.setattr(reprove, "environment", lambda device: {"device": "another"})
    assert make_ready(version, place).precision == "fp16"
    loaded = candidate_forms.load_half

    def broken(*args: Any) -> Any:
        engine = loaded(*args)
        answer = engine.run
        engine.run = lambda parts: [output + 1 for output in answer(parts)]
        return engine

    monkeypatch.setattr(candidate_forms, "load_half", broken)
    monkeypatch.setattr(readying, "kept_proof", lambda *_: None)  # as if its driver were another one since
    prepared = make_ready(version, place)
    assert prepared.precision == "fp32" and "not equal on cpu" in prepared.reason


@pytest.mark.slow
def test_a_refused_live_half_leaves_its_fp32_module_to_serve(tmp_path: Path, place: Place) -> None:
    version = published(tmp_path, LOUD).version
    assert version.status == REFUSED
    prepared = make_ready(version, place)
    assert (
        prepared.precision == "fp32" and prepared.engine.form == "live" and "was refused" in prepared.reason
    )


@pytest.mark.slow
def test_a_version_whose_text_has_changed_does_not_serve_in_any_precision(
    tmp_path: Path, place: Place
) -> None:
    version = published(tmp_path).version
    (tmp_path / "shared.py").write_text(LOUD)
    with pytest.raises(EngineFailed, match=r"shared\.py has changed since the live form of net was proven"):
        make_ready(version, place)
    (tmp_path / "shared.py").write_text(FINE)
    assert make_ready(version, place).precision == "fp16"


def test_a_live_version_is_not_trained_and_says_why(tmp_path: Path) -> None:
    published(tmp_path)
    admission = JobAdmission(cast(Any, None), cast(Any, None), Store(tmp_path / "store"))
    with pytest.raises(BadInput, match="net@1 is served live: it has no captured program"):
        admission.read({"model": "net", "training_file": "file-1"})
