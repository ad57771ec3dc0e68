"""The training loop: `torch.amp.autocast` and `torch.amp.GradScaler`, hardened. Needs torch and nothing else.

`train` is the loop, `Loop` one whose state can be saved. What torch leaves open, and what closes it:

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

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from .batch_loop import BatchLoop
from .learner import learner_of
from .overflow_search import Rerun
from .passes import LossOf, PartsOf, Passes, Quarantine, restore, snapshot, whole
from .ranks import ALONE, Ranks
from .scaler_recorder import ScalerRecorder, overflow_of
from .setting_names import growth_interval
from .training_terms import DATA_FAULTS, GRADIENT_OVERFLOW, Settings, StepRecord, audit, named_tensors

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


class Loop(BatchLoop):
    """The loop of `train`: one loss, one optimizer, one scaler."""

    def __init__(
        self, module: nn.Module, loss_of: LossOf, rows: int, settings: Settings, device: str = "cpu",
        parts_of: PartsOf = whole, ranks: Ranks = ALONE,
    ) -> None:  # fmt: skip
        super().__init__(module, module, rows, settings, device, ranks)
        self.learner = learner_of(module, settings, self.steps)
        self.scaler = grad_scaler(self.kind, settings, self.steps)
        self.learners, self.scalers = {"": self.learner}, {"": self.scaler}
        self.passes = Passes(module, loss_of, parts_of, self.scaler, settings, self.kind, self.sound, ranks)
        self.passes.meanwhile = self.fetch_next
        self.quarantine = Quarantine(rows)
        self.diagnose(self.learner, self.passes)
        self.recorder: ScalerRecorder | None = None

    def record_overflows(self, copied: Callable[[nn.Module], nn.Module]) -> None:
        """From now on the record of a step that is skipped names where its numbers left the range of half.
        ``copied``: see `Rerun`."""
        rerun = Rerun(self.passes.forward_again, self.passes.backward_context, copied)
        self.recorder = ScalerRecorder(self.module, rerun=rerun)

    def state_of_rows(self) -> dict[str, Tensor]:
        return {"good": self.passes.good, "quarantined": self.quarantine.rows}

    def put_rows(self, tensors: Mapping[str, Tensor]) -> None:
        self.passes.good, self.quarantine.rows = tensors["good"], tensors["quarantined"]

    def step(self, epoch: int, batch: Tensor) -> StepRecord:
        passes, scaler, learner, norm = self.passes, self.scaler, self.learner, None
        rate, before = learner.rate, snapshot(self.module)
        learner.clear()
        batch, found = self.quarantine.kept(batch), ()
        passes.batch = batch
        passed = passes.run(batch)
        if passed.cause in DATA_FAULTS and self.settings.bad_rows == "quarantine":
            restore(before)
            found = self.quarantine.take(passes.culprits(batch))
            if found:
                learner.clear()
                passed = passes.run(batch := self.quarantine.kept(batch))
        cause, scale = passed.cause, passed.scale
        if cause is None:
            self.ranks.add_up(learner.weights)
            norm, cause = learner.take(scaler)
            if cause is None:
                if self.average is not None:
                    self.average.take()
                passes.good = batch[:GOOD_ROWS]
            update(scaler, self.settings.scale_floor, cause)
        overflow = overflow_of(self.recorder, cause, scale, batch)
        if cause is not None:
            restore(before)
        learner.patience.count(cause, fell(scaler, scale, cause))
        return StepRecord(
            self.done + 1,
            epoch,
            passed.loss,
            scale,
            norm,
            cause is not None,
            cause,
            rate,
            found,
            overflow=overflow,
        )


def grad_scaler(device: str, settings: Settings, steps: int) -> torch.amp.GradScaler:
    """Enabled for fp16 only; for bf16 and fp32 its methods pass everything through."""
    wanted = settings.is_fp16
    interval = settings.growth_interval or growth_interval(steps)
    scaler = torch.amp.GradScaler(
        device,
        float(settings.init_scale),
        settings.growth_factor,
        settings.backoff_factor,
        interval,
        enabled=wanted,
    )
    if scaler.is_enabled() != wanted:  # torch warns and switches itself off, and would train on unscaled
        raise RuntimeError(f"torch has no gradient scaler for '{device}' here: train on the CPU, or in bf16")
    return scaler


def update(scaler: torch.amp.GradScaler, floor: float, *causes: str | None) -> None:
    """Once after each step in which the scaler was asked whether gradients are finite; ``causes`` say whether they
    were. Only where they were not the scale falls, and is read: on a device the host would have to wait for it."""
    scaler.update()
    if GRADIENT_OVERFLOW in causes:
        hold_floor(scaler, floor)


def fell(scaler: torch.amp.GradScaler, before: float, *causes: str | None) -> bool:
    """True if the update after a step that had these causes made the scale smaller than before."""
    return GRADIENT_OVERFLOW in causes and scaler.get_scale() < before


def hold_floor(scaler: torch.amp.GradScaler, floor: float) -> None:
    """Never let the scale fall below ``floor``."""
    if scaler.is_enabled() and scaler.get_scale() < floor:
        scaler.update(float(floor))
