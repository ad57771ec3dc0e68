"""A job trains all parameters of a model, those that fit patterns, the head, or adapters (LoRA)."""

import difflib
import importlib.util
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from safetensors import safe_open

from .....models.store.store import Version
from .hyperparameter_table import HALF_LEVELS, HEAD, LORA, bad, shown

TRAINABLE, LORA_TARGETS = "trainable", "lora_targets"
MOST_PATTERNS, LONGEST_PATTERN = 64, 256


def read_trainable(value: Any) -> str | list[str] | None:
    """``head``, ``lora``, or patterns of parameters' names; None: all of them learn."""
    return value if value in (HEAD, LORA) else read_patterns(TRAINABLE, value)


def read_patterns(name: str, value: Any) -> list[str] | None:
    if value is None:
        return None
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not 1 <= len(found) <= MOST_PATTERNS:
        raise bad(name, f'expected one to {MOST_PATTERNS} patterns such as "head.*", got {shown(value)}')
    for pattern in found:
        if not isinstance(pattern, str) or not 1 <= len(pattern) <= LONGEST_PATTERN:
            raise bad(name, f"expected patterns of 1 to {LONGEST_PATTERN} characters, got {shown(pattern)}")
    return found


def check_patterns(patterns: Collection[str], weights: Iterable[str], setting: str = TRAINABLE) -> None:
    """Raises BadHyperparameter naming the pattern that fits no weight of the model."""
    names = sorted(weights)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = ", ".join(difflib.get_close_matches(pattern, names, n=5, cutoff=0.0))
            raise bad(
                setting, f"{pattern!r} fits no weight of the model; some of its {len(names)} are {near}"
            )


def trainable_of(parent: Version, values: Mapping[str, Any], learnt: Collection[str]) -> dict[str, Any]:
    """``trainable`` and ``lora`` of the trainer's request, for the outputs that are learnt.

    Raises BadHyperparameter where the model has no such parameters, or no modules that could have adapters.
    """
    asked = values.get(TRAINABLE)
    if (level := values.get("opt_level")) in HALF_LEVELS:
        _check_modules(parent, "opt_level", str(level))
    if values.get("learning_rates"):
        with safe_open(parent.file("weights.safetensors"), "numpy") as weights:
            check_patterns(values["learning_rates"], weights.keys(), "learning_rates")
    if asked == LORA:
        _check_modules(parent, TRAINABLE, LORA)
        if importlib.util.find_spec("peft") is None:
            raise bad(TRAINABLE, "lora needs the library peft at the server: pip install 'halfeven[lora]'")
        names = {name: f"lora_{name}" for name in ("rank", "alpha", "dropout", "targets")}
        return {"trainable": None, "lora": {name: values[setting] for name, setting in names.items()}}
    if asked == HEAD:
        asked = _head(parent, learnt)
    elif asked is not None:
        with safe_open(parent.file("weights.safetensors"), "numpy") as weights:
            check_patterns(asked, weights.keys())
    return {"trainable": asked, "lora": None}


def _head(parent: Version, learnt: Collection[str]) -> list[str]:
    # This brings torch, which other checks of a job do not need.
    from .....exporters.torch.last_layers import head_of
    from .....models.engines.torch_engine import original_program

    positions = [at for at, tensor in enumerate(parent.spec().outputs) if tensor.name in learnt]
    if not (found := head_of(original_program(parent), positions)):
        raise bad(TRAINABLE, f"{parent} has no parameters before its outputs; give patterns of names instead")
    return found


def _check_modules(parent: Version, name: str, word: str) -> None:
    source = (parent.manifest.get("source") or {}).get("source", "")
    if source.endswith(".pt2"):
        raise bad(
            name,
            f"{word} needs the layers of the model's code, and {parent} came as a captured program ({source}), which "
            f"has none; train without it (trainable = {HEAD} or patterns), or convert a folder with model.py:build",
        )
