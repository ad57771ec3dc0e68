"""The outcome of a check, and which fast way of the engines has to be off for the check to hold on a device."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ...models.engines.faults import device_answers, device_lost, give_back_cached_memory
from ...models.engines.switched_off import DEVICE, PINNED_STAGING, TWO_IN_FLIGHT, only_off

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


WITHOUT = ((TWO_IN_FLIGHT,), (PINNED_STAGING,), (TWO_IN_FLIGHT, PINNED_STAGING))


class DeviceLost(Exception):
    """After this error the device answers nothing in this process."""


def judged(
    device: torch.device,
    faults_of: Callable[[], list[str]],
    held: str,
    figures: Mapping[str, Any] | None = None,
) -> Outcome:
    """Passed, with the sentence ``held``, where ``faults_of`` finds none. Otherwise it is asked again with fast ways
    off, and those without which there is no fault are to be switched off; the device, where there always is one.

    ``faults_of`` makes its engines itself. Raises DeviceLost.
    """
    figures = figures or {}
    with only_off(device):
        faults = found(faults_of, device)
    if not faults:
        return Outcome(PASSED, held, figures=figures)
    evidence = "; ".join(faults)
    for features in WITHOUT:
        with only_off(device, *features):
            if not found(faults_of, device):
                return Outcome(FAILED, evidence, features, figures)
    return Outcome(FAILED, f"{evidence}; so it is without any fast way", (DEVICE,), figures)


def found(faults_of: Callable[[], list[str]], device: torch.device) -> list[str]:
    """The faults; an error is one. Raises DeviceLost."""
    try:
        return faults_of()
    except DeviceLost:
        raise
    except Exception as error:
        sentence = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if device_lost(error) or not device_answers(error, str(device)):
            raise DeviceLost(sentence) from error
        give_back_cached_memory()
        return [sentence]
