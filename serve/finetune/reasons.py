"""The reason codes of a job's end, on which callers act (a job's ``error.code`` and its gate)."""

from collections.abc import Mapping
from typing import Any

ENDED = frozenset({"succeeded", "failed", "cancelled"})
NO_JUDGING_SET, STALE_PARENT = "NO_JUDGING_SET", "STALE_PARENT"
REFUSED = frozenset({"PARITY_REFUSED", "PARITY_FAILED", "GATE_REFUSED", "METRIC_REGRESSED", STALE_PARENT})
BAD_DATA = frozenset({"BAD_DATA", "BAD_INPUT", "BAD_SAMPLES", "DATASET_INVALID", "SPEC_MISMATCH"})


def was_refused(job: Mapping[str, Any]) -> bool:
    """Whether the job's version was trained and then refused: by parity, by the gate, or because its parent is
    stale."""
    gate = (job.get("halfeven") or {}).get("gate") or {}
    return job["status"] == "failed" and (gate.get("passed") is False or _code(job) in REFUSED)


def was_held(job: Mapping[str, Any]) -> bool:
    """Whether the job's version was published and held, because no set judged what was learnt."""
    promotion = (job.get("halfeven") or {}).get("promotion") or {}
    return job["status"] == "succeeded" and promotion.get("state") == "held"


def had_bad_data(job: Mapping[str, Any]) -> bool:
    """Whether the caller's data do not fit the model."""
    return job["status"] == "failed" and _code(job) in BAD_DATA


def _code(job: Mapping[str, Any]) -> str | None:
    return (job.get("error") or {}).get("code")
