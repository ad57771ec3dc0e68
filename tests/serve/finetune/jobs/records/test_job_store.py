"""The job store: durable before it answers, one state machine, events without gaps, safe from many threads."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from halfeven.models.errors import (
    BadInput,
    Conflict,
    DamagedFile,
    DiskFull,
    KeyLimitReached,
    Overloaded,
    StoreError,
    UnknownName,
)
from halfeven.serve.finetune.jobs.records import job_store as module
from halfeven.serve.finetune.jobs.records.job_store import JobStore
from halfeven.serve.finetune.jobs.records.job_types import (
    CANCELLED,
    FAILED,
    FINAL,
    NEXT,
    PAUSED,
    QUEUED,
    RUNNING,
    SUCCEEDED,
    FileRecord,
    IllegalMove,
    JobChanges,
    JobRequest,
    JobRow,
)

from tests.patience import PATIENCE_S

FILE = FileRecord("file-1", "a" * 64, 10, "train.npz", 1)
REASON = JobChanges(code="DIVERGED", message="the loss left the numbers")


def request(**more: Any) -> JobRequest:
    given: dict[str, Any] = {
        "model": "net",
        "name": "net",
        "parent_version": 1,
        "training_file": FILE.id,
        "seed": 3,
    }
    return JobRequest(**{**given, "hyperparameters": {"n_epochs": 2}, "asked": {"model": "net"}, **more})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store" / "halfeven.db"


@pytest.fixture
def job_store(path: Path) -> Any:
    job_store = JobStore(path)
    job_store.add_file(FILE)
    yield job_store
    job_store.close()


@pytest.fixture
def job(job_store: JobStore) -> JobRow:
    return job_store.create_job(request())[0]


WRITER = """
import sys, time
from pathlib import Path
from halfeven.serve.finetune.jobs.records.job_types import FileRecord, JobRequest
from halfeven.serve.finetune.jobs.records.database import _SCHEMA
from halfeven.serve.finetune.jobs.records.job_store import JobStore

job_store = JobStore(Path(sys.argv[1]))
job_store.add_file(FileRecord("file-1", "a" * 64, 10, "train.npz", 1))
asked = {"model": "net"}
job, _ = job_store.create_job(JobRequest("net", "net", 1, "file-1", {"n_epochs": 2}, 3, asked=asked), "key")
job_store.move(job.id, "running", stage="training")
job_store.record_steps(job.id, [{"step": n, "loss": 1.0} for n in range(1, 4)])
print(job.id, flush=True)
time.sleep(60)
"""


def test_what_was_answered_is_there_after_the_process_was_killed(path: Path) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    with writer.stdout:
        id = writer.stdout.readline().strip()
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait(PATIENCE_S)
    reopened = JobStore(path)
    assert (reopened.job(id).status, reopened.job(id).stage) == (RUNNING, "training")
    assert [step["step"] for step in reopened.steps(id)] == [1, 2, 3]
    assert [event.number for event in reopened.events(id)] == [2, 1]
    assert reopened.create_job(request(), "key") == (reopened.job(id), False)
    assert reopened.unfinished() == [id]
    reopened.close()


def test_every_commit_waits_for_the_disk_and_foreign_keys_are_on(job_store: JobStore, path: Path) -> None:
    ask = job_store._db._db.execute
    pragmas = {
        name: ask(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous", "foreign_keys")
    }
    assert pragmas == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}
    with pytest.raises(UnknownName, match="file-nowhere"):
        job_store.create_job(request(training_file="file-nowhere"))
    assert job_store.jobs() == []


def test_the_oldest_ended_jobs_are_forgotten_with_all_that_is_theirs(job_store: JobStore, path: Path) -> None:
    jobs = [job_store.create_job(request(), f"key {number}")[0] for number in range(5)]
    for job in jobs:
        job_store.record_steps(job.id, [{"step": 1}, {"step": 2}])
        job_store.record_evaluation(job.id, {"step": 2})
    for job in jobs[1:]:
        _to(job_store, job, SUCCEEDED)
    job_store.forget_old(kept_jobs=2)
    assert [job.id for job in job_store.jobs()] == [jobs[4].id, jobs[3].id, jobs[0].id], (
        "the first has not ended"
    )
    job_store.forget_old(kept_jobs=2, kept_steps=2)
    assert [len(job_store.steps(job.id)) for job in job_store.jobs()] == [2, 0, 2]
    counts = {"idempotency_keys": 3, "evaluations": 3, "steps": 4, "jobs": 3}
    for table, count in counts.items():
        assert job_store._db.one("COUNT(*) AS n", table, "1") == {"n": count}, table
    assert job_store.replayed("key 1", {"model": "net"}) is None
    _to(job_store, jobs[0], CANCELLED)
    job_store.delete_file(FILE.id)
    job_store.forget_old(kept_jobs=0)
    assert all(job_store._db.one("1", table, "1") is None for table in (*counts, "events", "files"))


def test_no_owner_s_jobs_and_steps_are_forgotten_because_of_those_of_another(job_store: JobStore) -> None:
    modest, *greedy = [job_store.create_job(request(owner=one), "key")[0] for one in ("modest", "greedy")]
    greedy += [job_store.create_job(request(owner="greedy"))[0] for _ in range(3)]
    for job in (modest, *greedy):
        job_store.record_steps(job.id, [{"step": 1}, {"step": 2}])
        _to(job_store, job, CANCELLED)
    job_store.forget_old(kept_jobs=3)
    assert [job.id for job in job_store.jobs()] == [greedy[3].id, greedy[2].id, greedy[1].id, modest.id]
    assert job_store.replayed("key", {"model": "net"}, "modest") == job_store.job(modest.id)
    assert job_store.replayed("key", {"model": "net"}, "greedy") is None
    job_store.forget_old(kept_steps=4)
    assert [len(job_store.steps(job.id)) for job in job_store.jobs()] == [2, 0, 0, 2]


def test_no_job_is_looked_for_among_all_that_have_ended(job_store: JobStore, job: JobRow) -> None:
    """Each key has a thousand of them: an order would wait until all are read."""
    asked = list[str]()
    job_store._db._db.set_trace_callback(asked.append)
    job_store.create_job(request(), "key")
    job_store.unfinished()
    job_store.jobs(owners=("key",))
    job_store.forget_old(kept_jobs=0)
    job_store._db._db.set_trace_callback(None)
    read = [one for one in asked if one.startswith(("SELECT", "DELETE"))]
    plans = [row["detail"] for one in read for row in job_store._db._db.execute(f"EXPLAIN QUERY PLAN {one}")]
    assert len(read) > 5 and "SCAN jobs" not in plans


def test_only_so_many_jobs_may_wait(job_store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_UNFINISHED", 2)
    first, _ = job_store.create_job(request(), "key")
    job_store.create_job(request())
    with pytest.raises(Overloaded, match="2 jobs wait, run or are paused"):
        job_store.create_job(request())
    assert job_store.create_job(request(), "key") == (first, False)
    _to(job_store, first, CANCELLED)
    job_store.create_job(request())


def test_one_key_cannot_take_the_places_of_all_jobs(
    job_store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_UNFINISHED", 4)
    for _ in range(2):
        job_store.create_job(request(owner="greedy"))
    with pytest.raises(KeyLimitReached, match="2 of at most 4 jobs"):
        job_store.create_job(request(owner="greedy"))
    job_store.create_job(request(owner="another"))


def _to(job_store: JobStore, job: JobRow, status: str) -> JobRow:
    """Lead a queued job to a status."""
    if status in (RUNNING, SUCCEEDED):
        job_store.move(job.id, RUNNING)
    if status in (SUCCEEDED, FAILED, CANCELLED, PAUSED):
        job_store.move(job.id, status, **(REASON if status == FAILED else JobChanges()))
    return job_store.job(job.id)


@pytest.mark.parametrize("status", [QUEUED, RUNNING, PAUSED, *sorted(FINAL)])
@pytest.mark.parametrize("to", [*NEXT, "asleep"])
def test_only_the_moves_of_the_state_machine_are_made(
    job_store: JobStore, job: JobRow, status: str, to: str
) -> None:
    before = _to(job_store, job, status)
    assert before.status == status
    if to in NEXT[status]:
        after = job_store.move(job.id, to, **REASON)
        assert (after.status, after.revision) == (to, before.revision + 1)
        assert after.finished == (to in FINAL) == (after.finished_at is not None)
    else:
        with pytest.raises(IllegalMove, match=to):
            job_store.move(job.id, to, **REASON)
        assert job_store.job(job.id) == before


@pytest.mark.parametrize("status", sorted(FINAL))
def test_a_finished_job_s_row_never_changes(job_store: JobStore, job: JobRow, status: str) -> None:
    before = _to(job_store, job, status)
    changes: list[dict[str, Any]] = [
        {"stage": "x"},
        {"progress": {"step": 1}},
        {"gate": {}},
        {"estimated_finish": 1},
    ]
    for change in changes:
        with pytest.raises(IllegalMove, match="never changes"):
            job_store.note(job.id, **change)
    assert job_store.request_cancel(job.id) == before == job_store.job(job.id)


def test_a_waiting_job_is_paused_at_once_and_a_running_one_is_asked_to(
    job_store: JobStore, job: JobRow
) -> None:
    assert job_store.request_pause(job.id).status == PAUSED == job_store.request_pause(job.id).status
    assert job_store.unfinished() == [job.id]
    with pytest.raises(BadInput, match=job.id):
        job_store.delete_file(FILE.id)
    assert job_store.request_resume(job.id).status == QUEUED == job_store.request_resume(job.id).status
    job_store.move(job.id, RUNNING)
    asked = job_store.request_pause(job.id)
    assert (asked.status, asked.pause_requested) == (RUNNING, True)
    assert not job_store.request_resume(job.id).pause_requested
    job_store.request_pause(job.id)
    assert not job_store.move(job.id, PAUSED).pause_requested
    assert job_store.request_cancel(job.id).status == CANCELLED


@pytest.mark.parametrize("status", sorted(FINAL))
def test_a_finished_job_is_neither_paused_nor_resumed(job_store: JobStore, job: JobRow, status: str) -> None:
    before = _to(job_store, job, status)
    for ask in (job_store.request_pause, job_store.request_resume):
        with pytest.raises(Conflict, match=f"{job.id} is {status}"):
            ask(job.id)
    assert job_store.job(job.id) == before


def test_evaluations_stand_as_of_one_uninterrupted_run(path: Path) -> None:
    times = iter(range(100, 10_000))
    job_store = JobStore(path, now=lambda: next(times))
    job_store.add_file(FILE)
    job = job_store.create_job(request())[0]
    losses = {5: 0.5, 10: 0.25, 15: 0.125}
    for step, loss in losses.items():
        job_store.record_evaluation(job.id, {"step": step, "held_out_loss": loss})
    known = job_store.evaluations(job.id)
    job_store.record_evaluation(job.id, {"step": 5, "held_out_loss": 0.5})
    assert job_store.evaluations(job.id) == known, "reported again by a training that goes on"
    job_store.record_evaluation(job.id, {"step": 10, "held_out_loss": 0.75})
    found = job_store.evaluations(job.id)
    assert [(one.step, one.record["held_out_loss"]) for one in found] == [(10, 0.75), (5, 0.5)]
    assert [one.step for one in job_store.evaluations(job.id, before=10, limit=1)] == [5]
    job_store.close()


def test_of_many_who_take_a_job_at_once_one_gets_it(job_store: JobStore, job: JobRow) -> None:
    together = threading.Barrier(8)

    def take(_: int) -> bool:
        together.wait(PATIENCE_S)
        try:
            return job_store.move(job.id, RUNNING).status == RUNNING
        except IllegalMove:
            return False

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(take, range(8))) == [False] * 7 + [True]


def test_a_failure_needs_its_reason(job_store: JobStore, job: JobRow) -> None:
    with pytest.raises(ValueError, match="code and a message"):
        job_store.move(job.id, FAILED, code="DIVERGED")
    failed = job_store.move(job.id, FAILED, **REASON)
    assert (failed.code, failed.message) == tuple(REASON.values())
    assert job_store.events(job.id)[0].level == "error"


def test_event_numbers_have_no_gaps_though_many_threads_write_and_some_fail(
    job_store: JobStore, job: JobRow
) -> None:
    def write(number: int) -> None:
        if number % 5 == 0:
            with pytest.raises(TypeError):
                job_store.record(job.id, "info", "not JSON", {"what": object()})
        else:
            job_store.record(job.id, "info", str(number), {"number": number})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(100)))
    numbers = [event.number for event in job_store.events(job.id, limit=1000, oldest_first=True)]
    assert numbers == list(range(1, 82))


def test_events_are_paged_in_both_orders_without_loss(job_store: JobStore, job: JobRow) -> None:
    for number in range(6):
        job_store.record(job.id, "info", f"event {number}")
    for oldest_first, expected in ((False, [7, 6, 5, 4, 3, 2, 1]), (True, [1, 2, 3, 4, 5, 6, 7])):
        seen, after = [], None
        while page := job_store.events(job.id, after, 3, oldest_first):
            seen += [event.number for event in page]
            after = page[-1].id
        assert seen == expected
    stem = f"ftevent-{job.id.removeprefix('ftjob-')}"
    for stranger in ("ftevent-other-1", "nonsense", f"{stem}-x", f"{stem}-{'0' * 17}12"):
        with pytest.raises(UnknownName, match="no event"):
            job_store.events(job.id, stranger)


def test_progress_is_laid_over_what_was_noted_before(job_store: JobStore, job: JobRow) -> None:
    job_store.move(job.id, RUNNING)
    job_store.note(job.id, stage="training", progress={"step": 1, "loss": float("nan")})
    job_store.note(job.id, progress={"step": 2}, estimated_finish=99)
    found = job_store.job(job.id)
    assert (found.stage, found.progress, found.estimated_finish) == (
        "training",
        {"step": 2, "loss": None},
        99,
    )
    done = job_store.move(
        job.id, SUCCEEDED, fine_tuned_model="net@2", version=2, summary={"steps": 2}, gate={"passed": True}
    )
    assert (done.fine_tuned_model, done.version, done.estimated_finish) == ("net@2", 2, None)
    assert (done.stage, done.summary, done.gate) == ("training", {"steps": 2}, {"passed": True})


def test_steps_of_a_job_that_began_again_are_those_of_one_run(job_store: JobStore, job: JobRow) -> None:
    job_store.record_steps(job.id, [{"step": n, "run": 1} for n in range(1, 9)])
    job_store.record_steps(job.id, [{"step": n, "run": 2} for n in range(1, 4)])
    job_store.record_steps(job.id, [{"step": n, "run": 2} for n in range(4, 6)])
    assert job_store.steps(job.id) == [{"step": n, "run": 2} for n in range(1, 6)]


@pytest.mark.parametrize("count", [0, 1, 2, 9, 10, 11, 1000])
def test_a_long_run_is_thinned_evenly_and_keeps_its_ends(
    job_store: JobStore, job: JobRow, count: int
) -> None:
    job_store.record_steps(job.id, [{"step": n} for n in range(1, count + 1)])
    steps = [step["step"] for step in job_store.steps(job.id, most=10)]
    assert len(steps) <= 11 and len(steps) >= min(count, 5)
    assert count == 0 or (steps[0], steps[-1]) == (1, count)


def test_a_run_of_which_not_every_step_is_recorded_is_thinned_evenly_too(
    job_store: JobStore, job: JobRow
) -> None:
    job_store.record_steps(job.id, [{"step": n} for n in (1, *range(5, 1001, 5), 1001)])
    assert [step["step"] for step in job_store.steps(job.id, most=8)] == [
        1,
        145,
        290,
        430,
        575,
        720,
        860,
        1001,
    ]
    assert len(job_store.steps(job.id)) == 202


def test_the_log_of_one_long_job_is_not_forgotten_for_its_length_alone(
    job_store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT_OF_A_JOB", 3)
    jobs = [job_store.create_job(request())[0] for _ in range(2)]
    for job in jobs:
        job_store.record_steps(job.id, [{"step": 4}, {"step": 8}, {"step": 12}])
        _to(job_store, job, SUCCEEDED)
    job_store.forget_old(kept_steps=6)
    assert [len(job_store.steps(job.id)) for job in jobs] == [3, 3]
    job_store.forget_old(kept_steps=5)
    assert [len(job_store.steps(job.id)) for job in jobs] == [0, 3]


def test_of_a_long_run_only_the_steps_that_are_answered_are_read(job_store: JobStore, job: JobRow) -> None:
    job_store.record_steps(job.id, [{"step": n} for n in range(1, 20_001)])
    instructions = list[int]()
    job_store._db._db.set_progress_handler(lambda: instructions.append(1000), 1000)
    assert len(job_store.steps(job.id, most=10)) == 10
    assert sum(instructions) < 20_000, "fewer than one for each record"


def test_the_queue_is_first_come_first_served_and_lists_begin_with_the_newest(job_store: JobStore) -> None:
    made = [job_store.create_job(request(metadata={"lot": str(n % 2)}))[0] for n in range(5)]
    job_store.request_cancel(made[0].id)
    assert job_store.jobs(limit=2) == [made[4], made[3]]
    assert job_store.jobs(after=made[3].id, limit=2) == [made[2], made[1]]
    assert job_store.jobs(metadata={"lot": "1"}) == [made[3], made[1]]
    assert job_store.unfinished() == job_store.unfinished(QUEUED) == [job.id for job in made[1:]]


def test_a_page_of_jobs_is_bounded_by_the_length_of_their_settings(
    job_store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PAGE_CHARACTERS", 100)
    lengths = (90, 45, 45, 200)
    made = [job_store.create_job(request(hyperparameters={"loss": "x" * n}))[0].id for n in lengths]
    pages, after = list[list[str]](), None
    for _ in made:
        found, more = job_store.page(after, 3, None, None)
        pages.append([job.id for job in found])
        after = pages[-1][-1]
        if not more:
            break
    assert pages == [[made[3]], [made[2]], [made[1]], [made[0]]]
    monkeypatch.setattr(module, "_PAGE_CHARACTERS", 220)
    assert [len(job_store.page(after, 3, None, None)[0]) for after in (None, made[3])] == [1, 3]
    assert job_store.page(None, 1, {"lot": "1"}, None) == ([], False)


def test_the_same_content_goes_with_the_last_file_that_has_it(job_store: JobStore) -> None:
    again = job_store.add_file(FileRecord("file-2", FILE.sha256, 10, FILE.filename, 2))
    other_name = job_store.add_file(FileRecord("file-3", FILE.sha256, 10, "other.npz", 2))
    assert job_store.files() == [other_name, again, FILE]
    assert not job_store.delete_file(FILE.id)
    with pytest.raises(UnknownName, match="file-1"):
        job_store.file(FILE.id)
    assert not job_store.delete_file(again.id)
    assert job_store.delete_file(other_name.id)


@pytest.mark.parametrize("replaced", [False, True])
def test_nothing_is_acknowledged_once_the_file_is_another_one(path: Path, replaced: bool) -> None:
    store = JobStore(path, lambda: 1.0)
    path.rename(path.with_suffix(".old"))
    if replaced:
        path.touch()
    with pytest.raises(StoreError, match="it was removed or replaced, and nothing can be kept"):
        store.add_file(FILE)
    path.with_suffix(".old").replace(path)
    assert store.add_file(FILE) == FILE
    store.close()


def _not_a_database(path: Path) -> None:
    path.write_bytes(b"not a database, though it is long enough to be one" * 100)


def _of_another_release(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()


@pytest.mark.parametrize(
    ("spoil", "error", "words"),
    [
        (_not_a_database, DamagedFile, "halfeven.db"),
        (_of_another_release, StoreError, "schema 99, expected 6"),
    ],
)
def test_a_file_that_is_no_ledger_of_ours_is_refused_and_left_alone(
    spoil: Callable[[Path], None], error: type[Exception], words: str, path: Path
) -> None:
    path.parent.mkdir()
    spoil(path)
    with pytest.raises(error, match=words):
        JobStore(path)
    assert path.exists()


def test_a_disk_that_refuses_is_told_and_leaves_no_half(job_store: JobStore, job: JobRow) -> None:
    pages = job_store._db._db.execute("PRAGMA page_count").fetchone()[0]
    job_store._db._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(DiskFull, match="disk full"):
        job_store.record_steps(job.id, [{"step": n, "text": "x" * 1000} for n in range(1, 500)])
    assert job_store.steps(job.id) == []
    job_store._db._db.execute("PRAGMA max_page_count = 100000")
    assert job_store.move(job.id, RUNNING).status == RUNNING


def test_a_file_that_is_damaged_while_it_is_open_is_named(
    job_store: JobStore, job: JobRow, path: Path
) -> None:
    job_store._db._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    job_store._db._db.execute("PRAGMA shrink_memory")
    data = path.read_bytes()
    path.write_bytes(data[:4096] + b"\xff" * (len(data) - 4096))
    with pytest.raises(DamagedFile, match=r"halfeven\.db cannot be read.*restore it"):
        job_store.job(job.id)


def test_a_value_that_is_damaged_is_named(job_store: JobStore, job: JobRow) -> None:
    job_store._db._db.execute("UPDATE jobs SET hyperparameters = '{' WHERE id = ?", [job.id])
    with pytest.raises(DamagedFile, match="holds a value that is damaged"):
        job_store.job(job.id)
