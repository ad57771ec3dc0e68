"""A few steps of one job in each precision: what they cost, what they lose, and the precision to take.

The seconds of a step are those by which ``precision = "auto"`` chooses, in turns in one process. Memory and losses are
those of a process for each precision, which begin with the same weights, rows and random numbers.
"""

from collections.abc import Callable, Mapping
from typing import Any

from ..training.loop.setting_names import EXACT_FIRST, HALF_LEVELS, HALF_MODELS, chosen_precision
from .choices.hyperparameter_table import AUTO
from .concluding import JobFailed

COMPARED_STEPS = 8
FP32 = EXACT_FIRST[0]
Trained = Mapping[str, Any]
StepsWith = Callable[[Mapping[str, Any], int], Trained]  # changed settings, steps → the trainer's last line


def chooses(declares_steps: bool) -> Mapping[str, Any]:
    """The settings of the trial that measures the seconds; with several optimizers none does (`declared_steps.py`)."""
    return {} if declares_steps else {"precision": AUTO}


def compared(steps_with: StepsWith, level: str, chosen: Mapping[str, Any] | None) -> dict[str, Any]:
    """``choice`` and ``precisions`` by name, the fields of a precision that was not trained being ``left_out``.
    ``chosen``: what ``auto`` measured, None where it could not be asked; ``level``: of the job."""
    among = HALF_MODELS if level in HALF_LEVELS else EXACT_FIRST
    slow = {one["precision"]: one["sentence"] for one in (chosen or {}).get("left_out", ())}
    found: dict[str, dict[str, Any]] = {}
    losses: dict[str, Any] = {}
    for precision in EXACT_FIRST:  # FP32 in any case: the others are compared with it
        if precision in slow:
            found[precision] = {"left_out": slow[precision]}
            continue
        level_of = {"opt_level": "O1"} if precision == FP32 else {}
        try:
            trained = steps_with({"precision": precision, **level_of}, COMPARED_STEPS)
        except JobFailed as failed:
            found[precision] = {"left_out": f"{failed.code}: {failed}"}
            continue
        seconds = (chosen or {}).get("seconds", {}).get(precision, trained["seconds_per_step"])
        found[precision] = _figures(trained, seconds)
        losses[precision] = trained["losses"]
    for precision, one in found.items():
        if precision in losses and FP32 in losses:
            one["loss_difference"] = _largest_difference(losses[precision], losses[FP32])
    seconds = {name: one["seconds_per_step"] for name, one in found.items() if "left_out" not in one}
    choice = chosen["precision"] if chosen else chosen_precision(_of(among, seconds), among)
    return {"choice": choice, "steps": COMPARED_STEPS, "precisions": found}


def _of(among: tuple[str, ...], seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: one for name, one in seconds.items() if name in among}


def _figures(trained: Trained, seconds: float) -> dict[str, Any]:
    """``loss``: of the last step whose loss was finite."""
    return {
        "seconds_per_step": seconds,
        "steps_per_second": 1 / seconds,
        "peak_memory_bytes": trained["peak_memory_bytes"],
        "peak_device_bytes": trained["peak_device_bytes"],
        "steps_memory_bytes": trained["memory_by_phase"].get("steps"),
        "loss": next((one for one in reversed(trained["losses"]) if one is not None), None),
        "skipped": sum(cause is not None for cause in trained["causes"]),
    }


def _largest_difference(losses: list[float | None], of_fp32: list[float | None]) -> float | None:
    """Between the losses of the same step, relative to FP32's; of the steps where both are finite."""
    pairs = [(one, other) for one, other in zip(losses, of_fp32, strict=False) if None not in (one, other)]
    return max((abs(one - other) / max(abs(other), 1e-12) for one, other in pairs), default=None)  # type: ignore[operator, arg-type]
