"""The loss on held-out rows, the best step by it, and when a training that gains nothing any more is ended early."""

import math
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from .loop.batch_loop import BatchLoop
from .loop.passes import autocast_of, restore, snapshot
from .loop.seeding import generators_untouched
from .task import Task
from .trainee import Trainee


def held_out_loss(loop: BatchLoop, trainee: Trainee, task: Task) -> float:
    """The mean loss of all rows of ``task``, in the training's precision."""
    return loss_of_rows(
        trainee,
        task,
        torch.arange(len(task.rows)),
        autocast_of(loop.settings, loop.kind, trainee.module),
    )


def loss_of_rows(
    trainee: Trainee, task: Task, batch: Tensor, autocast: AbstractContextManager[None]
) -> float:
    """The mean loss of some rows of ``task`` in evaluation mode. Weights, buffers and generators are as before."""
    before = snapshot(trainee.module)
    with generators_untouched(), trainee.evaluating(), torch.no_grad(), autocast, task.as_they_are():
        parts = task.parts(batch)
        read = torch.stack(
            [task.loss(part).double() for part in parts]
        ).tolist()  # a device is waited for one time
    losses = [loss * (part.numel() / len(batch)) for loss, part in zip(read, parts, strict=True)]
    restore(before)
    return math.fsum(losses) if all(map(math.isfinite, losses)) else math.nan


def seconds_of_a_row(loop: BatchLoop, trainee: Trainee, task: Task) -> float:
    """Seconds that one row takes in an evaluation: of the second of two over a few rows."""
    batch = torch.arange(min(len(task.rows), loop.settings.batch_size))
    times: list[float] = []
    for _ in range(2):
        began = time.perf_counter()
        loss_of_rows(trainee, task, batch, autocast_of(loop.settings, loop.kind, trainee.module))
        times.append(time.perf_counter() - began)
    return times[-1] / len(batch)


class BestStep:
    """The step with the smallest held-out loss so far, and its weights; ``since``: evaluations without a smaller one.

    ``patience``: after so many the training ends early; 0: it never does.
    """

    def __init__(self, patience: int) -> None:
        self.patience, self.step, self.loss, self.since = patience, 0, math.inf, 0
        self.weights: Mapping[str, Tensor] = {}

    def is_best(self, loss: float) -> bool:
        """Count one evaluation. A loss that is not finite is never the best."""
        better = loss < self.loss
        self.since = 0 if better else self.since + 1
        return better

    def take(self, step: int, loss: float, weights: Mapping[str, Tensor]) -> None:
        self.step, self.loss, self.weights = step, loss, weights

    @property
    def ends(self) -> bool:
        return 0 < self.patience <= self.since

    def numbers(self) -> dict[str, Any]:
        return {"step": self.step, "loss": self.loss if self.step else None, "since": self.since}

    def put_back(self, numbers: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        self.step, self.since, self.weights = numbers["step"], numbers["since"], weights
        self.loss = numbers["loss"] if self.step else math.inf
