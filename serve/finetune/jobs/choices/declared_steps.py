"""The settings of a job whose model declares nets, optimizers and steps in its model.toml."""

from collections.abc import Collection, Mapping
from typing import Any

from .....models.store.store import Version
from .hyperparameter_table import ALL, HALF_LEVELS, NETS, NONE, QUARANTINE, bad

OF_OPTIMIZERS = (
    "learning_rate", "learning_rate_multiplier", "weight_decay", "clip_norm", "optimizer", "learning_rates"
)  # fmt: skip
_NOT_WITH_STEPS = (*(("opt_level", level) for level in HALF_LEVELS), ("bad_rows", QUARANTINE))


def declared_steps(parent: Version) -> Mapping[str, Any] | None:
    """None where one optimizer and one loss train the model."""
    return parent.manifest.get("training", {}).get("declared_steps")


def check_settings(parent: Version, asked: Collection[str], values: Mapping[str, Any]) -> None:
    """Raises BadHyperparameter where a job's own settings (``asked``) are not read by a training with several
    optimizers, or by one with one."""
    if declared_steps(parent) is None:
        for name in ("keep_state", "warm_start"):
            if values[name] == NETS:
                raise bad(
                    name, f"{parent} declares no net beside the model in model.toml; expected {NONE} or {ALL}"
                )
        return
    for name in OF_OPTIMIZERS:
        if name in asked:
            raise bad(
                name,
                f"each optimizer of {parent} has its own in model.toml; change it there "
                "([training.optimizers.NAME]) and convert again",
            )
    for name, word in _NOT_WITH_STEPS:
        if values[name] == word:
            raise bad(
                name,
                f"{word} is for a training with one optimizer, and {parent} declares several in model.toml; choose "
                "another value",
            )
