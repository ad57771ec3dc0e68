"""The state that a training can leave for the next one beside the model's weights: the nets that learnt beside the
model (a discriminator, a critic) and the states of the optimizers. The version stores this state; a job may ask for it.

Names of tensors: ``net:NET:TENSOR`` and ``optimizer:OPTIMIZER:CLASS:PARAMETER:KEY``.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from copy import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ....models.folder.loss_and_optimizer_names import OPTIMIZERS
from .loop.batch_loop import BatchLoop
from .loop.learner import Learner
from .loop.loop_state import Tensors, below, copied, optimizer_tensors
from .loop.setting_names import ALL, NONE
from .loop.step_loop import MODEL, StepLoop
from .loop.training_terms import Stopped, named_tensors


def state_for_the_next(loop: BatchLoop, kept: str) -> Tensors:
    """The tensors of that state, copied to the CPU. ``kept``: ``none``, ``nets``, or ``all`` (nets and optimizers)."""
    if kept == NONE:
        return {}
    found = {
        f"net:{name}:{tensor}": one
        for name, net in _beside(loop).items()
        for tensor, one in named_tensors(net).items()
    }
    for owner, learner in loop.learners.items() if kept == ALL else ():
        start, names = _start(owner, learner), _parameters(loop, learner)
        found |= {f"{start}{names[index]}:{key}": one for index, key, one in optimizer_tensors(learner)}
    return {name: copied(one) for name, one in found.items()}


def take_up(loop: BatchLoop, path: Path | None, taken: str) -> None:
    """Begin with the state in ``path`` that an earlier training left. Raises Stopped where there is none, or where it
    is that of other nets or optimizers, which the message names."""
    if taken == NONE:
        return
    if path is None:
        raise Stopped(
            "NO_TRAINING_STATE",
            "the version that is trained has no state of a training: make it by a job with keep_state = "
            f'"{taken}", or leave warm_start out',
        )
    tensors = load_file(path)
    for name, net in _beside(loop).items():
        _take_up_net(name, net, below(f"net:{name}:", tensors))
    for owner, learner in loop.learners.items() if taken == ALL else ():
        _take_up_optimizer(loop, owner, learner, tensors)


def _take_up_net(name: str, net: nn.Module, kept: Tensors) -> None:
    there = named_tensors(net)
    for tensor in sorted(there.keys() | kept.keys()):
        shapes = [list(one[tensor].shape) if tensor in one else "nothing" for one in (there, kept)]
        if shapes[0] != shapes[1]:
            raise _other(f"the net '{name}' has '{tensor}' {shapes[0]}, and what was kept is {shapes[1]}")
    with torch.no_grad():
        for tensor, one in there.items():
            one.copy_(kept[tensor])


def _take_up_optimizer(loop: BatchLoop, owner: str, learner: Learner, tensors: Tensors) -> None:
    names, state = _parameters(loop, learner), dict[str, Tensors]()
    for name, one in below(_start(owner, learner), tensors).items():
        parameter, _, key = name.rpartition(":")
        state.setdefault(parameter, {})[key] = one
    which = f"the optimizer '{owner}'" if owner else "the optimizer"
    if not state or not state.keys() <= set(names):
        kept = sorted({name.split(":")[2] for name in tensors if name.startswith(f"optimizer:{owner}:")})
        odd = f"the parameter '{min(state)}'" if state else f"the state of {', '.join(kept) or 'none'}"
        raise _other(
            f"{which} is {type(learner.optimizer).__name__} of {len(names)} parameters, and what was kept is {odd}"
        )
    wanted = dict(zip(names, _keys_of_each(learner.optimizer), strict=True))
    if odd := next((name for name, one in state.items() if wanted[name] not in (None, one.keys())), None):
        keys, found = (", ".join(sorted(one or ())) for one in (wanted[odd], state[odd]))
        raise _other(
            f"{which} keeps {keys or 'nothing'} of each parameter, and what was kept has {found}: one of its "
            "arguments (amsgrad, momentum, centered) is another"
        )
    there: dict[str, Any] = learner.optimizer.state_dict()
    there["state"] = {index: state[name] for index, name in enumerate(names) if name in state}
    learner.optimizer.load_state_dict(there)


def _keys_of_each(optimizer: torch.optim.Optimizer) -> Iterator[set[str] | None]:
    """The names of the tensors that the optimizer stores for each of its parameters, found by a step of a copy with one
    number; None where it is none of torch's known optimizers: it may store other tensors, or take no such step."""
    known = type(optimizer).__name__ in OPTIMIZERS and type(optimizer).__module__.startswith("torch.optim.")
    for group in optimizer.param_groups:
        keys = _keys(optimizer, group) if known and group["params"] else None
        yield from [keys] * len(group["params"])


def _keys(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> set[str]:
    number, same = nn.Parameter(group["params"][0].new_zeros(1)), copy(optimizer)
    number.grad = torch.ones_like(number)
    same.state, same.param_groups = defaultdict(dict), [{**group, "params": [number]}]
    same.step()
    return {key for key, value in same.state[number].items() if isinstance(value, Tensor)}


def _other(why: str) -> Stopped:
    return Stopped(
        "OTHER_TRAINING_STATE",
        f"{why}. Train with what was kept, or leave warm_start out (or take nets alone)",
    )


def _beside(loop: BatchLoop) -> Mapping[str, nn.Module]:
    """The nets that learn beside the model, by name."""
    if not isinstance(loop, StepLoop):
        return {}
    learning = {id(weight) for weight in loop.weights}
    return {
        name: net
        for name, net in loop.nets.items()
        if name != MODEL and any(id(one) in learning for one in net.parameters())
    }


def _start(owner: str, learner: Learner) -> str:
    return f"optimizer:{owner}:{type(learner.optimizer).__name__}:"


def _parameters(loop: BatchLoop, learner: Learner) -> list[str]:
    """The names of the learner's parameters, in the order in which its optimizer numbers them."""
    names = {id(one): name for name, one in loop.module.named_parameters()}
    return [names[id(one)] for group in learner.optimizer.param_groups for one in group["params"]]
