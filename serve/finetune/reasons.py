"""Why a job ended as it did, in the words that callers act on (a job's ``error.code`` and its gate)."""

from collections.abc import Mapping
from typing import Any

ENDED = frozenset({"succeeded", "failed", "cancelled"})
REFUSED = frozenset({"PARITY_REFUSED", "PARITY_FAILED", "GATE_REFUSED", "METRIC_REGRESSED"})
BAD_DATA = frozenset({"BAD_DATA", "BAD_INPUT", "BAD_SAMPLES", "DATASET_INVALID", "SPEC_MISMATCH"})


def was_refused(job: Mapping[str, Any]) -> bool:
    """Trained, and then refused by parity or by the gate: the version is kept as evidence."""
    gate = (job.get("halfeven") or {}).get("gate") or {}
    return job["status"] == "failed" and (gate.get("passed") is False or _code(job) in REFUSED)


def had_bad_data(job: Mapping[str, Any]) -> bool:
    """The asker's data do not fit the model."""
    return job["status"] == "failed" and _code(job) in BAD_DATA


def _code(job: Mapping[str, Any]) -> str | None:
    return (job.get("error") or {}).get("code")
