"""The training loop: `torch.amp.autocast` and `torch.amp.GradScaler`, hardened. Needs torch and nothing else.

`train` is the loop, `Loop` one whose state can be saved; each precaution in it is a small function below. What torch
leaves open, and what closes it:

- the scaler has no floor: from a scale of 2⁻¹²⁸ on, 1/scale is infinite, and the first clean batch after that
  writes NaN into the weights: `hold_floor`, and `is_finite` on what the optimizer would take;
- a skipped step leaves BatchNorm's running statistics poisoned: `restore`;
- torch does not tell whether a step was taken: `StepRecord.cause`, decided here;
- a scale cannot cure data: a loss that is not finite leaves it as it is, and too many of those end the job;
- a row of 1e30 gives BatchNorm an infinite running variance with a finite loss and finite gradients: such a step is
  skipped, or taken without that row (`Passes.culprits`).

A batch larger than the model takes is passed in parts, each with its own backward pass: its graph is free before the
next part begins.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from .averaging import Average
from .half_model import norms_of
from .passes import LossOf, PartsOf, Passes, Quarantine, is_finite, restore, snapshot, whole
from .patience import Patience, audit, finite_names, named_tensors
from .schedules import scheduler_of
from .training_terms import DATA_FAULTS, GRADIENT_OVERFLOW, Settings, StepRecord, Stopped

GOOD_ROWS = 8  # rows of the last step that was taken, that suspects are asked with


def train(
    module: nn.Module, loss_of: LossOf, rows: int, settings: Settings, device: str = "cpu", parts_of: PartsOf = whole
) -> Iterator[StepRecord]:  # fmt: skip
    """Train ``module`` in place; ``loss_of(int64 row numbers)`` is the mean loss of those rows, a scalar.

    ``parts_of`` divides a batch into what one pass takes. Yields one record per step and raises Stopped:
    SCALE_COLLAPSE, DIVERGED, BAD_DATA, NONFINITE_WEIGHTS, TOO_MANY_QUARANTINED.
    """
    loop = Loop(module, loss_of, rows, settings, device, parts_of)
    yield from loop.run()
    loop.finish()
    audit(named_tensors(module), loop.sound)


class Loop:
    """The loop of `train`, with all that decides its next step: `loop_state.py` saves that after any step and puts it
    into another loop over the same rows. ``done``: the steps that were made."""

    def __init__(
        self, module: nn.Module, loss_of: LossOf, rows: int, settings: Settings, device: str = "cpu",
        parts_of: PartsOf = whole,
    ) -> None:  # fmt: skip
        torch.manual_seed(settings.seed)
        self.module, self.rows, self.settings, self.done = module, rows, settings, 0
        self.steps = steps = total_steps(rows, settings)
        kind = torch.device(device).type
        self.weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
        groups = parameter_groups(module, settings.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, settings.learning_rate)
        self.scheduler = scheduler_of(self.optimizer, settings, steps)
        self.scaler = grad_scaler(kind, settings, steps)
        self.sound, self.patience = finite_names(named_tensors(module)), Patience(settings)
        self.average = Average(module, settings.ema_decay, self.sound) if settings.ema_decay else None
        self.passes = Passes(module, loss_of, parts_of, self.scaler, settings, kind, self.sound)
        self.quarantine = Quarantine(rows)

    def run(self) -> Iterator[StepRecord]:
        """The steps that are left. The state may be saved whenever a record was given."""
        for epoch, batch in islice(batches(self.rows, self.settings), self.done, None):
            self.patience.check(self.done)
            record = self._step(epoch, batch)
            self.done += 1
            self.patience.count(record.cause, scale_fell=self.scaler.get_scale() < record.scale)
            yield record

    def published(self) -> AbstractContextManager[None]:
        """Inside, the module has the weights that would be published now: its own, or their average."""
        return nullcontext() if self.average is None else self.average.in_place()

    def finish(self) -> None:
        """Raises Stopped where no step was taken, or where the last ones were all skipped."""
        self.patience.check(self.done)
        self.patience.at_the_end()

    def _step(self, epoch: int, batch: Tensor) -> StepRecord:
        passes, scaler, norm = self.passes, self.scaler, None
        rate, scale = float(self.scheduler.get_last_lr()[0]), scaler.get_scale()
        before = snapshot(self.module)
        self.optimizer.zero_grad(set_to_none=True)  # after a skipped step too: its NaN must not stay
        batch, found = self.quarantine.kept(batch), ()
        loss, cause = passes.run(batch)
        if cause in DATA_FAULTS and self.settings.bad_rows == "quarantine":
            restore(before)
            found = self.quarantine.take(passes.culprits(batch))
            if found:
                self.optimizer.zero_grad(set_to_none=True)
                loss, cause = passes.run(batch := self.quarantine.kept(batch))
        if cause is None:
            scaler.unscale_(self.optimizer)
            norm = gradient_norm(self.weights)
            cause = None if is_finite(norm) else GRADIENT_OVERFLOW
            if cause is None:
                clip_grads_with_norm_(self.weights, self.settings.clip_norm, norm)
                scaler.step(self.optimizer)
                self.scheduler.step()
                if self.average is not None:
                    self.average.take()
                passes.good = batch[:GOOD_ROWS]
            scaler.update()
            hold_floor(scaler, self.settings.scale_floor)
        if cause is not None:
            restore(before)
        numbers = (loss.item(), scale, None if norm is None else norm.item())
        return StepRecord(self.done + 1, epoch, *numbers, cause is not None, cause, rate, found)


def parameter_groups(module: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Weight decay for matrices and kernels; none for biases and the weights of norms, which have no size to shrink."""
    plain = {id(parameter) for part in norms_of(module) for parameter in part.parameters(recurse=False)}
    named = [(name, one) for name, one in module.named_parameters() if one.requires_grad]
    spared = [one for name, one in named if one.ndim < 2 or id(one) in plain or name.endswith("bias")]
    ids = {id(one) for one in spared}
    return [
        {"params": [one for _, one in named if id(one) not in ids], "weight_decay": decay},
        {"params": spared, "weight_decay": 0.0},
    ]


def grad_scaler(device: str, settings: Settings, steps: int) -> torch.amp.GradScaler:
    """Enabled for fp16 only; for bf16 and fp32 its methods pass everything through."""
    wanted = settings.precision == "fp16"
    interval = settings.growth_interval or growth_interval(steps)
    scaler = torch.amp.GradScaler(
        device, init_scale=float(settings.init_scale), growth_interval=interval, enabled=wanted
    )
    if scaler.is_enabled() != wanted:  # torch warns and switches itself off, and would train on unscaled
        raise RuntimeError(f"torch has no gradient scaler for '{device}' here: train on the CPU, or in bf16")
    return scaler


def growth_interval(steps: int) -> int:
    """Clean steps before the scale doubles: torch's 2000 would never come in a short job."""
    return min(max(steps // 20, 50), 2000)


def batches(rows: int, settings: Settings) -> Iterator[tuple[int, Tensor]]:
    """(epoch, row numbers); the order is a function of (seed, epoch) alone."""
    for epoch in range(settings.n_epochs):
        generator = torch.Generator().manual_seed((settings.seed * 1_000_003 + epoch) % 2**63)
        for batch in evenly(torch.randperm(rows, generator=generator), settings.batch_size):
            yield epoch, batch


def total_steps(rows: int, settings: Settings) -> int:
    return settings.n_epochs * len(evenly(torch.arange(rows), settings.batch_size))


def evenly(rows: Tensor, size: int) -> Sequence[Tensor]:
    """Batches of at most ``size`` whose lengths differ by one at most, so that no row is dropped or weighs more.

    A single row is never left alone (BatchNorm has no variance of one row, and refuses) where ``size`` is not 1:
    for size 2 and an odd number of rows, one batch has 3.
    """
    count = -(-len(rows) // size)
    return rows.tensor_split(max(1, min(count, len(rows) // 2)) if size > 1 else count)


def gradient_norm(weights: Sequence[Tensor]) -> Tensor:
    """The global 2-norm of the gradients as they are now."""
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    if not gradients:
        raise Stopped(
            "USER_CODE",
            "no parameter received a gradient: the loss does not depend on them. Does forward run under no_grad, "
            "or detach what it computes?",
        )
    return get_total_norm(gradients)


def hold_floor(scaler: torch.amp.GradScaler, floor: float) -> None:
    """Never let the scale fall below ``floor``."""
    if scaler.is_enabled() and scaler.get_scale() < floor:
        scaler.update(float(floor))
