"""Pausing, resuming and cancelling at odd moments: what was answered happens, and no job is left without a process."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from halfeven.models.errors import StoreError
from halfeven.models.order.one_order import Order
from halfeven.models.order.order_settings import order_bounds
from halfeven.models.store.store import Store
from halfeven.serve.finetune.data.files import Files
from halfeven.serve.finetune.data.kept_files import KeptFiles
from halfeven.serve.finetune.jobs.records.job_store import JobStore
from halfeven.serve.finetune.jobs.records.job_types import FileRecord, JobRequest, JobRow
from halfeven.serve.finetune.jobs.supervisor import Supervisor, jobs_at_once, trainer_memory
from halfeven.serve.finetune.jobs.worker_process import Paused
from halfeven.serve.settings import read_settings

from tests.patience import PATIENCE_S
from tests.serve.finetune.jobs.runner_stage import nowhere, trainer


class Place:
    """One job, and the supervisor that takes it. Its process ends as ``process`` says."""

    def __init__(self, root: Path) -> None:
        ready: Any = SimpleNamespace(wait=lambda timeout_s: None)
        self.job_store, store = JobStore(root / "halfeven.db"), Store(root)
        kept = KeptFiles(self.job_store, Files(root / "files", 1000))
        self.supervisor = Supervisor(self.job_store, kept, store, ready, nowhere, trainer)
        self.process: Callable[[], None] = lambda: None
        self.supervisor._runner._passes = lambda job, folder: self.process()  # type: ignore[method-assign]
        self.job_store.add_file(FileRecord("file-1", "a" * 64, 10, "train.npz", 1))
        self.job = self.create("net")

    def create(self, name: str, **hyperparameters: Any) -> JobRow:
        return self.job_store.create_job(JobRequest(name, name, 1, "file-1", hyperparameters, 3))[0]

    @property
    def now(self) -> JobRow:
        return self.job_store.job(self.job.id)

    def take(self) -> None:
        """Take the job that was looked up, as the supervisor does."""
        self.supervisor._guarded(self.job, partial(self.supervisor._runner.go, self.job))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path / "store")
    yield made
    made.job_store.close()


def test_a_job_that_is_paused_just_before_it_is_taken_is_paused(place: Place) -> None:
    assert place.job_store.request_pause(place.job.id).status == "paused"
    place.take()
    assert (place.now.status, place.now.code, place.now.attempts) == ("paused", None, 0)


def test_a_job_that_is_to_be_paused_and_cancelled_is_cancelled(place: Place) -> None:
    def process() -> None:
        place.job_store.request_pause(place.job.id)
        assert place.job_store.request_cancel(place.job.id).cancel_requested
        raise Paused

    place.process = process
    place.take()
    assert (place.now.status, place.now.code) == ("cancelled", "CANCELLED")


def test_a_job_that_is_to_be_paused_and_cancelled_when_its_server_ends_is_cancelled_by_the_next(
    place: Place,
) -> None:
    place.job_store.move(place.job.id, "running")
    place.job_store.request_pause(place.job.id)
    place.job_store.request_cancel(place.job.id)
    place.supervisor._take_up(place.now)
    assert place.now.status == "cancelled"


@pytest.mark.parametrize(
    ("asked", "status"), [("request_resume", "queued"), ("request_cancel", "cancelled"), ("job", "paused")]
)
def test_what_is_asked_while_a_job_stops_for_a_pause_is_not_lost(
    asked: str, status: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked after its process has ended, just before that is written."""
    transaction, waiting = place.job_store._db.transaction, [asked]

    def process() -> None:
        place.job_store.request_pause(place.job.id)
        monkeypatch.setattr(place.job_store._db, "transaction", at_the_end)
        raise Paused

    def at_the_end() -> Any:
        if waiting:
            getattr(place.job_store, waiting.pop())(place.job.id)
        return transaction()

    place.process = process
    place.take()
    assert place.now.status == status


def test_a_job_whose_pause_could_not_be_written_is_paused_later(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    move, failing = place.job_store.move, [StoreError("the disk failed")]

    def moved(id: str, to: str, **more: Any) -> JobRow:
        if to == "paused" and failing:
            raise failing.pop()
        return move(id, to, **more)

    def process() -> None:
        place.job_store.request_pause(place.job.id)
        raise Paused

    def wait(timeout_s: float | None = None) -> None:
        if place.now.status == "paused":
            place.supervisor._stopping.set()

    place.process = process
    monkeypatch.setattr(place.job_store, "move", moved)
    monkeypatch.setattr(place.supervisor._bell, "wait", wait)
    place.supervisor._live()
    assert (place.now.status, failing) == ("paused", [])


REJUDGED = {"stale_parent": "rejudge"}


@pytest.mark.parametrize(
    ("at_once", "begun"),
    [(1, ["net"]), (2, ["net", "other"]), (4, ["net", "other", "third", "third"])],
)
def test_as_many_jobs_run_at_once_as_asked_for_but_none_that_would_end_stale(
    at_once: int, begun: list[str], tmp_path: Path
) -> None:
    """The jobs of ``net`` run one after the other, those of ``third`` beside each other: they are judged against what
    is active then."""
    place = Place(tmp_path / "store")
    for name, settings in (
        ("net", {}),
        ("other", {}),
        ("third", REJUDGED),
        ("third", REJUDGED),
        ("net", REJUDGED),
    ):
        place.create(name, **settings)
    place.supervisor._at_once, going, ends = at_once, list[str](), threading.Event()
    all_there = threading.Semaphore(0)

    def go(job: JobRow) -> None:
        going.append(job.name)
        all_there.release()
        assert ends.wait(PATIENCE_S)
        place.job_store.move(job.id, "running")
        place.job_store.move(job.id, "succeeded")

    place.supervisor._runner.go = go  # type: ignore[method-assign]
    place.supervisor.start()
    for _ in begun:
        assert all_there.acquire(timeout=PATIENCE_S)
    assert sorted(going) == begun and place.supervisor._next() is None
    ends.set()
    for _ in range(6 - len(begun)):  # those that waited
        assert all_there.acquire(timeout=PATIENCE_S)
    place.supervisor.stop(PATIENCE_S)
    assert sorted(going) == ["net"] * 3 + ["other"] + ["third"] * 2
    assert not place.job_store.unfinished() and not place.supervisor._running
    place.job_store.close()


def test_a_processor_runs_as_many_jobs_at_once_as_its_cores_hold(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("halfeven.serve.finetune.jobs.supervisor.usable_cores", lambda: 4)
    asked = [read_settings(jobs=jobs, trainer_threads=threads) for jobs, threads in ((1, 8), (3, 1), (9, 2))]
    assert [jobs_at_once(one, "cpu") for one in asked] == [
        1,
        3,
        2,
    ] and "4 cores hold 2 trainers" in caplog.text
    assert jobs_at_once(asked[2], "cuda") == 9


def test_trainers_and_conversions_that_run_beside_each_other_share_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = read_settings()
    alone, shared = (trainer_memory(settings, "cpu", count) for count in (1, 3))
    assert alone // 3 == shared > 0 and trainer_memory(settings, "cuda", 3) == 0
    alone, shared = (Order(order_bounds(count)).memory_bytes for count in (1, 3))
    assert alone // 3 == shared > 0
    monkeypatch.setenv("HALFEVEN_CONVERT_MEMORY_MIB", "1500")
    given = trainer_memory(read_settings(trainer_memory_mib=2048), "cpu", 3)
    assert (given, Order(order_bounds(3)).memory_bytes) == (2048 * 2**20, 1500 * 2**20), (
        "of each, as it was asked for"
    )
