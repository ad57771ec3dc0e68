"""The terms of a training: its settings, what is recorded of a step, why one is skipped, why a job is stopped, and when
one that makes no progress is. Needs torch alone."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .....models.folder.loss_and_optimizer_names import DEFAULT
from .setting_names import EMULATED, SCHEDULES

GRADIENT_OVERFLOW = "gradient overflow"
NON_FINITE_LOSS = "non-finite loss"
NON_FINITE_BUFFER = "non-finite buffer"
NO_ROWS = "no rows left"
DATA_FAULTS = (NON_FINITE_LOSS, NON_FINITE_BUFFER)
SMALLEST_SCALE = 2.0**-24  # half's least number: a smaller scale makes every gradient zero
DTYPES = {"fp16": torch.float16, EMULATED: torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


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
    optimizer: str = DEFAULT  # of torch.optim
    optimizer_args: Mapping[str, Any] = field(default_factory=dict)
    betas: tuple[float, float] = (0.9, 0.999)  # of an optimizer that has them
    # The factors of the rate, by pattern of parameters.
    learning_rates: Mapping[str, float] = field(default_factory=dict)
    make_optimizer: Callable[[list[Any]], Any] | None = None  # of the operator's folder
    schedule: str = "cosine"
    warmup_ratio: float = 0.05  # of all steps
    schedule_power: float = 2.0
    schedule_period: float = 1 / 3  # of the steps behind the warm-up
    schedule_gamma: float = 0.1
    ema_decay: float = 0.0  # 0: no average is published
    precision: str = "fp16"  # one of `DTYPES`
    opt_level: str = "O1"  # O1: autocast; O2: a half model (`half_model.py`)
    init_scale: float = 65536.0
    growth_interval: int | None = None
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    scale_floor: float = 2.0**-16
    max_floor_hits: int = 10
    bad_rows: str = "refuse"  # or quarantine: a row that spoils a step is left out from then on
    seed: int = 0

    @property
    def is_fp16(self) -> bool:
        """True if activations and gradients are stored in FP16, so that a loss scale is needed."""
        return DTYPES[self.precision] is torch.float16

    def __post_init__(self) -> None:
        if self.precision not in DTYPES or self.schedule not in SCHEDULES:
            raise ValueError(f"precision {self.precision!r} or schedule {self.schedule!r} is not one of ours")
        if not self.growth_factor > 1 > self.backoff_factor > 0:
            raise ValueError(
                "growth_factor > 1 > backoff_factor > 0 is expected, got "
                f"{self.growth_factor} and {self.backoff_factor}"
            )
        if not SMALLEST_SCALE <= self.scale_floor <= self.init_scale <= 2.0**64:
            raise ValueError(  # torch's scaler takes any number, zero and negative ones too
                f"2^-24 <= scale_floor <= init_scale <= 2^64 is expected, got scale_floor {self.scale_floor} "
                f"and init_scale {self.init_scale}"
            )


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step, counted from 1; epochs from 0. ``scale`` and ``learning_rate`` are those this step used.

    ``grad_norm`` is the global norm of the unscaled gradients before clipping, None without a backward pass.
    ``quarantined``: row numbers that were found to spoil this step, and are left out of it and of all later ones.
    ``overflow``: where gradients left half's range, in words, and in which row numbers.
    ``losses``: of each step of a training with several, by its optimizer; ``loss`` is then that of the model's own.
    """

    step: int
    epoch: int
    loss: float
    scale: float
    grad_norm: float | None
    skipped: bool
    cause: str | None
    learning_rate: float
    quarantined: tuple[int, ...] = ()
    losses: Mapping[str, float] = field(default_factory=dict)
    overflow: tuple[str, tuple[int, ...]] | None = None


class Patience:
    """Ends a job that skips step after step where the loss scale cannot help: it did not fall.

    That is: it is at its floor, or there is none (bf16, fp32), or the loss itself was not finite. ``diagnose`` says why
    gradients are not finite.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.taken = 0
        self.in_a_row = 0
        self.cause: str | None = None
        self.diagnose: Callable[[], str] = lambda: ""

    def count(self, cause: str | None, scale_fell: bool) -> None:
        """Count one step: ``cause`` says why it was skipped."""
        if cause is None:
            self.taken, self.in_a_row = self.taken + 1, 0
            return
        self.cause = cause
        self.in_a_row += not scale_fell

    def check(self, step: int) -> None:
        """Raises Stopped where ``max_floor_hits`` such steps came without one taken between them."""
        if self.in_a_row >= self.settings.max_floor_hits:
            raise self.stopped(f"stopped at step {step}, after {self.in_a_row} skipped steps in a row")

    def at_the_end(self) -> None:
        """Raises Stopped where no step was taken: a job may have fewer steps than ``max_floor_hits``."""
        if not self.taken:
            raise self.stopped("not one step was taken")

    def stopped(self, what: str) -> Stopped:
        half = self.settings.is_fp16
        if self.cause == GRADIENT_OVERFLOW:
            why = f"the gradients overflow half at every loss scale down to the floor of {self.settings.scale_floor:g}"
            code, why = ("SCALE_COLLAPSE", why) if half else ("DIVERGED", "the gradients are not finite")
            why += f". {self.diagnose()}."
        elif self.cause == NO_ROWS:
            code, why = "BAD_DATA", TOO_FEW
        else:
            code, why = ("DIVERGED", LOST) if self.taken else ("BAD_DATA", POISONED)
            why += (
                " In fp16 an activation above 65504 is infinite: bf16 or fp32 would show it." if half else ""
            )
        return Stopped(code, f"{what}: {why}")


TOO_FEW = (
    "too few rows are left for a step, which needs 2. Correct the rows that were left out, or give more."
)
LOST = "the loss was finite and no longer is. Lower the learning rate, or look for extreme rows in the data."
POISONED = "the loss was never finite. Look for non-finite or extreme values in the inputs and targets."


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter and every buffer, those that a state_dict leaves out too; of tied ones the first name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def finite_names(tensors: Mapping[str, Tensor]) -> set[str]:
    """The names of the tensors without NaN or infinity. A mask of −inf is no fault, but is not among these tensors."""
    return {name for name, tensor in tensors.items() if bool(torch.isfinite(tensor).all())}


def audit(tensors: Mapping[str, Tensor], sound: set[str]) -> None:
    """Raises Stopped where a tensor that was finite before the training is no longer."""
    if spoilt := sorted(sound - finite_names(tensors)):
        named = ", ".join(f"'{name}'" for name in spoilt[:5])
        raise Stopped(
            "NONFINITE_WEIGHTS",
            f"after the training {len(spoilt)} tensors hold NaN or infinity ({named}{', …' if spoilt[5:] else ''}): "
            "nothing was written. Train in bf16 or fp32, or at a lower learning rate.",
        )
