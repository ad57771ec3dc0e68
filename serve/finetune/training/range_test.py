"""``learning_rate = "auto"``: short trainings from the same start, one for each of seven rates, and the rate that they
speak for. Deterministic; its budget is a count of steps. Needs torch alone.

A short training does best with a larger rate than a long one: of the rates that gain nearly as much as the best one the
smallest is taken. Source of the idea: Smith, Cyclical Learning Rates (2017), section 3.3, whose test raises the rate
within one training; separate trainings need no smoothing and no threshold.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor, nn

from .loop.amp import Loop
from .loop.batch_loop import evenly, total_steps
from .loop.loop_state import copied, put_into
from .loop.passes import LossOf, PartsOf
from .loop.seeding import generators_untouched
from .loop.setting_names import USUAL_LEARNING_RATE
from .loop.training_terms import Settings, Stopped, named_tensors

RATES = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
FEWEST_STEPS, MOST_STEPS, SHARE_OF_STEPS = (
    10,
    40,
    0.1,
)  # of one short training; the share is that of the job's
MOST_JUDGED, SHARE_JUDGED = 256, 0.25  # rows that a short training is judged on and does not see
ENOUGH = 0.9  # of the best gain


@dataclass(frozen=True, slots=True)
class RangeTest:
    """The rate, and for each rate that was tried the loss after its training (None: not finite)."""

    rate: float
    steps: int
    before: float
    losses: Mapping[float, float | None]


def range_test(
    module: nn.Module, loss_of: LossOf, parts_of: PartsOf, rows: int, settings: Settings, device: str,
    evaluated: Callable[[Tensor], float], trying: Callable[[int], object] = lambda _: None,
) -> RangeTest:  # fmt: skip
    """Try `RATES` on the rows to learn from. Weights, buffers and generators are as before afterwards.

    ``evaluated``: the mean loss of some rows in evaluation mode. ``trying`` is called with the number of rates that
    have been tried, 0 before the first. Of fewer than four rows nothing can be tried.
    """
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(settings.seed))
    judged = order[: judged_rows(rows)]
    trained = order[len(judged) :]
    steps = short_steps(total_steps(rows, settings))
    before = evaluated(judged) if len(judged) else math.nan
    losses: dict[float, float | None] = {}
    start = {name: copied(tensor) for name, tensor in named_tensors(module).items()}
    for rate in RATES if math.isfinite(before) else ():
        trying(len(losses))
        with generators_untouched():
            short = replace(settings, learning_rate=rate, **_of_length(steps, len(trained), settings))
            loop = Loop(module, lambda batch: loss_of(trained[batch]), len(trained), short, device, parts_of)
            loop.learner.patience.diagnose = lambda: ""  # nobody reads why a rate is too large
            try:
                for _ in islice(loop.run(), steps):
                    pass
                loss = evaluated(judged)
            except Stopped:
                loss = math.nan
        put_into(module, start)
        losses[rate] = loss if math.isfinite(loss) else None
    return RangeTest(chosen_rate(before, losses), steps, before, losses)


def judged_rows(rows: int) -> int:
    """The number of rows, of so many, that judge each short training."""
    return min(MOST_JUDGED, int(SHARE_JUDGED * rows))


def short_steps(steps: int) -> int:
    """The steps of one short training, for a job of so many steps."""
    return min(MOST_STEPS, max(FEWEST_STEPS, int(SHARE_OF_STEPS * steps)))


def chosen_rate(before: float, losses: Mapping[float, float | None]) -> float:
    """The smallest rate that gains at least `ENOUGH` of what the best one gains; the usual rate where none gains."""
    gains = {rate: before - loss for rate, loss in losses.items() if loss is not None and loss < before}
    if not gains:
        return USUAL_LEARNING_RATE
    best = max(gains.values())
    return min(rate for rate, gain in gains.items() if gain >= ENOUGH * best)


def _of_length(steps: int, rows: int, settings: Settings) -> dict[str, int | float]:
    """Settings that make a whole training, its warm-up included, of about so many steps."""
    per_epoch = len(evenly(torch.arange(rows), settings.batch_size))
    return {"n_epochs": max(1, math.ceil(steps / per_epoch)), "warmup_ratio": min(settings.warmup_ratio, 0.1)}
