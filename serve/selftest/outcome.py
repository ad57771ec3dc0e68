"""The outcome of one check of the selftest."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

PASSED: Literal["passed"] = "passed"
FAILED: Literal["failed"] = "failed"
NOT_APPLICABLE: Literal["not applicable"] = "not applicable"


@dataclass(frozen=True, slots=True)
class Outcome:
    """``evidence``: what was compared, what was wrong, or why the check does not apply; ``off``: the features to switch
    off because of it (`models/engines/switched_off.py`); ``figures``: numbers, by name."""

    status: Literal["passed", "failed", "not applicable"]
    evidence: str
    off: tuple[str, ...] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)


def not_applicable(reason: str) -> Outcome:
    return Outcome(NOT_APPLICABLE, reason)


def on_cuda_alone(what: str) -> Outcome:
    """The outcome of a check of ``what``, which only a CUDA device has."""
    return not_applicable(f"only a CUDA device has {what}")
