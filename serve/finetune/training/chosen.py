"""Measures the settings that a job leaves open (``auto``) once, and writes them into the job's folder. A job that is
started again reads them there, so its steps do not depend on the number of starts."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ....models.files.durable import replace_text
from .evaluation import loss_of_rows
from .loop.batch_loop import BatchLoop, total_steps
from .loop.losses import own_function
from .loop.passes import autocast_of
from .loop.setting_names import EXACT_FIRST, HALF_MODELS, USUAL_LEARNING_RATE, chosen_precision
from .loop.training_terms import Settings
from .nets import loop_of
from .precision_test import PrecisionTest
from .range_test import RATES, range_test
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
