"""A real server on the zoo's digits: what its answers say, and versions that are refused, damaged or let go."""

import json
import shutil
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from halfeven.exporters.conversion.convert import Options, convert
from halfeven.exporters.inputs.samples import Samples, load_samples
from halfeven.models.engines.torch_engine import TorchEngine
from halfeven.models.errors import BadSetting
from halfeven.models.store.store import Store
from halfeven.serve.server import build
from halfeven.serve.settings import read_settings
from halfeven.serve.versions import roster as roster_module
from halfeven.serve.versions.loading import candidate_forms
from halfeven.serve.versions.loading import ready as readying

from tests.digits import digits_that_ask_for_torch
from tests.model_folders import write_folder
from tests.patience import PATIENCE_S, until
from tests.serve.conftest import running
from tests.serve.plain_request import get
from tests.serve.versions.traffic.conftest import serving

# A server process; the conformance tests have one in every run.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("plain_setup")]


@pytest.fixture(scope="module")
def converted() -> Path:
    return digits_that_ask_for_torch()


@pytest.fixture
def store(converted: Path, tmp_path: Path) -> Store:
    """A copy that a test may do with as it likes."""
    return Store(Path(shutil.copytree(converted, tmp_path / "store")))


@pytest.fixture(scope="module")
def samples(converted: Path) -> Samples:
    version = Store(converted).version("digits", 1)
    return load_samples(version.file("samples.safetensors"), version.spec())


LOAD_SECONDS = PATIENCE_S


def test_every_answer_names_the_version_and_precision_that_made_it(store: Store, samples: Samples) -> None:
    image = samples.arrays["image"][:2].tolist()
    with serving(store) as (address, _):
        body = json.dumps({"instances": image}).encode()
        status, headers, answer = get(address, "/v1/models/digits:predict", body)
        assert status == 200
        assert headers["halfeven-version"] == "1"
        assert headers["halfeven-precision"] == "fp16"
        assert headers["halfeven-digest"] == store.version("digits", 1).manifest["files"]["half.pt2"]
        assert "compute;dur=" in headers["server-timing"]
        assert answer["labels"] == [str(target) for target in samples.targets["logits"][:2]]
        assert get(address, "/v1/models/digits/versions")[2]["versions"][2]["status"] == "refused"
        assert "<html" in get(address, "/v1/models/digits/versions/1/report")[2]
        assert get(address, "/v1/models/digits/versions/1/plan")[2]["level"] == "O1"
        assert get(address, "/v1/models/digits/versions/9/plan")[0] == 404
        assert 'halfeven_active_version{model="digits"' in get(address, "/metrics")[2]
        assert get(address, "/v2/models/nobody")[0] == 404
        assert "Request for unknown model" in get(address, "/v2/models/nobody/infer", b"{}")[2]["error"]


def test_a_version_that_is_refused_on_this_device_does_not_replace_the_active_one(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(store) as (address, roster):
        unequal_on_this_device(monkeypatch)
        store.promote(store.version("digits", 2))
        until(lambda: roster.fault("digits") is not None, LOAD_SECONDS)
        assert "not equal on cpu" in (roster.fault("digits") or "")
        assert roster.find("digits").prepared.version == "1"
        assert get(address, "/v2/health/ready")[0] == 200


def test_where_nothing_is_active_the_fp32_original_of_a_refused_half_serves(
    store: Store, samples: Samples
) -> None:
    for number in (1, 2):
        shutil.rmtree(store.root / "models" / "digits" / str(number))
    (store.root / "models" / "digits" / "live").unlink()
    with serving(store) as (address, _):
        body = json.dumps({"instances": samples.arrays["image"][:1].tolist()}).encode()
        status, headers, _ = get(address, "/v1/models/digits:predict", body)
        assert (status, headers["halfeven-precision"], headers["halfeven-version"]) == (200, "fp32", "3")
        reason = get(address, "/v2/models/digits")[2]["properties"]["halfeven_reason"]
        assert "refused" in reason
        assert headers["halfeven-digest"] == store.version("digits", 3).manifest["files"]["original.pt2"]


def test_a_half_that_is_not_equal_is_never_served_and_without_fallback_nothing_is(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    unequal_on_this_device(monkeypatch)
    with serving(store) as (_, roster):
        assert roster.find("digits").prepared.precision == "fp32"
        assert "not equal on cpu" in roster.find("digits").prepared.reason
    with serving(store, fallback="none") as (address, roster):
        status, _, answer = get(address, "/v2/health/ready")
        assert status == 503
        assert "--fallback none" in answer["error"]
        assert get(address, "/v2/models/digits/infer", b"{}")[0] == 503


def unequal_on_this_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device on which the half kernels give something else than in the proof, which came from another device."""

    class Off(TorchEngine):
        def run(self, parts: Any) -> list[np.ndarray]:
            return [output + np.float32(0.5) for output in super().run(parts)]

    def load(version: Any, form: str, device: Any, setup: Any = None) -> Any:
        from halfeven.models.archive.archive import load_program

        return Off(load_program(version.file("half.pt2")), "fp16", device)

    monkeypatch.setattr(readying, "holds_here", lambda version, device: False)
    monkeypatch.setattr(candidate_forms, "load_half", load)


def test_a_proof_from_elsewhere_is_made_again_here(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readying, "holds_here", lambda version, device: False)
    with serving(store) as (_, roster):
        assert roster.find("digits").prepared.precision == "fp16"


def test_a_damaged_file_is_refused_by_name_and_others_go_on(store: Store, samples: Samples) -> None:
    shutil.copytree(store.root / "models" / "digits", store.root / "models" / "twin")
    damaged = store.root / "models" / "twin" / "1" / "weights.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x7f")
    (store.root / "models" / "twin" / "1" / "half.pt2").write_bytes(b"PK nonsense")
    with serving(store) as (address, roster):
        assert get(address, "/v2/health/ready")[0] == 200
        assert roster.find("digits").prepared.version == "1"
    with serving(store, require="twin") as (address, roster):
        status, _, answer = get(address, "/v2/health/ready")
        assert status == 503
        assert "model 'twin' is not served" in answer["error"]
        assert "weights.safetensors is damaged" in answer["error"]
        assert str(store.root) not in str(answer)
        index = get(address, "/v2/repository/index", b"{}")[2]
        assert "is damaged" in str(index) and str(store.root) not in str(index)
        assert get(address, "/v2/models/twin/infer", b"{}")[0] == 503
        assert roster.find("digits").prepared.version == "1"


def test_one_server_has_a_store_and_a_second_one_says_so(store: Store) -> None:
    with serving(store), pytest.raises(BadSetting, match="another server has the store"):
        build(read_settings(store=store.root, device="cpu"), store)
    with serving(store) as (_, roster):
        assert roster.ready, "the lock goes with the server"


def test_weights_that_a_gate_refused_serve_in_no_precision(store: Store, tmp_path: Path) -> None:
    """Only versions whose half alone was refused may serve as an FP32 original where nothing is active."""
    digits = store.root / "models" / "digits"
    for number in (1, 2):
        shutil.rmtree(digits / str(number))
    (digits / "live").unlink()
    shutil.copytree(digits / "3", digits / "4")
    manifest = json.loads((digits / "4" / "manifest.json").read_text())
    manifest["gate"] = {"passed": False}
    (digits / "4" / "manifest.json").write_text(json.dumps(manifest))
    with serving(store) as (_, roster):
        assert roster.find("digits").prepared.version == "3"


@pytest.mark.usefixtures("memory_is_given_back")
def test_an_engine_that_was_replaced_gives_its_weights_back(store: Store) -> None:
    with serving(store, keep_previous_seconds=0.0) as (_, roster):
        engine = roster.find("digits").prepared.engine
        assert isinstance(engine, TorchEngine)
        weights = weakref.ref(engine._module)  # what holds them
        del engine
        store.promote(store.version("digits", 2))
        until(lambda: roster.find("digits").prepared.version == "2", LOAD_SECONDS)
        until(lambda: weights() is None)


def test_a_folder_that_did_not_change_does_not_undo_what_was_learnt_since(tmp_path: Path) -> None:
    folder, store = write_folder(tmp_path / "net"), Store(tmp_path / "store")
    first = convert(folder, store, Options(forms=("torch",)))
    learnt = store.root / "models" / "net" / "2"
    shutil.copytree(first.version.folder, learnt)
    manifest = json.loads((learnt / "manifest.json").read_text()) | {"fingerprint": None}
    (learnt / "manifest.json").write_text(json.dumps(manifest))
    store.promote(store.version("net", 2))
    again = convert(folder, store, Options(forms=("torch",)))
    assert again.unchanged
    assert store.live_number("net") == 2


PROBES = ("/healthz", "/v2/health/live", "/v2/health/ready")


def test_probes_a_server_that_loads_serves_drains_or_lost_its_device(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Liveness is false only where a new process is needed; readiness wherever no request should be sent."""
    may_load, make_ready = threading.Event(), roster_module.make_ready

    def slow(*arguments: Any) -> Any:
        may_load.wait(PATIENCE_S)
        return make_ready(*arguments)

    monkeypatch.setattr(roster_module, "make_ready", slow)
    app, roster = build(read_settings(store=store.root, device="cpu"), store)
    with running(app, seconds=30) as address:

        def probed() -> list[int]:
            return [get(address, path)[0] for path in PROBES]

        assert probed() == [200, 200, 503], "a model is loading"
        may_load.set()
        roster.wait(PATIENCE_S)
        assert probed() == [200, 200, 200]
        roster.leave()
        assert probed() == [200, 200, 503], "the server is draining"
        roster.leaving = False
        roster.place.thread.lose("an illegal memory access")
        assert probed() == [503, 503, 503], "only a restart helps"
