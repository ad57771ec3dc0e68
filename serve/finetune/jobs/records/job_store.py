"""Jobs, their events and the uploaded files in SQLite. When a method returns, its change is on the disk.

The server is the sole writer: one connection, one lock, short transactions. ``synchronous=FULL`` makes each
commit wait for the disk (1 to 10 ms): note progress some times a second, and steps in batches.
"""

import hashlib
import secrets
import sqlite3
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Unpack

import orjson

from .....models.errors import BadInput, Conflict, KeyLimitReached, Overloaded, UnknownName
from ....access.keys import Owners
from ....http.limits.request_limits import DEFAULTS
from ....http.limits.shared_places import may_hold
from .database import Database, decoded, encoded
from .file_store import UNFINISHED, FileStore, chosen
from .job_types import (
    CANCELLED,
    FAILED,
    FINAL,
    PAUSED,
    QUEUED,
    SUCCEEDED,
    Evaluation,
    IllegalMove,
    JobChanges,
    JobEvent,
    JobRequest,
    JobRow,
    check_move,
    entering,
    number_of,
)

_JOB = ", ".join(field.name for field in fields(JobRow))
_EVENT = ", ".join(field.name for field in fields(JobEvent))
MOST_UNFINISHED = DEFAULTS.unfinished_jobs
_RETRY_AFTER_S = 60.0
KEPT_JOBS = 1000  # of one owner that have ended, the newest
KEPT_STEPS = 2_000_000  # records of steps of all jobs that have ended together, about 500 MB
# A job with more steps has every k-th recorded: its log alone must not be longer than all logs may be.
KEPT_OF_A_JOB = KEPT_STEPS // 2
# The plus keeps SQLite from the index by status: the one by owner has all that is asked, and is in its order.
_ENDED = f"+status IN ({', '.join(repr(status) for status in sorted(FINAL))})"
# Each end by itself: SQLite finds one by its key, and reads all records for two.
_ENDS = ", ".join(f"(SELECT {one}(step) FROM steps WHERE job = id) AS {one}" for one in ("min", "max"))
_PAGE_CHARACTERS = 2**22  # of the settings of the jobs in one answer: each of their numbers becomes an object
_OF_A_JOB = ("idempotency_keys", "events", "steps", "evaluations")


class JobStore(FileStore):
    """``<store>/halfeven.db``. Every method may be called from any thread and blocks for the disk.

    ``owners``: whose objects are looked at; those of others are unknown.

    Raises StoreError where the disk fails, DamagedFile where the file is not a job store. ``now`` gives Unix seconds.
    """

    def __init__(self, path: Path, now: Callable[[], float] = time.time) -> None:
        super().__init__(Database(path), now)

    def close(self) -> None:
        self._db.close()

    def create_job(self, request: JobRequest, idempotency_key: str | None = None) -> tuple[JobRow, bool]:
        """(the job, queued; whether it is new). A key that was used gives the job it made then.

        Raises UnknownName for a file that is gone, BadInput for a key that came with another request, Overloaded and
        KeyLimitReached where too many jobs have not ended.
        """
        with self._db.transaction() as db:
            if idempotency_key and (known := self.replayed(idempotency_key, request.asked, request.owner)):
                return known, False
            self._check_room(request.owner)
            for file in filter(None, (request.training_file, request.validation_file)):
                self.file(file)
            id = "ftjob-" + secrets.token_hex(12)
            row = {field.name: getattr(request, field.name) for field in fields(JobRequest)}
            del row["asked"], row["findings"]
            row |= {"id": id, "created_at": int(self._now()), "status": QUEUED, "stage": QUEUED}
            marks = ", ".join("?" * len(row))
            db.execute(f"INSERT INTO jobs ({', '.join(row)}) VALUES ({marks})", encoded(row))
            if idempotency_key:
                keyed = [request.owner, idempotency_key, id, _digest(request.asked)]
                db.execute("INSERT INTO idempotency_keys VALUES (?, ?, ?, ?)", keyed)
            self.record(id, "info", "the data fit the model: the job is queued", {"status": QUEUED})
            for finding in request.findings:
                self.record(id, "warn", finding)
            return self.job(id), True

    def _check_room(self, owner: str) -> None:
        """Raises Overloaded where too many jobs have not ended, KeyLimitReached where too many of this owner's."""
        found = [row["owner"] for row in self._db.all("owner", "jobs", UNFINISHED)]
        own, advice = found.count(owner), "cancel some, or ask again later"
        if len(found) >= MOST_UNFINISHED:
            raise Overloaded(f"{MOST_UNFINISHED} jobs wait, run or are paused; {advice}", _RETRY_AFTER_S)
        if not may_hold(1, own, len(found), MOST_UNFINISHED, owner):
            raise KeyLimitReached(
                f"{own} of at most {MOST_UNFINISHED} jobs that wait, run or are paused are this key's, and what is "
                f"free is kept for other keys; {advice}",
                _RETRY_AFTER_S,
            )

    def replayed(self, idempotency_key: str, asked: Mapping[str, Any], owner: str = "") -> JobRow | None:
        """The job that this key of the owner made, or None. Raises BadInput where it came with another request."""
        digest = _digest(asked)
        row = self._db.one("job, asked", "idempotency_keys", "owner = ? AND key = ?", owner, idempotency_key)
        if row is None:
            return None
        if row["asked"] != digest:
            raise BadInput(
                f"the Idempotency-Key {idempotency_key[:80]!r} was used for job {row['job']} with another request; "
                "send the same request again, or a new key"
            )
        return self.job(row["job"])

    def job(self, id: str, owners: Owners = None) -> JobRow:
        """Raises UnknownName."""
        row = self._db.one(_JOB, "jobs", "id = ?", id)
        if row is None or not (owners is None or row["owner"] in owners):
            raise UnknownName(f"no fine-tuning job '{id[:80]}'; GET /v1/fine_tuning/jobs lists them")
        return _job(row)

    def jobs(
        self, after: str | None = None, limit: int = 20, metadata: Mapping[str, str] | None = None,
        owners: Owners = None,
    ) -> list[JobRow]:  # fmt: skip
        """Jobs, the newest first, from the one after job ``after``; only those that have all of ``metadata``. They are
        fewer than ``limit`` where their settings are long (`_PAGE_CHARACTERS`)."""
        return self.page(after, limit, metadata, owners)[0]

    def page(
        self, after: str | None, limit: int, metadata: Mapping[str, str] | None, owners: Owners
    ) -> tuple[list[JobRow], bool]:
        """The jobs that `jobs` gives, and whether there are more after them."""
        where, values = map(list[Any], chosen(owners))
        if after is not None:
            self.job(after, owners)
            where.append("number < (SELECT number FROM jobs WHERE id = ?)")
            values.append(after)
        for pair in (metadata or {}).items():
            where.append("EXISTS (SELECT 1 FROM json_each(metadata) WHERE key = ? AND value = ?)")
            values.extend(pair)
        order = " AND ".join(where) + " ORDER BY number DESC LIMIT ?"
        columns = "length(hyperparameters) AS long"
        long = [row["long"] for row in self._db.all(columns, "jobs", order, *values, limit + 1)]
        # The first job is always among them.
        fit = 1 + sum(characters <= _PAGE_CHARACTERS for characters in islice(accumulate(long), 1, limit))
        rows = self._db.all(_JOB, "jobs", order, *values, fit)
        return [_job(row) for row in rows], len(long) > fit

    def count_by_status(self) -> dict[str, int]:
        """The number of jobs in each status; a status that no job has is left out."""
        rows = self._db.all("status, COUNT(*) AS count", "jobs", "1 GROUP BY status")
        return {row["status"]: row["count"] for row in rows}

    def forget_old(self, kept_jobs: int = KEPT_JOBS, kept_steps: int = KEPT_STEPS) -> None:
        """Delete the oldest jobs of each owner that have ended, with their events, steps and idempotency keys, and what
        is left of deleted files that no job names; where there are too many steps, also those of other ended jobs."""
        too_many = f"{_ENDED} GROUP BY owner HAVING COUNT(*) > ?"
        for owner in [row["owner"] for row in self._db.all("owner", "jobs", too_many, kept_jobs)]:
            old = f"owner = ? AND {_ENDED} ORDER BY number DESC LIMIT -1 OFFSET ?"
            ids = [(row["id"],) for row in self._db.all("id", "jobs", old, owner, kept_jobs)]
            with self._db.transaction() as db:
                for table in _OF_A_JOB:
                    db.executemany(f"DELETE FROM {table} WHERE job = ?", ids)
                db.executemany("DELETE FROM jobs WHERE id = ?", ids)
        with self._db.transaction() as db:
            db.execute(
                "DELETE FROM files WHERE deleted AND id NOT IN (SELECT training_file FROM jobs) AND id NOT IN "
                "(SELECT validation_file FROM jobs WHERE validation_file IS NOT NULL)"
            )
        self._forget_steps(kept_steps)

    def _forget_steps(self, kept: int) -> None:
        """Delete the steps of the oldest ended jobs of the owner who has the most of them, until ``kept`` are left: no
        owner's steps go because of another one's that are more."""
        last = "id, owner, (SELECT MAX(step) FROM steps WHERE job = id) AS last"  # counting them would read all records
        jobs, held = defaultdict[str, deque[tuple[str, int]]](deque), Counter[str]()
        for row in self._db.all(last, "jobs", f"{_ENDED} ORDER BY owner, number"):
            if row["last"]:
                count = min(row["last"], KEPT_OF_A_JOB)
                jobs[row["owner"]].append((row["id"], count))
                held[row["owner"]] += count
        while held.total() > kept:
            ((owner, _),) = held.most_common(1)
            id, count = jobs[owner].popleft()
            with self._db.transaction() as db:
                db.execute("DELETE FROM steps WHERE job = ?", [id])
            held[owner] -= count

    def unfinished(self, status: str | None = None) -> list[str]:
        """The identifiers of the jobs that have not ended, the oldest first; only those in this ``status``."""
        chosen, values = (UNFINISHED, ()) if status is None else ("status = ?", (status,))
        return [row["id"] for row in self._db.all("id", "jobs", f"{chosen} ORDER BY number", *values)]

    def move(self, id: str, to: str, **given: Unpack[JobChanges]) -> JobRow:
        """Change the state of a job and record an event about the change, in one transaction.

        An argument that is None leaves the job's value. A final state never changes. Raises IllegalMove, UnknownName,
        and ValueError where a failed job has no code or no message."""
        code, message = given.get("code"), given.get("message")
        if to == FAILED and not (code and message):
            raise ValueError("a failed job needs a code and a message")
        with self._db.transaction():
            job = self.job(id)
            check_move(job, to)
            self._set(id, _given(given) | entering(job, to, int(self._now())))
            event = {"status": to} | ({"code": code} if code else {})
            level = "error" if to == FAILED else "warn" if to == SUCCEEDED and code else "info"
            self.record(id, level, message or f"the job is {to}", event)
            return self.job(id)

    def note(self, id: str, **given: Unpack[JobChanges]) -> None:
        """Write the given values; ``progress`` updates the stored one. Raises IllegalMove for a finished job."""
        with self._db.transaction():
            job = self.job(id)
            if job.finished:
                raise IllegalMove(f"job {id} is {job.status}: its row never changes again")
            progress = given.pop("progress", None)
            self._set(id, _given(given) | ({"progress": {**job.progress, **progress}} if progress else {}))

    def request_cancel(self, id: str) -> JobRow:
        """Queued: cancelled at once. Running: ``cancel_requested`` is set. Finished: its state, no error."""
        with self._db.transaction():
            job = self.job(id)
            if job.at_work and not job.cancel_requested:
                self._set(id, {"cancel_requested": True})
                self.record(id, "info", "cancelling was asked for: the job stops after its current step")
            elif not job.finished and not job.at_work:
                when = "while it was paused" if job.status == PAUSED else "before it began"
                return self.move(id, CANCELLED, code="CANCELLED", message=f"cancelled {when}")
            return self.job(id)

    def request_pause(self, id: str) -> JobRow:
        """Queued: paused at once. Running: ``pause_requested`` is set. Paused: its state. Finished: raises Conflict."""
        with self._db.transaction():
            job = self.job(id)
            if job.finished:
                raise Conflict(f"job {id} is {job.status}: what is finished cannot be paused")
            if job.at_work and not job.pause_requested:
                self._set(id, {"pause_requested": True})
                self.record(id, "info", "pausing was asked for: the job stops behind its current step")
            elif job.status == QUEUED and not job.at_work:
                return self.move(id, PAUSED, stage=PAUSED, message="paused before it began or went on")
            return self.job(id)

    def request_resume(self, id: str) -> JobRow:
        """Paused: queued again. Running, and to be paused: it goes on. Else its state. Finished: raises Conflict."""
        with self._db.transaction():
            job = self.job(id)
            if job.finished:
                raise Conflict(f"job {id} is {job.status}: create a new one from the same file and seed")
            if job.status == PAUSED:
                return self.move(
                    id, QUEUED, stage=QUEUED, message="resumed: it goes on from its last checkpoint"
                )
            if job.pause_requested:
                self._set(id, {"pause_requested": False})
                self.record(id, "info", "resumed before it was paused")
            return self.job(id)

    def has_stopped(self, id: str) -> JobRow:
        """The process of a running job has ended for a pause: the job is paused, or queued again where it was resumed
        meanwhile. Where it is to be cancelled too it stays running, for its caller to end."""
        with self._db.transaction():
            job = self.job(id)
            if job.cancel_requested:
                return job
            paused = job.pause_requested
            to, message = (PAUSED, "paused; resuming goes on from here") if paused else (QUEUED, "resumed")
            return self.move(id, to, stage=to, message=message)

    def _set(self, id: str, changes: Mapping[str, Any]) -> None:
        if changes:
            names = ", ".join(f"{name} = ?" for name in changes)
            with self._db.transaction() as db:
                db.execute(f"UPDATE jobs SET {names} WHERE id = ?", [*encoded(changes), id])

    # Events and steps.

    def record(
        self,
        id: str,
        level: str,
        message: str,
        data: Mapping[str, Any] | None = None,
        kind: str = "message",
    ) -> JobEvent:
        """Append an event; its number is the next one. ``level``: info, warn or error."""
        with self._db.transaction() as db:
            self.job(id)
            last = db.execute("SELECT MAX(number) FROM events WHERE job = ?", [id]).fetchone()[0] or 0
            event = JobEvent(id, last + 1, int(self._now()), level, message, kind, data)
            row = {field.name: getattr(event, field.name) for field in fields(JobEvent)}
            db.execute(f"INSERT INTO events ({_EVENT}) VALUES (?, ?, ?, ?, ?, ?, ?)", encoded(row))
            return event

    def events(
        self, id: str, after: str | None = None, limit: int = 20, oldest_first: bool = False
    ) -> list[JobEvent]:
        """The newest first (OpenAI's order), from the one behind event ``after`` in that order.

        Raises UnknownName for the job, and for an ``after`` that is no event of it.
        """
        self.job(id)
        where, values = "job = ?", [id, *([] if after is None else [number_of(id, after)])]
        if after is not None:
            where += " AND number > ?" if oldest_first else " AND number < ?"
        order = f"{where} ORDER BY number {'ASC' if oldest_first else 'DESC'} LIMIT ?"
        return [JobEvent(**decoded(row)) for row in self._db.all(_EVENT, "events", order, *values, limit)]

    def record_steps(self, id: str, steps: Sequence[Mapping[str, Any]]) -> None:
        """Append training steps, rising by their ``step``. Rows from the first one on are replaced, so that
        a job that starts again leaves the rows of one uninterrupted run."""
        if not steps:
            return
        rows = [(id, step["step"], orjson.dumps(step).decode()) for step in steps]
        with self._db.transaction() as db:
            self.job(id)
            db.execute("DELETE FROM steps WHERE job = ? AND step >= ?", [id, rows[0][1]])
            db.executemany("INSERT INTO steps VALUES (?, ?, ?)", rows)

    def record_evaluation(self, id: str, record: Mapping[str, Any]) -> None:
        """Write one evaluation of a training, by its ``step``; evaluations behind it are forgotten, unless this one is
        known already."""
        with self._db.transaction() as db:
            if self._db.one("record", "evaluations", "job = ? AND step = ?", id, record["step"]) == {
                "record": (text := orjson.dumps(record).decode())
            }:
                return
            db.execute("DELETE FROM evaluations WHERE job = ? AND step >= ?", [id, record["step"]])
            row = [id, record["step"], int(self._now()), text]
            db.execute("INSERT INTO evaluations VALUES (?, ?, ?, ?)", row)

    def evaluations(self, id: str, before: int | None = None, limit: int = 10) -> list[Evaluation]:
        """The newest first, from the one before the step ``before``."""
        self.job(id)
        where = "job = ? AND step < ? ORDER BY step DESC LIMIT ?"
        values = (id, 2**62 if before is None else before, limit)
        return [Evaluation(**decoded(row)) for row in self._db.all("*", "evaluations", where, *values)]

    def steps(self, id: str, most: int = 2000) -> list[dict[str, Any]]:
        """The recorded steps; of more than ``most`` every k-th, and always the first and the last."""
        return [orjson.loads(record) for record in self.steps_as_json(id, most)]

    def steps_as_json(self, id: str, most: int) -> list[str]:
        """Each of the steps that `steps` gives, as the JSON that is stored."""
        self.job(id)
        ends = self._db.one(_ENDS, "jobs", "id = ?", id)
        if ends is None or ends["min"] is None:
            return []
        low, high = ends["min"], ends["max"]
        every = max(1, -(-(high - low) // max(most - 1, 1)))
        wanted = orjson.dumps([*range(low, high, every), high]).decode()
        # The first one recorded from each wanted step on: of a long job not every step is (`KEPT_OF_A_JOB`).
        found = "SELECT MIN(step) FROM steps WHERE job = ? AND step >= value"
        where = f"job = ? AND step IN (SELECT ({found}) FROM json_each(?)) ORDER BY step"
        return [row["record"] for row in self._db.all("record", "steps", where, id, id, wanted)]


def _given(changes: JobChanges) -> dict[str, Any]:
    return {name: value for name, value in changes.items() if value is not None}


def _job(row: Mapping[str, Any] | sqlite3.Row) -> JobRow:
    values = decoded(row)
    for name in ("cancel_requested", "pause_requested"):
        values[name] = bool(values[name])
    return JobRow(**values)


def _digest(asked: Mapping[str, Any]) -> str:
    return hashlib.sha256(orjson.dumps(asked, option=orjson.OPT_SORT_KEYS)).hexdigest()
