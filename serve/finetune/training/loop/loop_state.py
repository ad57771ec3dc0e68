"""All that decides the next step of a training, as tensors and JSON, and back: weights and buffers, their average,
optimizers, loss scalers, schedules, the place among the batches, and the generators of torch, numpy and Python. Needs
torch and numpy.

What the operator's code keeps in plain Python attributes is not among it.
"""

import random
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .batch_loop import BatchLoop
from .learner import Learner
from .seeding import numpy_state, set_generators, torch_generators
from .training_terms import named_tensors

Tensors = dict[str, Tensor]
MODULE, OPTIMIZER, GENERATOR, AVERAGE = "module:", "optimizer:", "generator:", "average:"
LEARNER = "learner:"  # tensors in the groups of an optimizer, in lists that it keeps and in its schedule
TENSOR, ON_CPU = "tensor", "on_cpu"  # in the place of such a tensor


def tensors_of(loop: BatchLoop) -> Tensors:
    """The tensors of the state of ``loop``, by name: copies on the CPU."""
    found = {MODULE + name: tensor for name, tensor in named_tensors(loop.module).items()}
    for owner, learner in loop.learners.items():
        found |= {f"{OPTIMIZER}{owner}:{index}:{key}": one for index, key, one in optimizer_tensors(learner)}
        _apart(_values_of_learner(learner), LEARNER + owner, found)
    found |= {GENERATOR + name: state for name, state in torch_generators().items()}
    if loop.average is not None:
        found |= {AVERAGE + name: tensor for name, tensor in loop.average.tensors.items()}
    found |= loop.state_of_rows()
    return {name: copied(tensor) for name, tensor in found.items()}


def optimizer_tensors(learner: Learner) -> Iterator[tuple[int, str, Tensor]]:
    """The tensors that an optimizer stores: each with its parameter's number and its key."""
    for index, state in learner.optimizer.state_dict()["state"].items():
        yield from ((index, key, one) for key, one in state.items() if isinstance(one, Tensor))


def numbers_of(loop: BatchLoop) -> dict[str, Any]:
    """The state of ``loop`` that is not a tensor, in a form that JSON can hold, unless the operator's optimizer keeps
    something else; a float loses no bit there, and may be infinite."""
    return {
        "done": loop.done,
        "learners": {
            name: _apart(_values_of_learner(learner), LEARNER + name, {})
            for name, learner in loop.learners.items()
        },
        "scalers": {name: scaler.state_dict() for name, scaler in loop.scalers.items()},
        "averaged": 0 if loop.average is None else loop.average.taken,
        "python": random.getstate(),
        "numpy": numpy_state(),
    }


def put_back(loop: BatchLoop, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
    """Make ``loop`` the one that `tensors_of` and `numbers_of` described; it is new, and over the same rows.

    Raises KeyError or ValueError where they do not fit: another module, or other settings.
    """
    put_into(loop.module, below(MODULE, tensors))
    for name, learner in loop.learners.items():
        values = _together(numbers["learners"][name], tensors, next(loop.module.parameters()).device)
        _put_learner_back(learner, below(f"{OPTIMIZER}{name}:", tensors), values)
    for name, scaler in loop.scalers.items():
        if state := numbers["scalers"][name]:
            scaler.load_state_dict(state)
    if loop.average is not None:
        device = next(iter(loop.module.parameters())).device
        loop.average.taken = numbers["averaged"]
        loop.average.tensors = {name: one.to(device) for name, one in below(AVERAGE, tensors).items()}
    loop.put_rows(tensors)
    if type(done := numbers["done"]) is not int or not 0 <= done <= loop.steps:
        raise ValueError(f"{done!r} steps of {loop.steps} are done")
    loop.done = done
    set_generators(below(GENERATOR, tensors), numbers["python"], numbers["numpy"])


def _values_of_learner(learner: Learner) -> dict[str, Any]:
    state, patience = learner.optimizer.state_dict(), learner.patience
    groups = state["param_groups"]
    numbers = {
        index: {key: value for key, value in of_one.items() if not isinstance(value, Tensor)}
        for index, of_one in state["state"].items()
    }
    return {
        "state": {str(index): found for index, found in numbers.items() if found},
        "groups": [{key: value for key, value in group.items() if key != "params"} for group in groups],
        "scheduler": learner.scheduler.state_dict(),
        "patience": [patience.taken, patience.in_a_row, patience.cause],
    }


def _apart(value: Any, place: str, tensors: Tensors) -> Any:
    """``value`` with the name of each tensor in its place; the tensors join ``tensors`` by that name."""
    if isinstance(value, Tensor):
        tensors[place] = value
        return {TENSOR: place, ON_CPU: value.device.type == "cpu"}
    if isinstance(value, Mapping):
        return {key: _apart(one, f"{place}:{key}", tensors) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_apart(one, f"{place}:{index}", tensors) for index, one in enumerate(value)]
    return value


def _together(value: Any, tensors: Mapping[str, Tensor], device: torch.device) -> Any:
    """``value`` with its tensors again, those that were not on the CPU on ``device``."""
    if isinstance(value, dict):
        if value.keys() == {TENSOR, ON_CPU}:
            one = tensors[value[TENSOR]].clone()
            return one if value[ON_CPU] else one.to(device)
        return {key: _together(one, tensors, device) for key, one in value.items()}
    if isinstance(value, list):
        return [_together(one, tensors, device) for one in value]
    return value


def _put_learner_back(learner: Learner, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
    state: dict[int, dict[str, Any]] = {int(index): dict(found) for index, found in numbers["state"].items()}
    for name, tensor in tensors.items():
        index, _, key = name.partition(":")
        state.setdefault(int(index), {})[key] = tensor
    groups = learner.optimizer.state_dict()["param_groups"]
    for group, kept in zip(groups, numbers["groups"], strict=True):
        pairs = {key: tuple(value) for key, value in kept.items() if isinstance(group.get(key), tuple)}
        # Fused or not, as this device has it.
        group.update(kept, **pairs, **{"fused": group["fused"]} if "fused" in group else {})
    learner.optimizer.load_state_dict({"state": state, "param_groups": groups})
    learner.scheduler.load_state_dict(dict(numbers["scheduler"]))
    patience = learner.patience
    patience.taken, patience.in_a_row, patience.cause = numbers["patience"]


def copied(tensor: Tensor) -> Tensor:
    """A copy on the CPU that shares memory with nothing, its elements in C order."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def put_into(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give every parameter and buffer the values of that name. Raises ValueError where other names are there."""
    there = named_tensors(module)
    if there.keys() != tensors.keys():
        raise ValueError(f"the module has other tensors: {sorted(there.keys() ^ tensors.keys())[:5]}")
    with torch.no_grad():
        for name, old in there.items():
            if old.shape == tensors[name].shape and old.dtype == tensors[name].dtype:
                old.copy_(tensors[name])
            else:  # a buffer that forward replaces
                owner, _, last = name.rpartition(".")
                module.get_submodule(owner)._buffers[last] = tensors[name].to(old.device)


def below(prefix: str, tensors: Mapping[str, Tensor]) -> Tensors:
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
