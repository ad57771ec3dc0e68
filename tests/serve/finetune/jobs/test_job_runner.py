"""A job goes on after a death: what is done is not done again, and what always dies is given up."""

import errno
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from halfeven.models.errors import DiskFull, EngineFailed, NotReady
from halfeven.models.store.reserve import keep_reserve
from halfeven.models.store.store import Version
from halfeven.serve.batching.device import DeviceThread
from halfeven.serve.batching.place import Place
from halfeven.serve.finetune.data.files import Files
from halfeven.serve.finetune.jobs import job_folder, job_runner, trial_run
from halfeven.serve.finetune.jobs.concluding import ends_stale
from halfeven.serve.finetune.jobs.job_folder import MOST_STARTS, JobFolder, JobState, StateUnread
from halfeven.serve.finetune.jobs.job_rows import ReaderLost
from halfeven.serve.finetune.jobs.job_runner import MOST_PASSES, JobRunner
from halfeven.serve.finetune.jobs.records.job_types import DISK_FULL_MESSAGE, JobRequest, JobRow
from halfeven.serve.finetune.jobs.records.row_files import TRAINING
from halfeven.serve.finetune.jobs.supervisor import READ_AGAIN_S, Supervisor
from halfeven.serve.finetune.jobs.trial_run import TrialRuns
from halfeven.serve.finetune.jobs.worker_process import (
    JobFailed,
    Paused,
    ServerStops,
    StaleParent,
    WorkerLost,
)
from halfeven.serve.finetune.judging import active_version
from safetensors import SafetensorError

from tests.patience import PATIENCE_S
from tests.serve.finetune.jobs.runner_stage import Loading, Runner, always, publish, supervisor_of

LOST = WorkerLost("WORKER_LOST", "the process ended without a result")


def once(error: Exception) -> Callable[..., None]:
    left = [error]

    def fail(*_: Any) -> None:
        if left:
            raise left.pop()

    return fail


def test_a_trainer_that_makes_no_progress_is_given_up(runner: Runner) -> None:
    runner.training = always(LOST)
    with pytest.raises(JobFailed) as caught:
        runner.go(runner.job())
    assert caught.value is LOST and runner.made == ["trained"] * MOST_STARTS


def test_a_reader_that_dies_is_started_again_and_at_last_given_up(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, folder = runner.job(), JobFolder(runner.store.root / "job")
    (runner.store.root / "files" / ("a" * 64)).write_bytes(b"rows")
    found: list[Any] = [
        ReaderLost("it cannot be read", TRAINING),
        ReaderLost("it cannot be read", TRAINING),
        "the rows",
    ]

    def divided(*_: Any) -> Any:
        if isinstance(one := found.pop(0), ReaderLost):
            raise one
        return one

    monkeypatch.setattr(job_runner, "divide", divided)
    assert JobRunner._rows(runner, job, runner.store.version("net", 1), folder) == "the rows"
    warned = [event.message for event in runner.job_store.events(job.id) if event.level == "warn"]
    assert warned == ["training_file: it cannot be read; it is read again"] * 2
    found[:] = [ReaderLost("it cannot be read", TRAINING)] * MOST_STARTS
    with pytest.raises(WorkerLost, match="training_file: it cannot be read"):
        JobRunner._rows(runner, job, runner.store.version("net", 1), folder)
    assert found == []


def test_a_job_and_its_trial_read_no_more_and_no_less_than_an_upload_may_have(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []
    for module in (job_runner, trial_run):
        monkeypatch.setattr(module, "divide", lambda asked, *_: given.append(asked.max_bytes))
    job, parent = runner.job(), runner.store.version("net", 1)
    (runner.store.root / "files" / ("a" * 64)).write_bytes(b"rows")
    files = Files(runner.store.root / "files", 1000)
    JobRunner._rows(runner, job, parent, JobFolder(tmp_path))
    tried = JobRequest("net", "net", 1, job.training_file, {}, 3)
    TrialRuns(runner.job_store, files, runner.store, "cpu", 1)._rows(parent, tried, tmp_path)
    assert given == [1000, 1000]


def test_one_that_makes_progress_is_started_again_and_again(runner: Runner) -> None:
    def further(folder: JobFolder) -> None:
        if len(runner.made) < 10:
            (folder.of_pass / "checkpoints" / f"step-{len(runner.made):08}").mkdir(parents=True)
            raise LOST

    runner.training = further
    runner.go(runner.job())
    assert runner.made == ["trained"] * 10 + ["converted"]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_the_weights_that_a_pass_goes_on_with_are_on_the_disk_before_they_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, synced = JobFolder(tmp_path / "job"), list[str]()
    folder.begin(JobState(1, 1))
    (folder.of_pass / "weights.safetensors").write_bytes(b"new weights")
    folder.keep_trained({"weights": str(folder.of_pass / "weights.safetensors")})
    real, write = os.fsync, folder._write

    def fsync(handle: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{handle}").readlink()))
        real(handle)

    def named(state: JobState) -> None:
        assert state.trained and state.trained["weights"] in synced
        write(state)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(folder, "_write", named)
    folder.begin(JobState(2, 1, (folder.state() or JobState(1, 1)).trained))
    assert (folder.of_pass / "weights.safetensors").read_bytes() == b"new weights"


def test_deaths_of_the_server_count_too_and_pauses_do_not(runner: Runner) -> None:
    job = runner.job()
    runner.training = always(Paused())
    for _ in range(2 * MOST_STARTS):
        with pytest.raises(Paused):
            runner.go(job) if not runner.made else runner.again(job)
    runner.training = always(KeyboardInterrupt())  # type: ignore[arg-type]
    for _ in range(MOST_STARTS):
        with pytest.raises(KeyboardInterrupt):
            runner.again(job)
    with pytest.raises(JobFailed, match=f"ended {MOST_STARTS} times without progress"):
        runner.again(job)


def test_a_full_disk_while_a_job_is_interrupted_costs_it_nothing(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, supervisor = runner.job(), supervisor_of(runner)

    def interrupt(folder: JobFolder) -> None:
        (folder.of_pass / "checkpoints" / "step-00000005").mkdir(parents=True)
        monkeypatch.setattr(job_folder, "replace_text", always(OSError(errno.ENOSPC, "full")))
        raise ServerStops

    runner.training = interrupt
    supervisor._guarded(job, lambda: runner.go(job))
    assert runner.job_store.job(job.id).status == "running"
    assert JobFolder(runner.store.root / "jobs" / job.id).last_step() == 5


def test_a_conversion_that_dies_is_done_again_and_nothing_is_trained_again(runner: Runner) -> None:
    runner.converting = once(LOST)
    runner.go(runner.job())
    assert runner.made == ["trained", "converted", "converted"]


def test_with_the_server_dead_in_the_conversion_the_next_one_converts(runner: Runner) -> None:
    job, runner.converting = runner.job(), once(KeyboardInterrupt())  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        runner.go(job)
    runner.again(job)
    assert runner.made == ["trained", "converted", "converted"]


def test_a_job_whose_state_cannot_be_read_is_put_off_and_goes_on_from_there(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are trained; then the process has no file descriptor left."""
    job, runner.converting = runner.job(), once(KeyboardInterrupt())  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        runner.go(job)
    runner.job_store.move(job.id, "queued")
    supervisor, waited = supervisor_of(runner), list[float]()
    monkeypatch.setattr(supervisor._stopping, "wait", waited.append)
    with monkeypatch.context() as full:
        full.setattr(job_folder, "stored_json", always(OSError(errno.EMFILE, "Too many open files")))
        supervisor._guarded(job, lambda: runner.go(job))
    assert waited == [READ_AGAIN_S] and runner.job_store.job(job.id).status == "running"
    assert "cannot be read (Too many open files)" in runner.job_store.events(job.id)[0].message
    runner.again(job)
    assert runner.made == ["trained", "converted", "converted"], "nothing is trained again"
    runner.job_store.request_cancel(job.id)
    supervisor._guarded(job, always(StateUnread("bad disk")))
    assert waited == [READ_AGAIN_S] and runner.job_store.job(job.id).status == "cancelled"


def test_a_job_that_was_to_be_cancelled_when_its_server_was_killed_does_not_run_again(runner: Runner) -> None:
    job = runner.job()
    runner.job_store.move(job.id, "running", stage="training")
    runner.job_store.request_cancel(job.id)
    supervisor_of(runner)._take_up(runner.job_store.job(job.id))
    assert runner.job_store.job(job.id).status == "cancelled"


def test_a_job_whose_version_was_being_made_active_is_neither_paused_nor_cancelled_by_the_next_server(
    runner: Runner,
) -> None:
    job, job_store = runner.job(), runner.job_store
    job_store.move(job.id, "running", stage="activating")
    publish(runner.store, job=job.id, **{"pass": 1})
    job_store.request_pause(job.id)
    supervisor_of(runner)._take_up(job_store.job(job.id))
    for ask in (job_store.request_pause, job_store.request_cancel):
        assert ask(job.id).status == "queued"

    def conclude(version: Version) -> None:
        assert job_store.job(job.id).stage == "activating", "the server may be killed once more"
        job_store.move(job.id, "succeeded", version=version.number)

    runner.concluding = conclude
    runner.go(job_store.job(job.id))
    assert (job_store.job(job.id).status, job_store.job(job.id).version) == ("succeeded", 2)


@pytest.mark.parametrize("manifest", ["damaged", '{"version": 1}'])
def test_a_damaged_version_of_long_ago_ends_no_job(runner: Runner, manifest: str) -> None:
    job = runner.job()
    publish(runner.store, job="another")
    (runner.store.root / "models/net/1/manifest.json").write_text(manifest)
    assert runner.published(job) is None


def test_what_is_published_is_not_published_again(runner: Runner) -> None:
    """The conversion died behind its publishing, alone or with its server."""
    job, seen = runner.job(), []

    def published_and_dead() -> None:
        publish(runner.store, job=job.id, **{"pass": 1})
        raise LOST

    runner.converting, runner.concluding = published_and_dead, lambda version: seen.append(version.number)
    runner.go(job)
    JobFolder(runner.store.root / "jobs" / job.id).remove()
    runner.again(job)
    assert (seen, runner.made, runner.store.numbers("net")) == ([2, 2], ["trained", "converted"], [1, 2])


def test_a_second_pass_converts_the_same_weights_once_more_whoever_dies(runner: Runner) -> None:
    stale, job = StaleParent("STALE_PARENT", "another version is active"), runner.job(stale_parent="rejudge")
    runner.concluding = once(stale)
    runner.converting = lambda: always(KeyboardInterrupt())() if len(runner.made) == 3 else None  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        runner.go(job)
    runner.again(job)
    assert runner.made == ["trained", "converted", "converted", "converted"]
    assert [runner.store.version("net", number).manifest["lineage"]["pass"] for number in (2, 3)] == [1, 2]
    assert [path.name for path in (runner.store.root / "jobs" / job.id).glob("pass-*")] == ["pass-2"]


def test_jobs_that_wait_follow_the_newest_active_version_unless_they_name_one(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    alike = [True]
    monkeypatch.setattr(Version, "spec", lambda self: None)
    monkeypatch.setattr(job_runner, "same_signature", lambda one, other: alike[0])
    runner.concluding = lambda version: runner.store.promote(version, "test")
    waiting = [runner.job() for _ in range(4)]
    named, last = runner.job("net@1"), runner.job()
    parents: list[int] = []
    runner.training = lambda folder: parents.append(folder.state().parent)  # type: ignore[union-attr]
    for job in (*waiting, named):
        runner.go(job)
    alike[0] = False
    runner.go(last)
    assert parents == [1, 2, 3, 4, 1, 1], "the last one's rows cannot be asked of the version that came since"
    assert [runner.job_store.job(job.id).parent_version for job in (*waiting, named)] == [1, 2, 3, 4, 1]
    (event,) = (one for one in runner.job_store.events(waiting[1].id) if "became active" in one.message)
    assert (
        event.message
        == "net@2 became active while the job waited: it is trained from that one, not from net@1"
    )


def test_a_job_that_can_only_end_stale_is_told_so_before_it_trains(runner: Runner) -> None:
    parent = runner.store.version("net", 1)
    assert ends_stale(parent, 1, "refuse") is ends_stale(parent, None, "refuse") is None
    assert ends_stale(parent, 2, "rejudge") is None
    assert (ends_stale(parent, 2, "refuse") or "").startswith(
        "net@1 is not active, net@2 is: what this job makes"
    )


def test_passes_have_an_end(runner: Runner) -> None:
    runner.concluding = always(StaleParent("STALE_PARENT", "another version is active"))
    with pytest.raises(StaleParent):
        runner.go(runner.job(stale_parent="rejudge"))
    assert runner.made == ["trained"] + ["converted"] * MOST_PASSES


def test_folders_of_ended_jobs_go_and_that_of_a_job_that_goes_on_stays(runner: Runner) -> None:
    ended, waiting = runner.job(), runner.job()
    for job in (ended, waiting):
        runner.go(job)
    runner.job_store.move(ended.id, "succeeded")
    runner.job_store.move(waiting.id, "paused")
    runner.remove_ended()
    assert [path.name for path in (runner.store.root / "jobs").iterdir()] == [waiting.id]


NO_SPACE = "Error while serializing: I/O error: No space left on device (os error 28)"


@pytest.mark.parametrize("stage", ["training", "converting"])
@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "full"),
        SafetensorError(NO_SPACE),
        JobFailed("DISK_FULL", DISK_FULL_MESSAGE),  # a process of the job said so
        DiskFull(DISK_FULL_MESSAGE),
    ],
)
def test_a_job_that_fills_the_disk_ends_with_that_reason_and_leaves_no_file(
    stage: str, error: Exception, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, move = runner.store.root, runner.job_store.move

    def on_a_full_disk(id: str, to: str, **given: Any) -> JobRow:
        """The end is written where neither the files of the job nor the reserve take the room."""
        if to == "failed" and ((root / "jobs" / id).exists() or (root / ".reserve").exists()):
            raise DiskFull("the disk is full")
        return move(id, to, **given)

    setattr(runner, stage, always(error))
    supervisor = supervisor_of(runner)
    job = runner.job()
    keep_reserve(root)
    monkeypatch.setattr(runner.job_store, "move", on_a_full_disk)
    supervisor._guarded(job, lambda: runner.go(job))
    ended = runner.job_store.job(job.id)
    assert (ended.status, ended.code) == ("failed", "DISK_FULL") and "delete versions or files" in str(
        ended.message
    )
    assert list((runner.store.root / "jobs").iterdir()) == [] and runner.store.numbers("net") == [1]


@pytest.fixture
def loading(runner: Runner) -> Iterator[tuple[Supervisor, Loading]]:
    """A supervisor that has been started beside models that load; its job asks the active version."""
    roster = Loading()
    supervisor = supervisor_of(runner, roster)
    yield supervisor, roster
    supervisor.stop(10)
    assert not supervisor._thread.is_alive()


def test_a_job_that_goes_on_with_the_next_server_waits_until_the_models_are_ready(
    runner: Runner, loading: tuple[Supervisor, Loading]
) -> None:
    supervisor, roster = loading
    done = threading.Event()

    def convert() -> None:
        if not roster.ready.is_set():
            raise NotReady("model 'net' is being made ready; ask again in a moment")

    runner.converting, runner.concluding = convert, lambda version: done.set()
    job = runner.job()
    runner.job_store.move(job.id, "running", stage="converting")
    supervisor.start()
    assert roster.asked.wait(PATIENCE_S)
    roster.asked.clear()
    assert roster.asked.wait(PATIENCE_S), "it asks again, and looks between whether the server ends"
    assert runner.made == [] and runner.job_store.job(job.id).status == "running"
    roster.ready.set()
    assert done.wait(PATIENCE_S)


def test_a_server_that_ends_while_its_models_load_ends_the_wait(loading: tuple[Supervisor, Loading]) -> None:
    supervisor, roster = loading
    supervisor.start()
    assert roster.asked.wait(PATIENCE_S)


def test_what_is_not_ready_because_the_server_ends_fails_no_job(runner: Runner) -> None:
    supervisor = supervisor_of(runner)
    leaving = NotReady("the server is shutting down")
    runner.converting = always(leaving)
    job = runner.job()
    supervisor._stopping.set()
    supervisor._guarded(job, lambda: runner.go(job))
    assert not runner.job_store.job(job.id).finished
    supervisor._stopping.clear()
    supervisor._guarded(job, lambda: runner.again(job))
    assert runner.job_store.job(job.id).code == "NOT_READY"


@pytest.mark.parametrize("error", [None, EngineFailed("the engine is closed")])
def test_a_server_that_ends_while_the_active_version_is_asked_fails_no_job(
    error: Exception | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch under way is answered, or fails because its engine is closed; no other one is asked."""
    asked = list[str]()

    def call(batch: Callable[[], str]) -> Future[str]:
        runner._stopping.set()
        asked.append(batch())
        answer = Future[str]()
        answer.set_exception(error) if error else answer.set_result("answered")
        return answer

    serving = SimpleNamespace(prepared=SimpleNamespace(version="1", engine=None))
    roster, thread = (
        SimpleNamespace(find=lambda name: serving),
        cast(DeviceThread, SimpleNamespace(call=call)),
    )
    runner = Runner(tmp_path / "store", roster, Place(torch.device("cpu"), thread))
    monkeypatch.setattr(Version, "spec", lambda self: None)
    monkeypatch.setattr(job_runner, "same_signature", lambda one, other: True)
    monkeypatch.setattr(active_version, "sets_of", lambda version, held_out: {"held out": held_out})
    monkeypatch.setattr(active_version, "answers_of", lambda spec, engine: lambda rows: rows)
    monkeypatch.setattr(
        active_version, "predictions", lambda spec, answers, rows, metrics: [answers(row) for row in rows]
    )
    job, rows = runner.job(), cast(Any, ["first", "second"])

    def converting() -> None:
        JobRunner._measured(runner, job, runner.store.version("net", 1), rows, [])

    runner.converting = converting
    supervisor_of(runner)._guarded(job, lambda: runner.go(job))
    state = JobFolder(runner.store.root / "jobs" / job.id).state()
    assert (runner.job_store.job(job.id).status, asked) == ("running", ["first"])
    assert state and state.starts == 0, "the end of the server is no death of the job"
    runner.job_store.close()
