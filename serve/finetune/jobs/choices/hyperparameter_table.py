"""The table of what a job may set: ranges, words and defaults; and the error of a setting that it does not allow.
docs/finetune.md has the same table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .....models.errors import BadInput
from .....models.folder.loss_and_optimizer_names import IGNORED
from ...training.loop.setting_names import ALL, HALF_LEVELS, MASK, NETS, NONE, PRECISIONS, REFUSE, SCHEDULES

AUTO = "auto"
REJUDGE, RETRAIN, QUARANTINE = "rejudge", "retrain", "quarantine"
WORDS: Mapping[str, tuple[str, ...]] = {  # the first is the default
    "precision": (AUTO, *PRECISIONS),
    "opt_level": ("O1", "O0", *HALF_LEVELS),
    "schedule": tuple(SCHEDULES),
    "stale_parent": (REFUSE, REJUDGE, RETRAIN),
    "bad_rows": (REFUSE, QUARANTINE),
    "missing_targets": (REFUSE, MASK),
    "keep_state": (NONE, NETS, ALL),
    "warm_start": (NONE, NETS, ALL),
}
HEAD, LORA = "head", "lora"  # of `trainable`, beside patterns


@dataclass(frozen=True, slots=True)
class SettingRange:
    """``low`` to ``high``, both allowed, finite. ``whole``: no fractions. ``auto``: the word is allowed too."""

    low: float
    high: float
    default: float | str
    whole: bool = False
    auto: bool = False

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        return f"{kind} from {self.low:g} to {self.high:g}" + (' or "auto"' if self.auto else "")


RANGES: Mapping[str, SettingRange] = {
    "n_epochs": SettingRange(1, 1000, AUTO, whole=True, auto=True),
    "batch_size": SettingRange(1, 65536, AUTO, whole=True, auto=True),
    "accumulation": SettingRange(1, 65536, 1, whole=True),
    "learning_rate_multiplier": SettingRange(1e-6, 1e6, AUTO, auto=True),
    "learning_rate": SettingRange(1e-10, 10, AUTO, auto=True),
    "warmup_ratio": SettingRange(0, 0.9, AUTO, auto=True),
    "warmup_steps": SettingRange(0, 1_000_000, AUTO, whole=True, auto=True),
    "schedule_power": SettingRange(0.1, 10, 2.0),
    "schedule_period": SettingRange(0.001, 1, 1 / 3),
    "schedule_gamma": SettingRange(1e-6, 1, 0.1),
    "weight_decay": SettingRange(0, 1, 0.01),
    "label_smoothing": SettingRange(0, 0.99, 0.0),
    "ignore_index": SettingRange(-(2**31), 2**31, IGNORED, whole=True),
    "ema_decay": SettingRange(0, 0.99999, 0.0),
    "lora_rank": SettingRange(1, 1024, 8, whole=True),
    "lora_alpha": SettingRange(1e-3, 1e4, 16.0),
    "lora_dropout": SettingRange(0, 0.9, 0.0),
    "clip_norm": SettingRange(1e-6, 1e6, 1.0),
    "init_scale": SettingRange(2**-24, 2**32, 2**16),
    "growth_factor": SettingRange(1.0001, 65536, 2.0),
    "backoff_factor": SettingRange(0.0001, 0.9999, 0.5),
    "growth_interval": SettingRange(1, 1_000_000, AUTO, whole=True, auto=True),
    "scale_floor": SettingRange(2**-24, 2**16, 2**-16),
    "max_floor_hits": SettingRange(1, 1000, 8, whole=True),
    "checkpoint_every": SettingRange(1, 1_000_000, AUTO, whole=True, auto=True),
    "early_stopping_patience": SettingRange(0, 1000, 0, whole=True),
    "validation_split": SettingRange(0.001, 0.5, AUTO, auto=True),
    "forgetting_tolerance": SettingRange(0, 1, 0.02),
}
# A setting that only some words of another one read; with other words it would be ignored, so it is refused.
READ_WITH: Mapping[str, tuple[str, tuple[str, ...]]] = {
    setting: ("schedule", tuple(name for name, read in SCHEDULES.items() if setting in read))
    for setting in ("schedule_power", "schedule_period", "schedule_gamma")
} | dict.fromkeys(("lora_rank", "lora_alpha", "lora_dropout", "lora_targets"), ("trainable", (LORA,)))


class BadHyperparameter(BadInput):
    """A setting of a job is out of its range. ``param`` is its name, the message has the range."""

    code = "bad_hyperparameter"


def bad(name: str, fault: str) -> BadHyperparameter:
    return BadHyperparameter(f"hyperparameters: {name}: {fault}", name)


def shown(value: Any) -> str:
    """A value in a message, cut to 80 characters."""
    return repr(value)[:80]
