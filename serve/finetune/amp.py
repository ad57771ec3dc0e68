"""The training loop: `torch.amp.autocast` and `torch.amp.GradScaler`, hardened. Needs torch and nothing else.

`train` is the loop; each precaution in it is a small function below. What torch leaves open, and what closes it:

- the scaler has no floor: from a scale of 2⁻¹²⁸ on, 1/scale is infinite, and the first clean batch after that
  writes NaN into the weights: `hold_floor`, and `is_finite` on what the optimizer would take;
- a skipped step leaves BatchNorm's running statistics poisoned: `restore`;
- torch does not tell whether a step was taken: `StepRecord.cause`, decided here;
- a scale cannot cure data: a loss that is not finite leaves it as it is, and too many of those end the job.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.lr_scheduler import LambdaLR

GRADIENT_OVERFLOW = "gradient overflow"
NON_FINITE_LOSS = "non-finite loss"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class Stopped(Exception):
    """The loop ended early; ``code`` is one upper-case word, the message says why and what to do."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a job. ``growth_interval`` None: by the length of the job (see `growth_interval`)."""

    n_epochs: int = 1
    batch_size: int = 32
    learning_rate: float = 1e-3
    weight_decay: float = 1e-2
    clip_norm: float = 1.0
    schedule: str = "cosine"  # or constant; both after a short warm-up
    precision: str = "fp16"  # fp16 | bf16 | fp32
    init_scale: float = 65536.0
    growth_interval: int | None = None
    scale_floor: float = 1.0
    max_floor_hits: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        if self.precision not in DTYPES or self.schedule not in ("cosine", "constant"):
            raise ValueError(f"precision {self.precision!r} or schedule {self.schedule!r} is not one of ours")
        if not 2.0**-24 <= self.scale_floor <= self.init_scale <= 2.0**64:
            raise ValueError(  # torch's scaler takes any number, zero and negative ones too
                f"2^-24 <= scale_floor <= init_scale <= 2^64 is expected, got scale_floor {self.scale_floor} "
                f"and init_scale {self.init_scale}"
            )


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step, counted from 1; epochs from 0. ``scale`` and ``learning_rate`` are those this step used.

    ``grad_norm`` is the global norm of the unscaled gradients before clipping, None without a backward pass.
    """

    step: int
    epoch: int
    loss: float
    scale: float
    grad_norm: float | None
    skipped: bool
    cause: str | None
    learning_rate: float


def train(
    module: nn.Module, loss_of: Callable[[Tensor], Tensor], rows: int, settings: Settings, device: str = "cpu"
) -> Iterator[StepRecord]:
    """Train ``module`` in place; ``loss_of(int64 row numbers)`` is the mean loss of those rows, a scalar.

    Yields one record per step and raises Stopped: SCALE_COLLAPSE, DIVERGED, BAD_DATA, NONFINITE_WEIGHTS.
    """
    torch.manual_seed(settings.seed)
    steps = total_steps(rows, settings)
    kind = torch.device(device).type
    weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, settings.learning_rate, weight_decay=settings.weight_decay)
    scheduler = LambdaLR(optimizer, lambda taken: learning_rate_factor(taken, steps, settings.schedule))
    scaler = grad_scaler(kind, settings, steps)
    sound, patience = finite_names(module), Patience(settings)

    for step, (epoch, batch) in enumerate(batches(rows, settings), start=1):
        rate, scale, norm = float(scheduler.get_last_lr()[0]), scaler.get_scale(), None
        before = snapshot(module)
        optimizer.zero_grad(set_to_none=True)  # after a skipped step too: its NaN must not stay
        with torch.amp.autocast(kind, dtype=DTYPES[settings.precision], enabled=settings.precision != "fp32"):
            loss = loss_of(batch)
        cause = None if is_finite(loss) else NON_FINITE_LOSS
        if cause is None:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = gradient_norm(weights)
            cause = None if is_finite(norm) else GRADIENT_OVERFLOW
            if cause is None:
                clip_grads_with_norm_(weights, settings.clip_norm, norm)
                scaler.step(optimizer)
                scheduler.step()
            scaler.update()
            hold_floor(scaler, settings.scale_floor)
        if cause is not None:
            restore(before)
        numbers = (loss.item(), scale, None if norm is None else norm.item())
        yield StepRecord(step, epoch, *numbers, skipped=cause is not None, cause=cause, learning_rate=rate)
        patience.after(step, cause, scale_fell=scaler.get_scale() < scale)
    patience.at_the_end()
    audit(module, sound)


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


def learning_rate_factor(taken: int, steps: int, schedule: str) -> float:
    """The share of the learning rate after ``taken`` steps: warm-up over 5 % (at most 100), then the schedule."""
    warm_up = min(max(steps // 20, 1), 100)
    fall = 0.5 * (1 + math.cos(math.pi * min(taken / steps, 1.0))) if schedule == "cosine" else 1.0
    return min(1.0, (taken + 1) / warm_up) * fall


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


def is_finite(value: Tensor) -> bool:
    return bool(torch.isfinite(value))


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


Snapshot = list[tuple[nn.Module, str, Tensor, Tensor]]


def snapshot(module: nn.Module) -> Snapshot:
    """Every buffer: its owner, its name, the tensor itself and its values."""
    owners = [(owner, name) for owner in module.modules() for name in owner._buffers]
    found = [(owner, name, owner._buffers[name]) for owner, name in owners]
    return [(owner, name, buffer, buffer.clone()) for owner, name, buffer in found if buffer is not None]


def restore(before: Snapshot) -> None:
    """Undo what a forward did to the buffers, in place or by putting another tensor there."""
    with torch.no_grad():
        for owner, name, buffer, values in before:
            owner._buffers[name] = buffer.copy_(values)


class Patience:
    """Ends a job that skips step after step where the loss scale cannot help: it did not fall.

    That is: it is at its floor, or there is none (bf16, fp32), or the loss itself was not finite.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.taken = 0
        self.in_a_row = 0
        self.cause: str | None = None

    def after(self, step: int, cause: str | None, scale_fell: bool) -> None:
        """Count one step. Raises Stopped after ``max_floor_hits`` such steps without one taken between them."""
        if cause is None:
            self.taken, self.in_a_row = self.taken + 1, 0
            return
        self.cause = cause
        self.in_a_row += not scale_fell
        if self.in_a_row >= self.settings.max_floor_hits:
            raise self.stopped(f"stopped at step {step}, after {self.in_a_row} skipped steps in a row")

    def at_the_end(self) -> None:
        """A job too short for the bound has still learnt nothing if no step was taken."""
        if not self.taken:
            raise self.stopped("not one step was taken")

    def stopped(self, what: str) -> Stopped:
        half = self.settings.precision == "fp16"
        if self.cause == GRADIENT_OVERFLOW:
            code, why = ("SCALE_COLLAPSE", self.collapse()) if half else ("DIVERGED", EXPLODED)
        else:
            code, why = ("DIVERGED", LOST) if self.taken else ("BAD_DATA", POISONED)
            why += (
                " In fp16 an activation above 65504 is infinite: bf16 or fp32 would show it." if half else ""
            )
        return Stopped(code, f"{what}: {why}")

    def collapse(self) -> str:
        return (
            f"the gradients overflow half at every loss scale down to the floor of {self.settings.scale_floor:g}. "
            "Train in bf16 or fp32, look for extreme values in the inputs or targets, or start from a lower init_scale."
        )


EXPLODED = (
    "the gradients are not finite. Lower the learning rate, or look for extreme values in inputs and targets."
)
LOST = "the loss was finite and no longer is. Lower the learning rate, or look for extreme rows in the data."
POISONED = "the loss was never finite. Look for non-finite or extreme values in the inputs and targets."


def finite_names(module: nn.Module) -> set[str]:
    """The parameters and buffers without NaN or infinity. A mask of −inf is sound, and is not among them."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {name for name, tensor in tensors if bool(torch.isfinite(tensor).all())}


def audit(module: nn.Module, sound: set[str]) -> None:
    """Raises Stopped where a tensor that was finite before the training is no longer."""
    if spoilt := sorted(sound - finite_names(module)):
        named = ", ".join(f"'{name}'" for name in spoilt[:5])
        raise Stopped(
            "NONFINITE_WEIGHTS",
            f"after the training {len(spoilt)} tensors hold NaN or infinity ({named}{', …' if spoilt[5:] else ''}): "
            "nothing was written. Train in bf16 or fp32, or at a lower learning rate.",
        )
