"""The settings of a training: every number has its range and its default, and is checked before a job exists.

docs/finetune.md says what each does and what ``auto`` means. The trainer's process measures the ``learning_rate``
(`training/chosen.py`) and the ``precision`` (`training/precision_test.py`).
"""

import math
from collections.abc import Mapping
from typing import Any

from .....models.folder.loss_and_optimizer_names import DEFAULT, read_optimizer
from ...training.loop.setting_names import ONE_CYCLE, USUAL_LEARNING_RATE, batch_count, growth_interval
from .hyperparameter_table import (
    AUTO,
    HALF_LEVELS,
    LORA,
    NONE,
    RANGES,
    READ_WITH,
    WORDS,
    BadHyperparameter,
    bad,
    shown,
)
from .loss_choice import CLASS_WEIGHTS, LOSS, POS_WEIGHT, read_class_weights, read_loss, read_pos_weight
from .setting_aliases import known_setting, with_own_names
from .trainable import LORA_TARGETS, TRAINABLE, read_patterns, read_trainable

OPTIMIZER, LEARNING_RATES = "optimizer", "learning_rates"
MOST_FACTOR, MOST_FACTORS = 1000.0, 64
MOST_STEPS = 10_000_000  # of one job: so many lines its trainer reports
MOST_EVALUATIONS = 10_000  # of one job: each is a record, an event and a checkpoint
KNOWN = (
    *RANGES, *WORDS, TRAINABLE, LORA_TARGETS, LOSS, CLASS_WEIGHTS, POS_WEIGHT, OPTIMIZER, LEARNING_RATES
)  # fmt: skip


def read_hyperparameters(job: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a job's body, from ``hyperparameters`` or ``method.supervised.hyperparameters``.

    Every value is in its range, defaults are filled in, ``auto`` may still stand there (see `resolve`).
    Raises BadHyperparameter naming the field, its range and what came.
    """
    asked = asked_hyperparameters(job)
    for name in asked:
        if "seed" in name.split("_"):
            raise bad(name, "is no hyperparameter: it stands beside them in the request of a job (--seed)")
        if name not in KNOWN:
            near = known_setting(name, KNOWN)
            raise bad(name, f"is unknown; the nearest known one is '{near}'")
    values: dict[str, Any] = {name: _value(name, asked.get(name)) for name in RANGES}
    for name, words in WORDS.items():
        values[name] = words[0] if asked.get(name) is None else asked[name]
        if values[name] not in words:
            raise bad(name, f"expected one of {', '.join(words)}, got {shown(values[name])}")
    values[TRAINABLE] = read_trainable(asked.get(TRAINABLE))
    values[LORA_TARGETS] = read_patterns(LORA_TARGETS, asked.get(LORA_TARGETS))
    values[LOSS], values[CLASS_WEIGHTS] = (
        read_loss(asked.get(LOSS)),
        read_class_weights(asked.get(CLASS_WEIGHTS)),
    )
    values[POS_WEIGHT] = read_pos_weight(asked.get(POS_WEIGHT))
    values[OPTIMIZER], values[LEARNING_RATES] = _optimizer(asked), _factors(asked.get(LEARNING_RATES))
    if values[OPTIMIZER] and values[OPTIMIZER]["name"] != DEFAULT and "weight_decay" not in asked:
        values["weight_decay"] = 0.0  # torch's default for all but AdamW
    _settle_level(values, asked)
    for name in ("keep_state", "warm_start"):
        if values[name] != NONE and values[TRAINABLE] == LORA:
            raise bad(name, f"expected {NONE} with trainable = {LORA}: its adapters end with the job")
    if values["warmup_ratio"] != AUTO and values["warmup_steps"] != AUTO:
        raise bad("warmup_steps", "and warmup_ratio are both given; expected one of them")
    if values["learning_rate"] != AUTO and values["learning_rate_multiplier"] != AUTO:
        raise bad("learning_rate", "and learning_rate_multiplier are both given; expected one of them")
    for name, (other, words) in READ_WITH.items():
        if name in asked and values[other] not in words:
            raise bad(
                name, f"is read with {other} = {' or '.join(words)} only, and {other} is {values[other]}"
            )
    if values["scale_floor"] > values["init_scale"]:
        at_most = f"expected at most init_scale = {values['init_scale']:g}"
        raise bad("scale_floor", f"{at_most}, got {values['scale_floor']:g}")
    return values


def asked_hyperparameters(job: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters that a job's body has, unread, by our names for them."""
    return with_own_names({**_table(job, "hyperparameters"), **_of_method(job)})


def is_setting(name: str) -> bool:
    """True for the name of a hyperparameter, ours or another library's."""
    return with_own_names({name: True}).keys() <= {*KNOWN}


def held_out_share(value: float | str, rows: int) -> float:
    """The share of ``rows`` that is held out. ``auto``: so many that a gain shows, but never more than a third."""
    return max(0.1, min(20 / rows, 1 / 3)) if value == AUTO else float(value)


def resolve(values: Mapping[str, Any], rows: int, max_batch_size: int) -> dict[str, Any]:
    """The values with a number for every ``auto`` but those that the trainer measures; ``rows``: the number of rows to
    train on. Raises BadHyperparameter for more than `MOST_STEPS` or `MOST_EVALUATIONS`.

    Source: ``auto`` is the word of OpenAI's fine-tuning jobs; the rules are ours.
    """
    found = dict(values)
    if found["batch_size"] == AUTO:
        found["batch_size"] = min(32, max(2, rows // 8), max(max_batch_size, 1))  # BatchNorm needs two
    found["batch_size"] = min(found["batch_size"], rows)
    found["accumulation"] = min(found["accumulation"], math.ceil(rows / found["batch_size"]))
    steps_per_epoch = batch_count(rows, min(found["batch_size"] * found["accumulation"], rows))
    if found["n_epochs"] == AUTO:
        found["n_epochs"] = min(50, max(3, math.ceil(300 / steps_per_epoch)))
    if found["learning_rate"] != AUTO:
        found["learning_rate_multiplier"] = found["learning_rate"] / USUAL_LEARNING_RATE
    elif found["learning_rate_multiplier"] != AUTO:
        found["learning_rate"] = USUAL_LEARNING_RATE * found["learning_rate_multiplier"]
    if (steps := steps_per_epoch * found["n_epochs"]) > MOST_STEPS:
        so_many = f"{found['n_epochs']} passes over {rows} rows in batches of {found['batch_size']}"
        fault = f"{so_many} are {steps} steps, expected at most {MOST_STEPS}"
        raise bad("n_epochs", f"{fault}; lower n_epochs, or raise batch_size or accumulation")
    if found["warmup_steps"] != AUTO:
        found["warmup_ratio"] = min(found["warmup_steps"] / steps, RANGES["warmup_ratio"].high)
    elif found["warmup_ratio"] == AUTO:  # 0.3 is torch's default
        found["warmup_ratio"] = 0.3 if found["schedule"] == ONE_CYCLE else min(0.05, 100 / steps)
    found["warmup_steps"] = round(found["warmup_ratio"] * steps)
    if found["growth_interval"] == AUTO:
        found["growth_interval"] = growth_interval(steps)
    if found["checkpoint_every"] == AUTO:
        found["checkpoint_every"] = math.ceil(steps / 10)
    if (least := math.ceil(steps / MOST_EVALUATIONS)) > found["checkpoint_every"]:
        so_many = f"expected at least {least} for {steps} steps ({MOST_EVALUATIONS} evaluations)"
        raise bad(
            "checkpoint_every", f"{so_many}, got {found['checkpoint_every']}; raise it, or lower n_epochs"
        )
    return found


def _optimizer(asked: Mapping[str, Any]) -> dict[str, Any] | None:
    """The optimizer's ``name`` and arguments. None means AdamW, or that of the model's own function."""
    if (value := asked.get(OPTIMIZER)) is None:
        return None
    try:
        return read_optimizer(value)
    except ValueError as error:
        raise bad(OPTIMIZER, str(error)) from None


def _factors(value: Any) -> dict[str, float]:
    """The factor of the learning rate by the pattern of parameter names."""
    found = {} if value is None else value
    if not isinstance(found, dict) or len(found) > MOST_FACTORS:
        raise bad(LEARNING_RATES, f'expected an object such as {{"backbone.*": 0.1}}, got {shown(value)}')
    for pattern, factor in found.items():
        read_patterns(LEARNING_RATES, pattern)
        number = isinstance(factor, int | float) and not isinstance(factor, bool)
        if not number or not 0 <= factor <= MOST_FACTOR:
            fault = f"{pattern!r}: expected a factor of the learning rate from 0 to {MOST_FACTOR:g}"
            raise bad(LEARNING_RATES, f"{fault}, got {shown(factor)}")
    return found


def _settle_level(values: dict[str, Any], asked: Mapping[str, Any]) -> None:
    """O0 is fp32, and O2 and O3 are half throughout: other precisions contradict them."""
    level, precision = values["opt_level"], values["precision"]
    if level == "O0":
        if asked.get("precision", "fp32") != "fp32":
            raise bad("precision", f"opt_level O0 is fp32; expected fp32 or nothing, got {shown(precision)}")
        values["precision"], values["opt_level"] = "fp32", "O1"
    elif level in HALF_LEVELS and precision == "fp32":
        raise bad(
            "precision", f"opt_level {level} trains a half model; expected fp16, bf16 or auto, got fp32"
        )


def _of_method(job: Mapping[str, Any]) -> Mapping[str, Any]:
    method = _table(job, "method")
    kind = method.get("type", "supervised")
    if kind != "supervised":
        fault = f"method: type: expected 'supervised', the only one offered here, got {shown(kind)}"
        raise BadHyperparameter(fault, "method")
    return _table(_table(method, "supervised"), "hyperparameters")


def _table(owner: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = owner.get(name)
    if value is not None and not isinstance(value, dict):
        raise BadHyperparameter(f"{name}: expected an object, got {shown(value)}", name)
    return {key: item for key, item in (value or {}).items() if item is not None}


def _value(name: str, value: Any) -> Any:
    allowed = RANGES[name]
    if value is None:
        return allowed.default
    if allowed.auto and value == AUTO:
        return value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not allowed.low <= value <= allowed.high or (allowed.whole and value != int(value)):
        raise bad(name, f"expected {allowed}, got {shown(value)}")
    return int(value) if allowed.whole else float(value)
