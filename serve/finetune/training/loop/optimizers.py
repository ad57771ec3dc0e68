"""The optimizer of a training: one of torch's by its name, or what a function of the operator's folder makes; and the
groups of its parameters, by their decay and their rate. Needs torch alone."""

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .....models.folder.optimizer_names import OPTIMIZERS
from .norm_look import norms_of
from .training_terms import Settings, Stopped

_POSITIONS = re.compile(r"(^|[._])(pos|wpe)($|[._]|ition|_?emb|_?enc)", re.IGNORECASE)
Group = dict[str, Any]


def optimizer_of(module: nn.Module, settings: Settings) -> Optimizer:
    """On CUDA in one kernel where torch has it, which asks the scaler's flag there: otherwise the host would have to
    wait for it. Raises Stopped."""
    groups = parameter_groups(module, settings.weight_decay, settings.learning_rates)
    for group in groups:
        group["lr"] = settings.learning_rate * group.pop("factor", 1.0)
    if settings.make_optimizer is not None:
        return _own(settings.make_optimizer, groups)
    arguments, known = dict(settings.optimizer_args), OPTIMIZERS[settings.optimizer]
    if "betas" in known:
        arguments["betas"] = tuple(arguments.get("betas", settings.betas))
    there = [one for group in groups for one in group["params"]]
    if "fused" in known and not arguments.get("foreach") and there and all(one.is_cuda for one in there):
        arguments.setdefault("fused", True)
    return getattr(torch.optim, settings.optimizer)(groups, lr=settings.learning_rate, **arguments)


def parameter_groups(
    module: nn.Module, decay: float, factors: Mapping[str, float] | None = None
) -> list[Group]:
    """The parameters that learn, with ``weight_decay`` and without, and where ``factors`` (of the rate, by pattern; the
    first that fits counts) name some, those in groups of their own. Raises Stopped where a pattern fits none.

    Decay is for the matrices and kernels of products. None have biases, norms, scales, and what is added to
    activations: a parameter of the model's own code whose first axis is 1 is broadcast over the rows, and a table of
    positions is known by its name.
    """
    spared = {id(one) for part in norms_of(module) for one in part.parameters(recurse=False)}
    named = [(name, one) for name, one in module.named_parameters() if one.requires_grad]
    spared |= {
        id(one) for name, one in named if one.ndim < 2 or name.endswith("bias") or _POSITIONS.search(name)
    }
    for owner in module.modules():
        of_torch = type(owner).__module__.startswith("torch.")
        for name, one in owner.named_parameters(recurse=False):
            if one.ndim >= 2 and one.shape[0] == 1 and not (of_torch and "weight" in name):
                spared.add(id(one))
    left, groups = dict(named), list[Group]()
    for pattern, factor in (factors or {}).items():
        fitting = [name for name in left if fnmatchcase(name, pattern)]
        if not fitting:
            raise Stopped(
                "NO_SUCH_PARAMETER",
                f"learning_rates: {pattern!r} fits no parameter that learns and has no rate yet; expected patterns of "
                f"names such as {list(left)[:5]}",
            )
        groups += [
            {**one, "factor": factor}
            for one in _by_decay([left.pop(name) for name in fitting], spared, decay)
        ]
    return [*_by_decay(list(left.values()), spared, decay), *groups]


def _by_decay(parameters: list[nn.Parameter], spared: set[int], decay: float) -> list[Group]:
    return [
        {"params": [one for one in parameters if id(one) not in spared], "weight_decay": decay},
        {"params": [one for one in parameters if id(one) in spared], "weight_decay": 0.0},
    ]


def _own(make: Any, groups: list[Group]) -> Optimizer:
    found = make(groups)
    if not isinstance(found, Optimizer):
        raise Stopped(
            "USER_CODE",
            "[training] optimizer: expected a function that takes groups of parameters (params, lr, weight_decay) and "
            f"gives a torch.optim.Optimizer, got {type(found).__name__}",
        )
    return found
