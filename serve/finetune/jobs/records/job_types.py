"""The types of the job store: files, jobs, events, and the one state machine; and the reason codes of a job's end, on
which callers act (a job's ``error.code`` and its gate).

    queued ⇄ running ─▶ succeeded        every one that is not final ─▶ failed · cancelled
    queued ⇄ paused ◀─ running

The states are OpenAI's; our finer stages (training, converting, judging…) stand beside them in ``stage``.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

from .....models.errors import StoreError, UnknownName

QUEUED, RUNNING, PAUSED = "queued", "running", "paused"
SUCCEEDED, FAILED, CANCELLED = "succeeded", "failed", "cancelled"
# The stage in which the alias moves: from then on only the alias tells how the job ends.
ACTIVATING = "activating"
FINAL = frozenset((SUCCEEDED, FAILED, CANCELLED))
# Running goes back to queued when the server that ran it is gone.
NEXT: Mapping[str, frozenset[str]] = {
    QUEUED: frozenset((RUNNING, PAUSED, FAILED, CANCELLED)),
    RUNNING: frozenset((QUEUED, PAUSED, *FINAL)),
    PAUSED: frozenset((QUEUED, FAILED, CANCELLED)),
    **dict.fromkeys(sorted(FINAL), frozenset()),
}
_NUMBER = re.compile(r"[0-9]{1,18}")  # SQLite's integers have eighteen whole digits


class IllegalMove(StoreError):
    """A job cannot change from its state to the one asked for, or changed meanwhile. Look at the job's status."""

    code = "illegal_move"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One uploaded file: the name is its sender's, the bytes are found by ``sha256``."""

    id: str
    sha256: str
    bytes: int
    filename: str
    created_at: int  # Unix seconds, as all times here
    purpose: str = "fine-tune"
    expires_at: int | None = None  # from then on it is deleted, once no job needs it
    owner: str = ""  # the identifier of the key that uploaded it; empty: none was needed


@dataclass(frozen=True, slots=True)
class JobTerms:
    """The part of a job that is settled when it is created.

    ``model`` is as it was asked (``name`` or ``name@version``); ``name`` and ``parent_version`` say what that
    meant at admission. ``hyperparameters`` are resolved: ``auto`` is only what the trainer measures.
    """

    model: str
    name: str
    parent_version: int
    training_file: str
    hyperparameters: Mapping[str, Any]
    seed: int
    validation_file: str | None = None
    suffix: str | None = None
    metadata: Mapping[str, str] | None = None
    owner: str = ""  # the identifier of the key that made it; empty: none was needed


@dataclass(frozen=True, slots=True)
class JobRequest(JobTerms):
    """A job that passed admission. ``asked`` is what the caller sent: an idempotency key is bound to it. ``findings``
    become warnings among the job's events."""

    asked: Mapping[str, Any] = field(default_factory=dict)
    findings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow(JobTerms):
    """One row of the job store. ``revision`` rises with every change of state; ``attempts`` counts the starts.

    ``code`` and ``message`` say why a job failed, was cancelled or succeeded with a version that is held, ``param``
    which parameter was at fault. ``version`` is the number of the version that the job made, refused or not;
    ``fine_tuned_model`` names it where the job succeeded.
    """

    id: str
    revision: int
    created_at: int
    status: str
    stage: str
    attempts: int
    cancel_requested: bool
    started_at: int | None
    finished_at: int | None
    estimated_finish: int | None
    code: str | None
    message: str | None
    param: str | None
    fine_tuned_model: str | None
    version: int | None
    progress: Mapping[str, Any]
    summary: Mapping[str, Any] | None
    gate: Mapping[str, Any] | None
    pause_requested: bool

    @property
    def finished(self) -> bool:
        return self.status in FINAL

    @property
    def at_work(self) -> bool:
        """True if the job's own thread ends it: it runs, or goes on after its version was being made active."""
        return self.status == RUNNING or (self.status == QUEUED and self.stage == ACTIVATING)


class JobChanges(TypedDict, total=False):
    """The columns of a job's row that its stages write; one that is left out or None stays as it is."""

    stage: str
    code: str | None
    message: str | None
    fine_tuned_model: str
    version: int | None
    progress: Mapping[str, Any]
    summary: Mapping[str, Any]
    gate: Mapping[str, Any] | None
    estimated_finish: int
    parent_version: int


@dataclass(frozen=True, slots=True)
class JobEvent:
    """An event of a job; ``number`` counts the job's events from 1 without gaps."""

    job: str
    number: int
    created_at: int
    level: str
    message: str
    kind: str  # message | metrics
    data: Mapping[str, Any] | None

    @property
    def id(self) -> str:
        return f"ftevent-{self.job.removeprefix('ftjob-')}-{self.number}"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation of a training on its held-out rows; ``record``: the trainer's line."""

    job: str
    step: int
    created_at: int
    record: Mapping[str, Any]

    @property
    def id(self) -> str:
        return f"ftckpt-{self.job.removeprefix('ftjob-')}-{self.step}"


def check_move(job: JobRow, to: str) -> None:
    """Raises IllegalMove where the state machine has no such move."""
    if to not in NEXT[job.status]:
        ways = ", ".join(sorted(NEXT[job.status])) or "nowhere, it is finished"
        raise IllegalMove(
            f"job {job.id} is {job.status} and cannot become {to}; from there it goes to: {ways}"
        )


def entering(job: JobRow, to: str, now: int) -> dict[str, Any]:
    """The columns of the job's row that entering a state sets by itself."""
    entered: dict[str, Any] = {"status": to, "revision": job.revision + 1}
    if to == RUNNING:
        entered |= {"started_at": job.started_at or now, "attempts": job.attempts + 1}
    if to in (QUEUED, PAUSED):
        entered |= {"pause_requested": False, "estimated_finish": None}
    if to in FINAL:
        entered |= {"finished_at": now, "estimated_finish": None}
    return entered


def step_of(job: str, checkpoint: str) -> int:
    """The step in a checkpoint's id. Raises UnknownName where that is no checkpoint of the job."""
    return _counted(job, "ftckpt", "checkpoint", checkpoint)


def number_of(job: str, event: str) -> int:
    """The number in an event's id. Raises UnknownName where that is no event of the job."""
    return _counted(job, "ftevent", "event", event)


def _counted(job: str, prefix: str, what: str, id: str) -> int:
    stem, _, number = id.rpartition("-")
    if stem != f"{prefix}-{job.removeprefix('ftjob-')}" or not _NUMBER.fullmatch(number):
        raise UnknownName(f"job {job} has no {what} '{id[:80]}'; 'after' is the id of the last {what} seen")
    return int(number)


DISK_FULL = "DISK_FULL"
DISK_FULL_MESSAGE = "the disk of the store is full: delete versions or files there, then create the job again"
NO_JUDGING_SET, NOTHING_LEARNT, STALE_PARENT = "NO_JUDGING_SET", "NOTHING_LEARNT", "STALE_PARENT"
REFUSED = frozenset({"PARITY_REFUSED", "PARITY_FAILED", "METRIC_REGRESSED", STALE_PARENT})
BAD_DATA = frozenset({"BAD_DATA", "BAD_INPUT", "BAD_SAMPLES"})


def was_refused(job: Mapping[str, Any]) -> bool:
    """True if the job's version was trained and then refused: by parity, by the gate, or because its parent is
    stale."""
    gate = (job.get("halfeven") or {}).get("gate") or {}
    return job["status"] == "failed" and (gate.get("passed") is False or _code(job) in REFUSED)


def not_active(job: Mapping[str, Any]) -> str | None:
    """``held`` or ``not promoted``, of a job whose version was published and not made active: no set judged what was
    learnt, or it is not better than the active version."""
    promotion = (job.get("halfeven") or {}).get("promotion") or {}
    left = job["status"] == "succeeded" and promotion.get("state") in ("held", "not promoted")
    return promotion["state"] if left else None


def had_bad_data(job: Mapping[str, Any]) -> bool:
    """True if the caller's data do not fit the model."""
    return job["status"] == "failed" and _code(job) in BAD_DATA


def _code(job: Mapping[str, Any]) -> str | None:
    return (job.get("error") or {}).get("code")
