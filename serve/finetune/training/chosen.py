"""Measures the settings that a job leaves open (``auto``: the precision, the learning rate) once, and writes them into
the job's folder. A job that is started again reads them there, so its steps do not depend on the number of starts."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ....models.files.durable import replace_text
from .evaluation import loss_of_rows
from .loop.amp import Loop
from .loop.batch_loop import BatchLoop, evenly, total_steps
from .loop.loop_state import copied, put_into
from .loop.losses import own_function
from .loop.passes import LossOf, PartsOf, autocast_of
from .loop.seeding import generators_untouched
from .loop.setting_names import EXACT_FIRST, HALF_MODELS, USUAL_LEARNING_RATE, chosen_precision
from .loop.training_terms import Settings, Stopped, named_tensors
from .nets import loop_of
from .precision_test import PrecisionTest
from .task import Task
from .trainee import Trainee

AUTO, FILE = "auto", "chosen.json"
Request = Mapping[str, Any]
Report = Callable[[dict[str, Any]], object]


def settings_of(
    request: Request, task: Task, trainee: Trainee, report: Report
) -> tuple[Settings, dict[str, Any]]:
    """The settings of a job without ``auto``, and what was chosen for it: empty where nothing was left open. ``report``
    takes a line for each learning rate that is tried.

    In a trial of a few steps the rate is the usual one: the range test would take longer than the trial.
    """
    asked = {**request["hyperparameters"], "precision": request["precision"]}
    if request.get("trial_steps") and asked.get("learning_rate") == AUTO:
        asked["learning_rate"] = USUAL_LEARNING_RATE
    open_ones = {name for name, value in asked.items() if value == AUTO}
    given = {name: value for name, value in asked.items() if name not in open_ones and value is not None}
    if name := request.get("optimizer_function"):
        given["make_optimizer"] = own_function(name, request["source"], "optimizer")
    settings = Settings(**given, seed=request["seed"])
    if not open_ones:
        return settings, {}
    path = Path(request["out"]) / FILE
    try:
        chosen = json.loads(path.read_bytes())
    except (OSError, ValueError):
        chosen = _measured(request, task, trainee, settings, open_ones, report)
        replace_text(path, json.dumps(chosen, allow_nan=False))
    settings = replace(settings, **{name: chosen[name] for name in open_ones})
    trainee.enter(settings.precision)
    return settings, chosen


def _precision_test(request: Request, task: Task, trainee: Trainee, settings: Settings) -> PrecisionTest:
    def loop(asked: Settings, rows: int) -> BatchLoop:
        return loop_of(request, trainee, task, asked, rows=rows)

    steps = total_steps(len(task.rows), settings)
    return PrecisionTest(trainee.module, loop, settings, steps, request["device"], trainee.enter)


def _measured(
    request: Request,
    task: Task,
    trainee: Trainee,
    settings: Settings,
    open_ones: set[str],
    report: Report,
) -> dict[str, Any]:
    device, rows = request["device"], len(task.rows)
    found: dict[str, Any] = {}
    if "precision" in open_ones:
        among = EXACT_FIRST if settings.opt_level == "O1" else HALF_MODELS
        timed = _precision_test(request, task, trainee, settings).timed(among)
        found |= {"precision": chosen_precision(timed.seconds, among), **timed.facts()}
        settings = replace(settings, precision=found["precision"])
        trainee.enter(settings.precision)
    if "learning_rate" in open_ones:

        def evaluated(batch: Tensor) -> float:
            return loss_of_rows(trainee, task, batch, autocast_of(settings, device, trainee.module))

        def trying(tried: int) -> None:
            report({"type": "trying", "tried": tried, "rates": len(RATES)})

        test = range_test(trainee.module, task.loss, task.parts, rows, settings, device, evaluated, trying)
        losses = {f"{rate:g}": loss for rate, loss in test.losses.items()}
        found |= {"learning_rate": test.rate, "steps": test.steps, "losses": losses}
    return found


RATES = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
# The steps of one short training; the share is that of the job's.
FEWEST_STEPS, MOST_STEPS, SHARE_OF_STEPS = (10, 40, 0.1)
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
    """``learning_rate = "auto"``: short trainings from the same start, one for each of `RATES`, on the rows to learn
    from, and the rate that they speak for. Weights, buffers and generators are as before afterwards. Deterministic; its
    budget is a count of steps.

    A short training does best with a larger rate than a long one: of the rates that gain nearly as much as the best one
    the smallest is taken. Source of the idea: Smith, Cyclical Learning Rates (2017), section 3.3, whose test raises the
    rate within one training; separate trainings need no smoothing and no threshold.

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
            loop = Loop(module, loss_of, len(trained), short, device, lambda batch: parts_of(trained[batch]))
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
