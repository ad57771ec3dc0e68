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
from halfeven.serve.finetune.jobs.records.job_store import JobStore
from halfeven.serve.finetune.training.loop.setting_names import EMULATED
from safetensors.numpy import load_file, save_file

from tests.kept import kept_store
from tests.patience import PATIENCE_S, until
from tests.serve.finetune.jobs.job_server import ended, processes, served_to_client
from tests.serve.finetune.jobs.runner_stage import Loading, Runner, always, supervisor_of

# A precision that costs about the same on every processor: fp16 and bf16 train up to 180 times slower on some, and a
# job in them gets a warning there.
QUICK = {"n_epochs": 2, "batch_size": 32, "learning_rate": 3e-3, "precision": EMULATED}
of_one_server = pytest.mark.together("jobs from one parent")
LONG = {"n_epochs": 400, "batch_size": 8, "learning_rate": 1e-4, "precision": EMULATED}


def _convert(where: Path) -> None:
    folder = Path(shutil.copytree(zoo_folder("digits"), where / "digits"))
    toml = (folder / "model.toml").read_text().replace('form = "auto"', 'form = "torch"')
    (folder / "model.toml").write_text(f'{toml}\n[training]\nmetrics = ["f1", "mae", "accuracy"]\n')
    assert convert(folder, Store(where / "store"), Options(forms=("torch",))).asked_passed


@pytest.fixture(scope="module")
def converted() -> Path:
    """The zoo's digits with the torch half active, converted in the torch form alone (it is quicker)."""
    return kept_store(__file__, _convert) / "store"


@pytest.fixture(scope="module")
def new_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_training_file(tmp_path_factory.mktemp("new") / "shifted.safetensors")


@pytest.fixture
def store(converted: Path, tmp_path: Path) -> Store:
    return Store(Path(shutil.copytree(converted, tmp_path / "store")))


@pytest.fixture
def unjudged(tmp_path: Path) -> Store:
    """The digits converted without samples: the judging samples are generated and have no targets."""
    without = shutil.ignore_patterns("samples.safetensors", "__pycache__")
    folder = Path(shutil.copytree(zoo_folder("digits"), tmp_path / "digits", ignore=without))
    assert convert(folder, Store(tmp_path / "store"), Options(level="O0", forms=("torch",))).asked_passed
    return Store(tmp_path / "store")


def start(
    client: openai.OpenAI, file: Path, hyperparameters: dict[str, Any], model: str = "digits", **more: Any
) -> Any:
    uploaded = client.files.create(file=file, purpose="fine-tune")
    method: Any = hyperparameters
    return client.fine_tuning.jobs.create(
        model=model, training_file=uploaded.id, seed=7, extra_body={"hyperparameters": method}, **more
    )


def promotion(job: Any) -> dict[str, Any]:
    return job.to_dict()["halfeven"]["promotion"]


def training(client: openai.OpenAI, id: str) -> bool:
    return (client.fine_tuning.jobs.retrieve(id).to_dict()["halfeven"]["progress"] or {}).get("step", 0) > 0  # type: ignore[index,union-attr,call-overload]


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
    becomes version 2; ``long`` is to be cancelled; ``late`` has the same data and names version 1; ``flipped`` names
    it too, and is judged against what came meanwhile; ``following`` names no version, and is trained from the one that
    is active then."""

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
def turned(converted: Path, new_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Turned]:
    folder = tmp_path_factory.mktemp("turned")
    flipped = flipped_and_old(new_data, folder / "flipped.safetensors")
    store = Store(Path(shutil.copytree(converted, folder / "store")))
    with served_to_client(store) as (_, port, client):
        asked = (
            (new_data, QUICK, "digits", "turned"),
            (new_data, LONG, "digits", None),
            (new_data, QUICK, "digits@1", "the same data from the same parent"),
            (flipped, {**QUICK, "n_epochs": 10, "stale_parent": "rejudge", "bad_rows": "quarantine"}, "digits@1", None),
            (new_data, {**QUICK, "n_epochs": 1, "stale_parent": "retrain"}, "digits", None),
        )  # fmt: skip
        jobs = [
            start(client, file, words, model, **({"suffix": suffix} if suffix else {}))
            for file, words, model, suffix in asked
        ]
        yield Turned(store, port, client, *(job.id for job in jobs))


@of_one_server
@pytest.mark.slow(seconds=30)
def test_the_openai_client_fine_tunes_and_a_second_job_from_the_parent_undoes_nothing(turned: Turned) -> None:
    held_out = load_file(zoo_folder("digits") / "samples.safetensors")
    images, labels = held_out["image"], held_out["target:logits"]
    store, port, client = turned.store, turned.port, turned.client
    version_1 = store.version("digits", 1)
    assert right_of_original(version_1, shifted(images), labels) < 0.3
    assert client.fine_tuning.jobs.cancel(turned.long).status in ("cancelled", "running", "queued")
    done = ended(client, turned.first)
    assert done.status == "succeeded", done.error
    assert done.fine_tuned_model == "digits@2"
    assert ended(client, turned.long).status == "cancelled"
    assert client.fine_tuning.jobs.cancel(done.id).status == "succeeded", "its state, not an error"
    messages = [event.message for event in client.fine_tuning.jobs.list_events(done.id, limit=50)]
    assert any("active" in message for message in messages)
    after, version = accuracy(port, shifted(images), labels)
    assert (after >= 0.9, version) == (True, "2")
    assert accuracy(port, images, labels)[0] >= 0.97
    stale = ended(client, turned.late)
    assert (stale.status, stale.error.code) == ("failed", "STALE_PARENT")
    for words in ("digits@3", "digits@1", "digits@2", "halfeven promote digits@3"):
        assert words in stale.error.message
    assert (promotion(stale)["state"], stale.to_dict()["halfeven"]["version"]) == ("refused", 3)
    assert served_version(port, "digits") == "2" and store.live_number("digits") == 2
    judged = ended(client, turned.following)
    assert (judged.status, promotion(judged)["code"]) == ("succeeded", "NOTHING_LEARNT"), judged.error
    assert judged.to_dict()["halfeven"]["parent_version"] == 2
    assert store.version("digits", 5).manifest["parent"] == 2, "it named no version, and waited"
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
    of what the first one learnt: only that one's held-out rows, among the judging samples of version 2, show it."""
    undone = ended(turned.client, turned.flipped)
    assert (undone.status, undone.error and undone.error.code) == ("failed", "METRIC_REGRESSED")
    assert undone.to_dict()["halfeven"]["summary"]["quarantined"] == [3, 700]
    gate = undone.to_dict()["halfeven"]["gate"]
    assert gate["against"] == 2 and not gate["forms"]["torch"]["judging"]["logits"]["comparison"]["holds"]
    assert gate["forms"]["torch"]["held_out"]["logits"]["comparison"]["better"], "it did learn its own data"
    assert turned.store.version("digits", 2).manifest["lineage"]["samples_joined"] is True
    assert turned.store.version("digits", 4).status == "refused"


@pytest.mark.slow(seconds=30)
def test_what_forgets_is_refused_and_the_active_version_stays(
    store: Store, new_data: Path, tmp_path: Path
) -> None:
    """Trained on wrong labels: good on its own held-out rows, useless on what the parent was judged with."""
    wrong = dict(load_file(new_data))
    images = wrong["image"][-360:]  # the old digits, each called its successor
    labels = (wrong["target:logits"][-360:] + 1) % 10
    save_file({"image": images, "target:logits": labels}, tmp_path / "wrong.safetensors")
    with served_to_client(store) as (_, port, client):
        quick = {**QUICK, "n_epochs": 12}
        done = ended(client, start(client, tmp_path / "wrong.safetensors", quick).id)
        assert (done.status, done.error.code) == ("failed", "METRIC_REGRESSED")
        assert "judging samples" in done.error.message
        held_out = load_file(zoo_folder("digits") / "samples.safetensors")
        assert accuracy(port, held_out["image"], held_out["target:logits"]) == (
            pytest.approx(0.99, abs=0.01),
            "1",
        )
    assert store.version("digits", 2).status == "refused"
    assert store.live_number("digits") == 1


@pytest.mark.slow(seconds=30)
def test_what_nobody_can_judge_is_held_and_becomes_active_by_hand_alone(
    unjudged: Store, new_data: Path, tmp_path: Path
) -> None:
    """Every row of the new data is a zero, the held-out ones too: they find the net perfect that says zero to all."""
    zeros = load_file(new_data)
    zeros = {name: array[zeros["target:logits"] == 0] for name, array in zeros.items()}
    save_file(zeros, tmp_path / "zeros.safetensors")
    with served_to_client(unjudged) as (_, port, client):
        job = ended(client, start(client, tmp_path / "zeros.safetensors", QUICK).id)
        assert (job.status, job.fine_tuned_model, job.error) == ("succeeded", "digits@2", None)
        assert (promotion(job)["state"], promotion(job)["code"]) == ("held", "NO_JUDGING_SET")
        warned: list[Any] = [
            event for event in client.fine_tuning.jobs.list_events(job.id) if event.level == "warn"
        ]
        after, before = (event for event in warned if event.data.get("code") == "NO_JUDGING_SET")
        for way in ("target:logits", "validation_file", "halfeven promote digits@2"):
            assert way in after.message
        assert "the version that this job makes will be published and held" in before.message
        assert "lack 9 of the 10 classes of output 'logits': 1, 2," in warned[-1].message
        assert served_version(port, "digits") == "1" and unjudged.live_number("digits") == 1
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/v1/models/digits", timeout=PATIENCE_S) as http:
            assert http.post("/promote", json={"version": 2}).status_code == 200
            assert served_version(port, "digits") == "2"
            (by_hand,) = http.get("/versions/2/lineage").json()["promotions"]
    assert (by_hand["by"], by_hand["over"]) == ("operator", 1)


@pytest.mark.slow(seconds=30)
def test_a_trainer_that_is_always_killed_ends_its_job_with_a_reason_and_the_server_answers(
    store: Store, new_data: Path
) -> None:
    with served_to_client(store) as (_, port, client):
        job = start(client, new_data, LONG)
        for _ in range(3):  # long before the first checkpoint
            (pid,) = until(lambda: processes(store))
            os.kill(pid, signal.SIGKILL)
            until(lambda gone=pid: gone not in processes(store))
        done = ended(client, job.id)
        assert (done.status, done.error.code) == ("failed", "WORKER_LOST")
        assert served_version(port, "digits") is not None
        assert processes(store) == []
    assert store.live_number("digits") == 1


@pytest.mark.slow(seconds=30)
def test_after_kill_9_of_the_server_no_trainer_runs_and_the_next_server_takes_the_job_up(
    store: Store, new_data: Path
) -> None:
    with served_to_client(store) as (process, _, client):
        running, waiting = start(client, new_data, LONG), start(client, new_data, QUICK)
        until(lambda: training(client, running.id))
        process.kill()
        process.wait()
        until(lambda: processes(store) == [], 10.0)
    job_store = JobStore(store.root / "halfeven.db")
    assert {id: job_store.job(id).status for id in job_store.unfinished()} == {
        running.id: "running",
        waiting.id: "queued",
    }
    job_store.close()
    with served_to_client(store) as (_, _, client):
        events = until(
            lambda: [
                event.message
                for event in client.fine_tuning.jobs.list_events(running.id)
                if "goes on from its last checkpoint" in event.message
            ]
        )
        assert events
        client.fine_tuning.jobs.cancel(running.id)
        assert ended(client, running.id).status == "cancelled"
        assert ended(client, waiting.id).status == "succeeded"
    assert store.live_number("digits") == 2


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
