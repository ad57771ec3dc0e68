"""The terms of a training: its settings, what is recorded of a step, why one is skipped and why a job is stopped."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .....models.folder.optimizer_names import DEFAULT
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
    learning_rates: Mapping[str, float] = field(
        default_factory=dict
    )  # factors of the rate, by pattern of parameters
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
