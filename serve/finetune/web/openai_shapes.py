"""Files, jobs and events as OpenAI's clients read them.

Source: the types of the `openai` Python package (FileObject, FineTuningJob, FineTuningJobEvent, cursor pages).
Fields that they do not have are in a job's ``halfeven`` object.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ...http.error_mapping import without_folders
from ..jobs.records.job_types import (
    CANCELLED,
    FAILED,
    NOTHING_LEARNT,
    SUCCEEDED,
    Evaluation,
    FileRecord,
    JobEvent,
    JobRow,
)

T = TypeVar("T")
# The fields of a job's row that are shown as they are: in the job, and in its ``halfeven`` object.
_THEIRS = (
    "id", "created_at", "finished_at", "model", "fine_tuned_model", "status", "training_file", "validation_file",
    "seed", "estimated_finish", "metadata",
)  # fmt: skip
_OURS = (
    "stage", "parent_version", "version", "attempts", "revision", "cancel_requested", "pause_requested", "started_at",
    "progress", "gate", "summary",
)  # fmt: skip


def file_body(record: FileRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "object": "file",
        "bytes": record.bytes,
        "created_at": record.created_at,
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
        "expires_at": record.expires_at,
        "sha256": record.sha256,
    }


def job_body(job: JobRow) -> dict[str, Any]:
    hyperparameters = dict(job.hyperparameters)
    return {
        **{name: getattr(job, name) for name in _THEIRS},
        "object": "fine_tuning.job",
        "organization_id": "halfeven",
        "hyperparameters": hyperparameters,
        "result_files": [],
        "trained_tokens": None,
        "error": _error(job),
        "method": {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}},
        "user_provided_suffix": job.suffix,
        "integrations": [],
        "halfeven": {"promotion": _promotion(job), **{name: getattr(job, name) for name in _OURS}},
    }


def _promotion(job: JobRow) -> dict[str, Any] | None:
    """The outcome for the version that the job made: ``promoted``, ``held``, ``not promoted`` or ``refused``; None
    where there is no version, or the job was cancelled."""
    if job.version is None or job.status == CANCELLED:
        return None
    if job.status == SUCCEEDED:
        state = ("not promoted" if job.code == NOTHING_LEARNT else "held") if job.code else "promoted"
        return {"state": state, "code": job.code, "message": shown_message(job) if job.code else None}
    return {"state": "refused", "code": job.code, "message": shown_message(job)}


def _error(job: JobRow) -> dict[str, Any] | None:
    if job.status != FAILED:
        return None
    return {"code": job.code, "message": shown_message(job), "param": job.param}


def shown_message(one: JobRow | JobEvent) -> str | None:
    """The message as callers may read it: the stored one may name the server's folders, and have a traceback."""
    return None if one.message is None else without_folders(one.message)


def event_body(event: JobEvent) -> dict[str, Any]:
    return {
        "id": event.id,
        "object": "fine_tuning.job.event",
        "created_at": event.created_at,
        "level": event.level,
        "message": shown_message(event),
        "type": event.kind,
        "data": event.data or {},
        "number": event.number,
    }


def checkpoint_body(job: JobRow, evaluation: Evaluation) -> dict[str, Any]:
    """One evaluation as a checkpoint; its model's name is the version where this step's weights were published."""
    record, step = evaluation.record, evaluation.step
    published = job.fine_tuned_model is not None and (job.summary or {}).get("best_step") == step
    return {
        "id": evaluation.id,
        "object": "fine_tuning.job.checkpoint",
        "created_at": evaluation.created_at,
        "fine_tuning_job_id": job.id,
        "fine_tuned_model_checkpoint": job.fine_tuned_model if published else f"{job.id}:step-{step}",
        "step_number": step,
        "metrics": {
            "step": step,
            "train_loss": record["loss"],
            "valid_loss": record["held_out_loss"],
            "full_valid_loss": record["held_out_loss"],
        },
    }


def page_of(found: Sequence[T], limit: int, body: Callable[[T], dict[str, Any]]) -> dict[str, Any]:
    """One cursor page; ``found`` holds one more than ``limit`` where there is a next page."""
    data = [body(item) for item in found[:limit]]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
    return {"object": "list", "data": data, "has_more": len(found) > limit, **ends}
