"""A job tried before it exists: what its model and its data would do, what it would cost, and nothing left behind."""

import io
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from halfeven.exporters.conversion.convert import Options, convert
from halfeven.models.errors import Overloaded
from halfeven.models.store.manifest import sha256_of
from halfeven.models.store.store import Store
from halfeven.serve.bench.callers import served_version
from halfeven.serve.finetune.client.dry_run import comparison_of
from halfeven.serve.finetune.data.files import Files, Upload
from halfeven.serve.finetune.jobs.job_admission import JobAdmission
from halfeven.serve.finetune.jobs.records.job_store import JobStore
from halfeven.serve.finetune.jobs.records.job_types import FileRecord
from halfeven.serve.finetune.jobs.trial_run import TOO_SLOW, TrialRuns, compared
from halfeven.serve.finetune.jobs.worker_process import JobFailed
from halfeven.serve.finetune.training.loop.setting_names import EXACT_FIRST, NEARLY
from rich.console import Console
from safetensors.numpy import save_file

from tests.model_folders import tensor, write_folder
from tests.patience import PATIENCE_S
from tests.serve.finetune.jobs.hard_job import rows
from tests.serve.finetune.jobs.job_server import ended, served_to_client

# A guard that half does not hold, a part that the learnt output does not depend on, and 2 GiB for batches of 7 rows.
NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.aside = nn.Linear(4, 16), nn.Linear(16, 3), nn.Linear(4, 2)
    def forward(self, x):
        if self.training and len(x) == 7:
            torch.empty(2**29)
        hidden = self.first(x)
        hidden = hidden / (hidden.abs().mean(-1, keepdim=True) + 1e-8)
        return self.last(hidden), self.aside(x)

def build():
    torch.manual_seed(5)
    return Net()
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    root = tmp_path_factory.mktemp("tried")
    outputs = [tensor("y", "FP32", [-1, 3], kind="logits"), tensor("z", "FP32", [-1, 2])]
    folder = write_folder(root / "net", NET, outputs=outputs, max_batch_size=8, samples=rows(64))
    store = Store(root / "store")
    assert convert(folder, store, Options(forms=("torch",))).any_passed
    shutil.rmtree(folder)
    return store


def tried(store: Store, folder: Path, compare: bool = False, **hyperparameters: Any) -> Mapping[str, Any]:
    job_store, files = JobStore(store.root / "halfeven.db"), Files(store.root / "files", 1 << 20)
    save_file(rows(178), path := folder / "rows.safetensors")
    record = FileRecord("file-" + secrets.token_hex(4), sha256_of(path), path.stat().st_size, path.name, 1)
    files.keep(Upload(record.sha256, record.bytes, record.filename, path))
    job_store.add_file(record)
    try:
        before = left(store)
        request = JobAdmission(job_store, files, store).read(
            {"model": "net", "training_file": record.id, "hyperparameters": hyperparameters, "seed": 3}
        )
        found = TrialRuns(job_store, files, store, "cpu", 1).run(request, compare)
        assert left(store) == before and job_store.jobs(None, 10, {}) == [] and store.numbers("net") == [1]
        return found
    finally:
        job_store.close()


def left(store: Store) -> set[str]:
    return {str(path) for path in store.root.rglob("*") if "halfeven.db" not in path.name}


@pytest.mark.slow
def test_two_steps_say_what_a_job_costs_and_what_goes_wrong_in_it(store: Store, tmp_path: Path) -> None:
    found = tried(store, tmp_path, n_epochs=5, batch_size=16, precision="fp16")
    assert found["valid"] and found["error"] is None
    codes = {one["code"]: one["message"] for one in found["findings"]}
    assert set(codes) - {"SLOW_PRECISION"} == {"SMALL_GUARD", "NO_GRADIENT"}  # the third is the processor's
    assert "1e-08" in codes["SMALL_GUARD"] and "'aside.bias', 'aside.weight'" in codes["NO_GRADIENT"]
    trial = found["trial"]
    assert (trial["steps"], trial["total_steps"], trial["trained"]) == (2, 50, "module")
    assert found["rows"] == {"training": 158, "held_out": 20}
    parts = trial["estimated_parts"]
    assert trial["estimated_seconds"] == pytest.approx(sum(parts.values()))
    assert parts["steps"] == 50 * trial["seconds_per_step"] > 0
    assert parts["steps of the range test"] == 7 * 10 * trial["seconds_per_step"]
    assert parts["evaluations"] > 0 and not trial["conversion_known"]
    assert 2**26 < trial["peak_memory_bytes"] < 2**36


@pytest.mark.slow
def test_a_comparison_trains_each_precision_and_takes_what_auto_takes(store: Store, tmp_path: Path) -> None:
    found = tried(
        store, tmp_path, compare=True, n_epochs=5, batch_size=16, precision="fp32", learning_rate=1e-2
    )
    compared = found["compared"]
    assert compared["choice"] == found["trial"]["precision"] and set(compared["precisions"]) == set(
        EXACT_FIRST
    )
    trained = {name: one for name, one in compared["precisions"].items() if "left_out" not in one}
    for name, one in trained.items():
        assert 2**26 < one["steps_memory_bytes"] <= one["peak_memory_bytes"] < 2**36
        assert one["steps_per_second"] == pytest.approx(1 / one["seconds_per_step"])
        assert (one["loss_difference"] == 0) == (name == "fp32") and one["loss_difference"] < 0.05
    fastest = min(one["seconds_per_step"] for one in trained.values())
    assert trained[compared["choice"]]["seconds_per_step"] <= NEARLY * fastest
    shown = Console(width=200, record=True, file=io.StringIO())
    shown.print(comparison_of(found))
    rows = shown.export_text()
    assert [f" {name} " in rows for name in EXACT_FIRST] == [True] * 3 and rows.count("chosen") == 1


def test_a_precision_that_auto_left_out_is_not_trained_and_one_that_fails_says_why() -> None:
    def steps_with(settings: Mapping[str, Any], steps: int) -> Mapping[str, Any]:
        if settings["precision"] == "bf16":
            raise JobFailed("OUT_OF_MEMORY", "too large")
        asked.append(settings)
        memory = {"peak_memory_bytes": 9, "peak_device_bytes": None, "memory_by_phase": {"steps": 8}}
        return {
            "seconds_per_step": 0.5,
            "losses": [2.0, None],
            "causes": [None, "gradient overflow"],
            **memory,
        }

    asked: list[Mapping[str, Any]] = []
    chosen = {
        "precision": "fp32", "seconds": {"fp32": 0.25}, "left_out": [{"precision": "fp16", "sentence": "slow"}],
    }  # fmt: skip
    found = compared(steps_with, chosen)["precisions"]
    assert asked == [{"precision": "fp32", "opt_level": "O1"}]
    assert found["fp32"]["steps_per_second"] == 4 and found["fp32"]["skipped"] == 1
    assert found["fp16"] == {"left_out": "slow"} and found["bf16"] == {"left_out": "OUT_OF_MEMORY: too large"}


def test_the_precisions_of_several_optimizers_are_compared_as_auto_measures_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(*given: Any) -> Mapping[str, Any]:
        settings.append(given[5])
        raise JobFailed("USER_CODE", "no more is needed")

    settings: list[Mapping[str, Any]] = []
    monkeypatch.setattr(TrialRuns, "_first_steps", refused)
    rows = SimpleNamespace(train=8, held_out=SimpleNamespace(count=2))
    monkeypatch.setattr(TrialRuns, "_rows", lambda *_: rows)
    parent = SimpleNamespace(manifest={"training": {"declared_steps": {"optimizers": {}, "steps": []}}})
    store, files = SimpleNamespace(version=lambda *_: parent), SimpleNamespace(folder=tmp_path)
    asked = SimpleNamespace(name="net", model="net", parent_version=1, findings=(), hyperparameters={})
    found = TrialRuns(None, files, store, "cpu", 1).run(asked, True)  # type: ignore[arg-type]
    assert settings == [{"precision": "auto"}] and found["error"]["code"] == "USER_CODE"


@pytest.mark.slow
def test_a_training_beyond_its_memory_ends_with_that_reason_and_the_server_answers(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALFEVEN_TRAINER_MEMORY_MIB", "1536")
    save_file(rows(178), tmp_path / "rows.safetensors")
    with served_to_client(Store(Path(shutil.copytree(store.root, tmp_path / "store"))), "net") as (
        _,
        port,
        client,
    ):
        file = client.files.create(file=tmp_path / "rows.safetensors", purpose="fine-tune").id
        asked = {
            "model": "net",
            "training_file": file,
            "hyperparameters": {"batch_size": 7, "precision": "fp32"},
        }
        url = f"http://127.0.0.1:{port}/v1/fine_tuning/jobs"
        tried = httpx.post(f"{url}/validate", json=asked, timeout=PATIENCE_S).json()
        job = ended(client, httpx.post(url, json=asked, timeout=PATIENCE_S).json()["id"])
        for error in (tried["error"], job.error.to_dict()):
            assert error["code"] == "OUT_OF_MEMORY"
            assert (
                "the limit is 1.5 GiB" in error["message"]
                and "HALFEVEN_TRAINER_MEMORY_MIB" in error["message"]
            )
        assert served_version(port, "net") == "1"


@pytest.mark.slow
def test_a_training_that_fails_is_not_valid_and_the_reason_is_that_of_the_job(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = '{"type": "failed", "code": "OUT_OF_MEMORY", "message": "ran out of memory in /srv/net.py", "traceback": ""}'
    (tmp_path / "failing_trainer.py").write_text(f"print('{line}')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("halfeven.serve.finetune.jobs.trial_run.TRAINER", "failing_trainer")
    found = tried(store, tmp_path, precision="fp32")
    assert not found["valid"] and found["trial"] is None
    assert found["error"] == {"code": "OUT_OF_MEMORY", "message": "ran out of memory in net.py"}


@pytest.mark.slow
def test_a_trial_that_reaches_its_limit_says_nothing_of_the_job(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halfeven.serve.finetune.jobs.trial_run.MOST_SECONDS", 0.0)
    found = tried(store, tmp_path)
    assert found["valid"] is None and found["trial"] is None
    assert found["error"]["code"] == TOO_SLOW and "A job has no such limit" in found["error"]["message"]


@pytest.mark.slow
def test_a_second_trial_beside_the_first_is_refused_and_may_come_again(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = TrialRuns(JobStore(tmp_path / "jobs.db"), Files(tmp_path / "files", 1 << 20), store, "cpu", 1)
    refused: list[str] = []

    def beside(*_: Any) -> dict[str, Any]:
        with pytest.raises(Overloaded) as second:
            trials.run(None)  # type: ignore[arg-type]
        refused.append(second.value.code)
        return {"valid": True}

    monkeypatch.setattr(trials, "_tried", beside)
    assert trials.run(None) == trials.run(None) == {"valid": True}  # type: ignore[arg-type]
    assert refused == ["overloaded"] * 2 and list((tmp_path / "files").iterdir()) == []
