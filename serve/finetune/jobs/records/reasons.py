"""The reason codes of a job's end, on which callers act (a job's ``error.code`` and its gate)."""

from collections.abc import Mapping
from typing import Any

ENDED = frozenset({"succeeded", "failed", "cancelled"})
DISK_FULL = "DISK_FULL"
DISK_FULL_MESSAGE = "the disk of the store is full: delete versions or files there, then create the job again"
NO_JUDGING_SET, NOTHING_LEARNT, STALE_PARENT = "NO_JUDGING_SET", "NOTHING_LEARNT", "STALE_PARENT"
REFUSED = frozenset({"PARITY_REFUSED", "PARITY_FAILED", "GATE_REFUSED", "METRIC_REGRESSED", STALE_PARENT})
BAD_DATA = frozenset({"BAD_DATA", "BAD_INPUT", "BAD_SAMPLES", "DATASET_INVALID", "SPEC_MISMATCH"})


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
