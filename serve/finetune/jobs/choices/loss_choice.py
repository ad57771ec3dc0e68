"""Chooses the loss that each output of a job minimises; checks that it, its weights and its targets fit the output."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from .....exporters.inputs.samples import TARGET
from .....models.errors import BadSamples
from .....models.folder.loss_and_optimizer_names import (
    CLASS_LOSSES,
    LOSSES,
    LOSSES_OF_KIND,
    NLL_OF_PROBABILITIES,
    OWN_LOSS,
    short_name,
)
from .....models.spec.spec import Dim, ModelSpec
from ...data.datasets import TrainingData, named_rows
from ...training.loop.setting_names import MASK
from .hyperparameter_table import bad, shown

BALANCED = "balanced"
LOSS, CLASS_WEIGHTS, LABEL_SMOOTHING, POS_WEIGHT = "loss", "class_weights", "label_smoothing", "pos_weight"
MOST_WEIGHTS, MOST_WEIGHT = 65536, 1e6
MOST_WEIGHTS_OF_FREE = 4096  # where the output's own size does not say how many there are
_TARGETS = {  # of these losses, the values that a target may have
    "bce_with_logits": (0.0, 1.0), "bce": (0.0, 1.0), "kl_div": (0.0, 1.0), "poisson_nll": (0.0, np.inf),
    "soft_margin": (-1.0, 1.0),
}  # fmt: skip


def read_loss(value: Any) -> str | dict[str, str] | None:
    """One loss for every output, or one by output; None: the model's, or the default of the output's kind."""
    if value is None:
        return None
    found = {"": value} if isinstance(value, str) else value
    if not isinstance(found, dict) or not found:
        raise bad(LOSS, f"expected a loss such as 'l1', or an object from output to loss, got {shown(value)}")
    for name in found.values():
        if not isinstance(name, str) or not (short_name(name) in LOSSES or OWN_LOSS.fullmatch(name)):
            raise bad(LOSS, f"expected one of {', '.join(LOSSES)}, got {shown(name)}")
    named = {output: short_name(name) for output, name in found.items()}
    return named[""] if isinstance(value, str) else named


def read_class_weights(value: Any) -> list[float] | str | None:
    """``balanced``, or a positive number for each class."""
    if value is None or value == BALANCED:
        return value
    if not isinstance(value, list) or len(value) < 2 or not _are_weights(value):
        raise bad(
            CLASS_WEIGHTS,
            f'expected "{BALANCED}", or a number above 0 and at most {MOST_WEIGHT:g} for each class, got '
            f"{shown(value)}",
        )
    return [float(one) for one in value]


def read_pos_weight(value: Any) -> float | list[float] | None:
    """A number above 0 for all values, or one for each."""
    numbers = value if isinstance(value, list) else [value]
    if value is None:
        return None
    if not _are_weights(numbers):
        raise bad(
            POS_WEIGHT,
            f"expected a number above 0 and at most {MOST_WEIGHT:g}, or one for each value, got {shown(value)}",
        )
    return value


def _are_weights(values: list[Any]) -> bool:
    return 0 < len(values) <= MOST_WEIGHTS and all(
        type(one) in (int, float) and 0 < one <= MOST_WEIGHT for one in values
    )


def losses_by_output(
    spec: ModelSpec, learnt: Mapping[str, str], declared: str | None, values: Mapping[str, Any]
) -> dict[str, str]:
    """``learnt``: the outputs with targets and their default losses; ``declared``: the loss that the model's own
    model.toml names. Raises BadHyperparameter."""
    asked = values.get(LOSS)
    if isinstance(asked, dict) and (unknown := sorted(asked.keys() - learnt.keys())):
        raise bad(
            LOSS, f"{unknown[0]!r} has no targets in the training file; those with targets: {sorted(learnt)}"
        )
    found = {
        output: (asked.get(output) if isinstance(asked, dict) else asked) or declared or default
        for output, default in learnt.items()
    }
    kinds = {tensor.name: tensor.kind for tensor in spec.outputs}
    for output, name in found.items():
        if ".py:" in name and name != declared:
            raise bad(
                LOSS,
                f"{name!r} is a function of the model folder that its model.toml does not name: write [training] "
                f"loss = {name!r} there and convert again",
            )
        if ".py:" not in name and name not in (fitting := LOSSES_OF_KIND[kinds[output]]):
            raise bad(
                LOSS,
                f"{name} does not fit output '{output}' of kind {kinds[output]}: expected one of {', '.join(fitting)}; "
                "the kind of an output is set in model.toml",
            )
    _check_class_settings(spec, found, values)
    return found


def check_targets(losses: Mapping[str, str], data: TrainingData) -> None:
    """Raises BadSamples naming the rows whose targets the loss of their output cannot have."""
    samples = data.samples
    for output, name in losses.items():
        if name in CLASS_LOSSES[1:] and samples.targets[output].dtype.kind == "f":
            raise BadSamples(
                f"tensor '{TARGET}{output}': soft labels are learnt by {CLASS_LOSSES[0]}, and the loss is {name}; "
                "choose that one, or give INT64 classes"
            )
        if name not in _TARGETS:
            continue
        low, high = _TARGETS[name]
        target = samples.targets[output].reshape(samples.count, -1)
        wrong = np.abs(target) != 1 if name == "soft_margin" else (target < low) | (target > high)
        wrong &= ~np.isnan(target)  # those are refused elsewhere, or not learnt
        if rows := np.flatnonzero(wrong.any(1)).tolist():
            wanted = "-1 or 1" if name == "soft_margin" else f"from {low:g} to {high:g}"
            raise BadSamples(
                f"tensor '{TARGET}{output}', {named_rows(data.numbers[rows])}: loss {name} expects values {wanted}; "
                "choose another loss, or mend the rows"
            )


def _check_class_settings(spec: ModelSpec, losses: Mapping[str, str], values: Mapping[str, Any]) -> None:
    if values.get(LABEL_SMOOTHING) and "cross_entropy" not in losses.values():
        raise bad(LABEL_SMOOTHING, f"is read by loss cross_entropy only, and the losses are {losses}")
    if values.get(POS_WEIGHT) is not None and "bce_with_logits" not in losses.values():
        raise bad(POS_WEIGHT, f"is read by loss bce_with_logits only, and the losses are {losses}")
    of_more = {*CLASS_LOSSES, NLL_OF_PROBABILITIES, "kl_div"}
    if values.get("missing_targets") == MASK and not set(losses.values()) - of_more:
        raise bad("missing_targets", f"{MASK} is for losses of single values, and the losses are {losses}")
    classed = [output for output, name in losses.items() if name in (*CLASS_LOSSES, NLL_OF_PROBABILITIES)]
    if values.get(CLASS_WEIGHTS) is not None and not classed:
        raise bad(CLASS_WEIGHTS, f"are read by losses of classes only, and the losses are {losses}")
    _check_length(spec, classed, CLASS_WEIGHTS, values, "class")
    weighted = [output for output, name in losses.items() if name == "bce_with_logits"]
    _check_length(spec, weighted, POS_WEIGHT, values, "value")


def _check_length(
    spec: ModelSpec, outputs: Collection[str], setting: str, values: Mapping[str, Any], what: str
) -> None:
    """``what``: one element of the output's last axis, as the message calls it."""
    weights = values.get(setting)
    if not isinstance(weights, list):
        return
    for tensor in spec.outputs:
        last = tensor.shape[-1] if tensor.shape else Dim()
        fits = len(weights) == last.minimum if last.fixed else len(weights) <= MOST_WEIGHTS_OF_FREE
        if tensor.name in outputs and not fits:
            expected = f"{last.minimum}" if last.fixed else f"at most {MOST_WEIGHTS_OF_FREE}"
            numbers = f"expected {expected} numbers, one for each {what} of '{tensor.name}'"
            raise bad(setting, f"{numbers}, got {len(weights)}")
