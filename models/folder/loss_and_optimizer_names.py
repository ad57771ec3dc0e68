"""The losses and the optimizers that a training may have by name: those of torch, the optimizers with torch's own
arguments.

``nll_of_probabilities`` is ours: the logarithm of a probability with 1e-6 added, then torch's nll. The other losses are
torch.nn.functional's, without ``_loss``. The rate and the decay of weights are settings of a job, and no arguments
here. Needs nothing, not even torch.
"""

import re
from collections.abc import Mapping
from typing import Any

from ..nearest_name import nearest_name

DEFAULT = "AdamW"
_ADAM = ("betas", "eps", "amsgrad", "foreach", "fused")
OPTIMIZERS: Mapping[str, tuple[str, ...]] = {
    "AdamW": _ADAM,
    "Adam": _ADAM,
    "NAdam": ("betas", "eps", "momentum_decay", "decoupled_weight_decay", "foreach"),
    "RAdam": ("betas", "eps", "decoupled_weight_decay", "foreach"),
    "Adamax": ("betas", "eps", "foreach"),
    "Adagrad": ("lr_decay", "initial_accumulator_value", "eps", "foreach", "fused"),
    "Adadelta": ("rho", "eps", "foreach"),
    "RMSprop": ("alpha", "eps", "momentum", "centered", "foreach"),
    "SGD": ("momentum", "dampening", "nesterov", "foreach", "fused"),
}
SWITCHES = frozenset(("amsgrad", "foreach", "fused", "decoupled_weight_decay", "centered", "nesterov"))
_BELOW_ONE = frozenset(("rho", "alpha", "momentum"))
# The names as other libraries write them: https://huggingface.co/docs/transformers (optim), Keras (lower case).
ALIASES: Mapping[str, str] = {
    "adamw_torch": "AdamW", "adamw_torch_fused": "AdamW", "adamw_hf": "AdamW", "adam_w": "AdamW",
}  # fmt: skip
CLASS_LOSSES = ("cross_entropy", "nll", "multi_margin")
VALUE_LOSSES = (
    "mse", "l1", "smooth_l1", "huber", "bce_with_logits", "bce", "kl_div", "poisson_nll", "soft_margin",
)  # fmt: skip
IGNORED = -100  # torch's own ignore_index: the class of a target that is not learnt
NLL_OF_PROBABILITIES = "nll_of_probabilities"
# The losses of each kind of output that can be learnt; the first is the default.
LOSSES_OF_KIND: Mapping[str, tuple[str, ...]] = {
    "logits": CLASS_LOSSES,
    "probabilities": (NLL_OF_PROBABILITIES,),
    **dict.fromkeys(("tensor", "score", "embedding", "image"), VALUE_LOSSES),
}
LOSSES = (*CLASS_LOSSES, NLL_OF_PROBABILITIES, *VALUE_LOSSES)
OWN_LOSS = re.compile(r"[^/\\:]+\.py:[A-Za-z_]\w*")  # a function of a file in the model folder
_LONG = {
    "binary_cross_entropy_with_logits": "bce_with_logits", "binary_cross_entropy": "bce",
    "CrossEntropyLoss": "cross_entropy", "NLLLoss": "nll", "MultiMarginLoss": "multi_margin", "MSELoss": "mse",
    "L1Loss": "l1", "SmoothL1Loss": "smooth_l1", "HuberLoss": "huber", "BCEWithLogitsLoss": "bce_with_logits",
    "BCELoss": "bce", "KLDivLoss": "kl_div", "PoissonNLLLoss": "poisson_nll", "SoftMarginLoss": "soft_margin",
}  # fmt: skip


def read_optimizer(value: Any) -> dict[str, Any]:
    """``{"name": …, ARGUMENT: …}`` of a name or of such a table, with torch's spelling of the name. Raises ValueError
    with what was expected, what came and what to do."""
    found = {"name": value} if isinstance(value, str) else value
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        raise ValueError(
            f"expected a name such as 'SGD', or {{'name': 'SGD', 'momentum': 0.9}}, got {value!r:.80}"
        )
    spelt = {**{name.lower(): name for name in OPTIMIZERS}, **ALIASES}
    if (name := spelt.get(found["name"].lower())) is None:
        raise ValueError(
            f"expected one of {', '.join(OPTIMIZERS)}, got {found['name']!r:.80}; another one is made by a function of "
            "the model folder that model.toml names ([training] optimizer = 'optim.py:make')"
        )
    for argument, given in found.items():
        if argument != "name":
            _check(name, argument, given)
    if found.get("nesterov") and (not found.get("momentum") or found.get("dampening")):
        raise ValueError("nesterov needs a momentum above 0 and no dampening")
    if found.get("fused") and found.get("foreach"):
        raise ValueError("fused and foreach are two ways of one step: expected one of them to be true")
    return {**found, "name": name}


def _check(name: str, argument: str, given: Any) -> None:
    if argument not in (known := OPTIMIZERS[name]):
        near = nearest_name(argument, known)
        raise ValueError(
            f"{name} has no argument {argument!r}; the nearest of {', '.join(known)} is '{near}'. weight_decay and "
            "learning_rate are settings of their own"
        )
    if argument in SWITCHES:
        expected, fits = "true or false", isinstance(given, bool)
    elif argument == "betas":
        pair = isinstance(given, list | tuple) and len(given) == 2
        expected, fits = (
            "two numbers from 0 to below 1",
            pair and all(_number(one) and one < 1 for one in given),
        )
    elif argument in _BELOW_ONE:
        expected, fits = "a number from 0 to 1", _number(given) and given <= 1
    else:
        expected, fits = "a number from 0 on", _number(given)
    if not fits:
        raise ValueError(f"{argument}: expected {expected}, got {given!r:.80}")


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


def short_name(name: str) -> str:
    """torch's own name of a loss, function or class, as it is written here: ``l1_loss`` and ``L1Loss`` are ``l1``."""
    return _LONG.get(name, name.removesuffix("_loss"))
