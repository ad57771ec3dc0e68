"""The road back, whole: a real server, a real trainer, the `openai` client, and what happens when things die."""

import errno
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from halfeven.exporters.conversion.convert import Options, convert
from halfeven.models.engines.load import load_original
from halfeven.models.errors import DiskFull
from halfeven.models.store.store import Store, Version
from halfeven.models.zoo import zoo_folder
from halfeven.serve.bench.callers import Caller, served_version
from halfeven.serve.cli.demo import shifted, write_training_file
from halfeven.serve.finetune.training.loop.setting_names import EMULATED
from safetensors.numpy import load_file, save_file

from tests.kept import kept_store
from tests.patience import PATIENCE_S, until
from tests.serve.finetune.jobs.job_server import create, ended, processes, served_to_client
from tests.serve.finetune.jobs.runner_stage import Loading, Runner, always, supervisor_of

QUICK = {"n_epochs": 2, "batch_size": 32, "learning_rate": 3e-3, "precision": "fp32"}
# A half that costs about the same on every processor: fp16 and bf16 train up to 180 times slower on some, and a job in
# them gets a warning there.
IN_HALF = QUICK | {"precision": EMULATED}
LONG = {"n_epochs": 400, "batch_size": 8, "learning_rate": 1e-4, "precision": "fp32"}
of_one_server = pytest.mark.together("jobs from one parent")


def _convert(where: Path) -> None:
    """Write a store with the zoo's digits in the torch form alone (it is quicker), their torch half active; and with
    ``unjudged``, the same net without samples: its judging samples are generated and have no targets."""
    folder, store = Path(shutil.copytree(zoo_folder("digits"), where / "digits")), Store(where / "store")
    toml = (folder / "model.toml").read_text().replace('form = "auto"', 'form = "torch"')
    (folder / "model.toml").write_text(f'{toml}\n[training]\nmetrics = ["f1", "mae", "accuracy"]\n')
    assert convert(folder, store, Options(forms=("torch",))).asked_passed
    (folder / "model.toml").write_text(toml.replace('"digits"', '"unjudged"', 1))
    (folder / "samples.safetensors").unlink()
    assert convert(folder, store, Options(level="O0", forms=("torch",))).asked_passed


@pytest.fixture(scope="module")
def new_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_training_file(tmp_path_factory.mktemp("new") / "shifted.safetensors")


def promotion(job: Any) -> dict[str, Any]:
    return job.to_dict()["halfeven"]["promotion"]


def right_of_original(version: Version, images: np.ndarray, labels: np.ndarray) -> float:
    (logits,) = load_original(version, "torch", torch.device("cpu")).run([[images]])
    return float((logits.argmax(-1) == labels).mean())


def accuracy(port: int, images: np.ndarray, labels: np.ndarray) -> tuple[float, str]:
    caller = Caller(port, "digits")
    right, version = 0, ""
    for first in range(0, len(images), 60):
        answer, headers = caller.infer({"image": images[first : first + 60]})
        right += int((answer["logits"].argmax(-1) == labels[first : first + 60]).sum())
        version = headers["halfeven-version"]
    caller.close()
    return right / len(images), version


@dataclass(frozen=True)
class Turned:
    """A server whose client asked for five jobs while version 1 was active. ``first`` learns turned digits, and
    becomes version 2; ``long`` was cancelled at once; ``late`` has the same data and names version 1; ``flipped`` names
    it too, and is judged against what came meanwhile; ``following`` names no version, and is trained from the one that
    is active then. They run one after another."""

    store: Store
    port: int
    client: openai.OpenAI
    first: str
    long: str
    late: str
    flipped: str
    following: str


def flipped_and_old(new_data: Path, file: Path) -> Path:
    """Upside-down digits and the old ones; row 3 and row 700 are bad."""
    data = load_file(new_data)
    old, classes = data["image"][-360:], data["target:logits"][-360:]
    both = {
        "image": np.concatenate([old, old[:, :, ::-1]]),
        "target:logits": np.concatenate([classes, classes]),
    }
    both["image"][3], both["image"][700] = np.nan, 1e30
    save_file({name: np.ascontiguousarray(array) for name, array in both.items()}, file)
    return file


@pytest.fixture(scope="module")
def turned(new_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Turned]:
    folder = tmp_path_factory.mktemp("turned")
    flipped = flipped_and_old(new_data, folder / "flipped.safetensors")
    store = Store(Path(shutil.copytree(kept_store(__file__, _convert) / "store", folder / "store")))
    with served_to_client(store) as (_, port, client):
        asked = (
            ("digits", new_data, IN_HALF),
            ("digits", new_data, LONG),
            ("digits@1", new_data, QUICK),
            ("digits@1", flipped, {**QUICK, "n_epochs": 10, "stale_parent": "rejudge", "bad_rows": "quarantine"}),
            ("digits", new_data, {**QUICK, "n_epochs": 1, "stale_parent": "retrain"}),
        )  # fmt: skip
        jobs = [create(client, *words).id for words in asked]
        assert client.fine_tuning.jobs.cancel(jobs[1]).status in ("cancelled", "running", "queued")
        yield Turned(store, port, client, *jobs)


@of_one_server
@pytest.mark.slow(seconds=30)
def test_the_openai_client_fine_tunes_and_a_second_job_from_the_parent_undoes_nothing(turned: Turned) -> None:
    held_out = load_file(zoo_folder("digits") / "samples.safetensors")
    images, labels = held_out["image"], held_out["target:logits"]
    store, port, client = turned.store, turned.port, turned.client
    version_1 = store.version("digits", 1)
    assert right_of_original(version_1, shifted(images), labels) < 0.3
    done = ended(client, turned.first)
    assert done.status == "succeeded", done.error
    assert done.fine_tuned_model == "digits@2"
    assert ended(client, turned.long).status == "cancelled"
    assert client.fine_tuning.jobs.cancel(done.id).status == "succeeded", "its state, not an error"
    messages = [event.message for event in client.fine_tuning.jobs.list_events(done.id, limit=50)]
    assert any("active" in message for message in messages)
    stale = ended(client, turned.late)
    assert (stale.status, stale.error.code) == ("failed", "STALE_PARENT")
    for words in ("digits@3", "digits@1", "digits@2", "halfeven promote digits@3"):
        assert words in stale.error.message
    assert (promotion(stale)["state"], stale.to_dict()["halfeven"]["version"]) == ("refused", 3)
    judged = ended(client, turned.following)
    assert (judged.status, promotion(judged)["code"]) == ("succeeded", "NOTHING_LEARNT"), judged.error
    assert (
        judged.to_dict()["halfeven"]["parent_version"] == judged.to_dict()["halfeven"]["gate"]["against"] == 2
    )
    assert store.version("digits", 5).manifest["parent"] == 2, "it named no version, and waited"
    after, version = accuracy(port, shifted(images), labels)
    assert (after >= 0.9, version) == (True, "2"), "the jobs that came behind the first one changed nothing"
    assert accuracy(port, images, labels)[0] >= 0.97 and store.live_number("digits") == 2
    with httpx.Client(base_url=f"http://127.0.0.1:{port}/v1/models/digits", timeout=PATIENCE_S) as http:
        assert http.post("/promote", json={"version": 3}).status_code == 200, "an operator may"
        (by_hand,) = http.get("/versions/3/lineage").json()["promotions"]
    assert (by_hand["by"], by_hand["over"], by_hand["stale_parent"]) == ("operator", 2, 1)
    version_2 = store.version("digits", 2)
    scored = version_2.manifest["gate"]["forms"]
    assert set(scored) == {"torch", "original"}, "what auto could make active is scored"
    for found in (scored["torch"]["held_out"]["logits"], scored["original"]["judging"]["logits"]):
        assert (found["metric"], set(found["metrics"])) == ("f1", {"f1", "accuracy"})
        assert found["value"] == found["metrics"]["f1"] >= 0.9
    assert version_2.manifest["parent"] == 1
    lineage = version_2.manifest["lineage"]
    assert (lineage["job"], lineage["seed"]) == (done.id, 7)
    assert lineage["scaler"]["steps"] > 0
    assert version_2.manifest["gate"]["passed"] is True
    assert version_1.manifest["files"]["original.pt2"], "the parent stays"


@of_one_server
@pytest.mark.slow(seconds=30)
def test_a_job_judged_against_the_version_that_came_meanwhile_cannot_undo_it(turned: Turned) -> None:
    """Two jobs start from version 1. The second learns upside-down digits and keeps the old ones, and knows nothing
    of what the first one learnt: only that one's held-out rows, among the judging samples of version 2, show it. The
    active version stays, as the test before shows."""
    undone = ended(turned.client, turned.flipped)
    assert (undone.status, undone.error and undone.error.code) == ("failed", "METRIC_REGRESSED")
    assert "judging samples" in undone.error.message
    assert undone.to_dict()["halfeven"]["summary"]["quarantined"] == [3, 700]
    gate = undone.to_dict()["halfeven"]["gate"]
    assert gate["against"] == 2 and not gate["forms"]["torch"]["judging"]["logits"]["comparison"]["holds"]
    assert gate["forms"]["torch"]["held_out"]["logits"]["comparison"]["better"], "it did learn its own data"
    assert turned.store.version("digits", 2).manifest["lineage"]["samples_joined"] is True
    assert turned.store.version("digits", 4).status == "refused"


@of_one_server
@pytest.mark.slow(seconds=10)
def test_what_nobody_can_judge_is_held_and_becomes_active_by_hand_alone(
    turned: Turned, new_data: Path, tmp_path: Path
) -> None:
    """Every row of the new data is a zero, the held-out ones too: they find the net perfect that says zero to all."""
    zeros = load_file(new_data)
    zeros = {name: array[zeros["target:logits"] == 0] for name, array in zeros.items()}
    save_file(zeros, tmp_path / "zeros.safetensors")
    port, client = turned.port, turned.client
    job = ended(client, create(client, "unjudged", tmp_path / "zeros.safetensors", QUICK).id)
    assert (job.status, job.fine_tuned_model, job.error) == ("succeeded", "unjudged@2", None)
    assert (promotion(job)["state"], promotion(job)["code"]) == ("held", "NO_JUDGING_SET")
    warned: list[Any] = [
        event for event in client.fine_tuning.jobs.list_events(job.id) if event.level == "warn"
    ]
    after, before = (event for event in warned if event.data.get("code") == "NO_JUDGING_SET")
    for way in ("target:logits", "validation_file", "halfeven promote unjudged@2"):
        assert way in after.message
    assert "the version that this job makes will be published and held" in before.message
    assert "lack 9 of the 10 classes of output 'logits': 1, 2," in warned[-1].message
    assert served_version(port, "unjudged") == "1" and turned.store.live_number("unjudged") == 1
    with httpx.Client(base_url=f"http://127.0.0.1:{port}/v1/models/unjudged", timeout=PATIENCE_S) as http:
        assert http.post("/promote", json={"version": 2}).status_code == 200
        assert served_version(port, "unjudged") == "2"
        (by_hand,) = http.get("/versions/2/lineage").json()["promotions"]
    assert (by_hand["by"], by_hand["over"]) == ("operator", 1)


@of_one_server
@pytest.mark.slow(seconds=10)
def test_a_trainer_that_is_always_killed_ends_its_job_with_a_reason_and_the_server_answers(
    turned: Turned, new_data: Path
) -> None:
    store, client = turned.store, turned.client
    ended(client, turned.following)
    active = store.live_number("digits")
    job = create(client, "digits", new_data, LONG)
    for _ in range(3):  # long before the first checkpoint
        (pid,) = until(lambda: processes(store))
        os.kill(pid, signal.SIGKILL)
        until(lambda gone=pid: gone not in processes(store))
    done = ended(client, job.id)
    assert (done.status, done.error.code) == ("failed", "WORKER_LOST")
    assert served_version(turned.port, "digits") == str(active)
    assert processes(store) == [] and store.live_number("digits") == active


def ready() -> Loading:
    roster = Loading()
    roster.ready.set()
    return roster


def test_a_job_whose_thread_ends_while_the_jobs_are_read_is_not_taken_up(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = supervisor_of(runner, ready())
    job, read = runner.job(), runner.job_store.unfinished
    runner.job_store.move(job.id, "running", stage="training")
    supervisor._running[job.id] = threading.Thread()

    def then_paused(status: str | None = None) -> list[str]:
        found = read(status)
        if status == "running" and supervisor._running.pop(job.id, None):
            runner.job_store.move(job.id, "paused")
            supervisor._stopping.set()
            supervisor.wake()
        return found

    monkeypatch.setattr(runner.job_store, "unfinished", then_paused)
    supervisor._live()
    assert runner.job_store.job(job.id).status == "paused"


def test_where_no_job_can_be_taken_the_next_try_waits_although_a_job_came(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = supervisor_of(runner, ready())
    waited: list[bool] = []

    def wait(_: float) -> bool:
        waited.append(supervisor._bell.is_set())
        supervisor._stopping.set()
        return True

    monkeypatch.setattr(runner, "remove_ended", always(OSError(errno.EIO, "bad disk")))
    monkeypatch.setattr(supervisor._bell, "wait", wait)
    supervisor.wake()
    supervisor._live()
    assert waited == [False]


def test_where_a_job_cannot_be_taken_up_what_has_ended_and_expired_makes_room_all_the_same(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor, ended, left = supervisor_of(runner, ready()), runner.job(), runner.job()
    runner.go(ended)
    runner.job_store.move(ended.id, "succeeded")
    runner.job_store.move(left.id, "running")
    tidied = list[bool]()

    def wait(_: float) -> bool:
        supervisor._stopping.set()
        return True

    monkeypatch.setattr(supervisor, "_take_up", always(DiskFull("the disk is full")))
    monkeypatch.setattr(supervisor._kept, "delete_expired", lambda: tidied.append(True))
    monkeypatch.setattr(supervisor._bell, "wait", wait)
    supervisor._live()
    assert tidied == [True] and list((runner.store.root / "jobs").iterdir()) == []


def test_files_expire_without_a_request_and_once_in_a_minute(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor is woken by a job, fails once, and is woken by nothing."""
    supervisor, now = supervisor_of(runner, ready()), [1000.0]
    tidied, waits, woken_after = list[float](), list[float](), [20.0, 40.0, 60.0]

    def delete_expired() -> None:
        tidied.append(now[0])
        raise OSError(errno.EIO, "bad disk")

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        if not woken_after:
            supervisor._stopping.set()
            return True
        now[0] += woken_after.pop(0)
        return False

    monkeypatch.setattr(supervisor, "_clock", lambda: now[0])
    monkeypatch.setattr(supervisor._kept, "delete_expired", delete_expired)
    monkeypatch.setattr(supervisor._bell, "wait", wait)
    supervisor._live()
    assert (tidied, waits) == ([1000.0, 1060.0, 1120.0], [60.0, 40.0, 60.0, 60.0])


def test_a_job_whose_thread_cannot_be_started_takes_no_place(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = supervisor_of(runner, ready())
    job = runner.job_store.job(runner.job().id)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", always(RuntimeError("can't start new thread")))
        with pytest.raises(RuntimeError):
            supervisor._start(job)
    assert supervisor._running == {}
