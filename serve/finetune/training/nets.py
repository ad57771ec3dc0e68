"""The nets beside the model that a training with declared steps needs (a discriminator, a frozen feature net), built
by the operator's code, and the losses that are given all of them.

They are in the checkpoints of the job and in no version.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ....models.capture import sources
from .loop.amp import Loop
from .loop.batch_loop import BatchLoop
from .loop.losses import one_number, own_function
from .loop.passes import LossOf, Quarantine
from .loop.ranks import ALONE, Ranks
from .loop.step_loop import MODEL, StepLoop
from .loop.training_terms import Settings, Stopped
from .task import Task
from .trainee import Trainee, learn

Request = Mapping[str, Any]


def loop_of(
    request: Request, trainee: Trainee, task: Task, settings: Settings, ranks: Ranks = ALONE,
    rows: int | None = None,
) -> BatchLoop:  # fmt: skip
    """The loop of a job: one loss and one optimizer, or the steps that model.toml declares. ``rows``: only the first
    ones of the task."""
    count = len(task.rows) if rows is None else min(rows, len(task.rows))
    loop = _loop_of(request, trainee, task, settings, ranks, count)
    loop.on_epoch, loop.numbers = task.begin, task.numbers
    if trainee.half is not None:
        loop.trial = trainee.half.as_if
    if loop.kind != "cpu":
        loop.on_next = lambda batch: task.fetch(ranks.share(task.parts(batch)))
    return loop


def _loop_of(
    request: Request, trainee: Trainee, task: Task, settings: Settings, ranks: Ranks, count: int
) -> BatchLoop:
    device, declared = request["device"], request.get("declared_steps")
    if declared is None:
        loop = Loop(trainee.module, task.loss, count, settings, device, task.parts, ranks)
        left_out = len(request.get("left_out", ()))
        loop.quarantine = Quarantine(len(task.inputs[0]) + left_out, left_out)
        return loop
    nets = {MODEL: trainee.module, **nets_of(request)}
    called = Called({**nets, MODEL: answering(trainee)})
    losses = {
        step["optimizer"]: step_loss(step, called, task, request["source"]) for step in declared["steps"]
    }
    return StepLoop(nets, declared, losses, count, settings, device, task.parts, ranks)


def nets_of(request: Request) -> dict[str, nn.Module]:
    """The nets of the operator's folder: in training mode where an optimizer has them, else frozen and in evaluation
    mode."""
    declared, source = request["declared_steps"], request["source"]
    learning = {net for one in declared["optimizers"].values() for net in one["nets"]}
    found: dict[str, nn.Module] = {}
    for name, one in declared["nets"].items():
        net = sources.build(torch, {**source, "source": one["build"]}, Path(source["folder"]))
        if weights := one.get("weights"):
            sources.load_weights(torch, net, str(Path(source["folder"]) / weights))
        sources.widen(torch, net)
        found[name] = net.to(request["device"])
        if name in learning:
            learn(found[name].train(), net.frozen_when_built)
    return found


class Called(dict[str, Callable[..., Any]]):
    """The nets as a loss calls them. Raises Stopped where it asks for one that model.toml does not declare."""

    def __missing__(self, name: object) -> Callable[..., Any]:
        raise Stopped(
            "NO_SUCH_NET",
            f"a loss asks for the net {name!r}, and there are {sorted(self)}. Declare it in model.toml "
            f'([training.nets.{name}] with build = "FILE.py:FUNCTION") and convert again, or mend its name in the loss',
        )


def answering(trainee: Trainee) -> Callable[..., Any]:
    """The model as a loss calls it: inputs and outputs in the order of model.toml, a single output by itself."""

    def answer(*inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        outputs = trainee.forward(*inputs)
        return outputs[0] if len(outputs) == 1 else outputs

    return answer


def step_loss(step: Mapping[str, Any], nets: Called, task: Task, source: Mapping[str, Any]) -> LossOf:
    """``FILE.py:FUNCTION``, called with the nets and the inputs and targets of some rows, all by name."""
    name = step["loss"]
    called, learning = own_function(name, source), f"the nets of the optimizer '{step['optimizer']}'"

    def loss(batch: Tensor) -> Tensor:
        return one_number(name, called(nets, *task.tensors(batch)), learning)

    return loss
