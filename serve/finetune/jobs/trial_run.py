"""A job tried before it exists: its model is checked against autocast's rules, and two steps are trained.

Nothing is published, no job is made, and the files are deleted.
"""

import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ....models.errors import NotReady, Overloaded
from ....models.store.store import Store, Version
from ...http.error_mapping import without_folders
from ..data.files import Files
from ..training.loop.setting_names import EXACT_FIRST, NO_GRADIENT
from . import training_request as asked
from .choices.hyperparameter_table import AUTO
from .job_rows import JobRows, asked_of, divide, lines_until
from .records.job_store import JobStore
from .records.job_types import SUCCEEDED, JobRequest
from .records.row_files import HELD_OUT
from .training_request import TRAINER
from .training_watch import SLOW_PRECISION
from .worker_process import Child, JobFailed, Priority, result_of

STEPS = 2  # the first allocates what the second has
MOST_SECONDS = 600.0  # of each process: an operator's code that hangs must not hold it for ever
TOO_SLOW = "TOO_SLOW"
LIMIT_REACHED = (
    f"the first steps took more than {MOST_SECONDS:g} s, and a trial ends there. A job has no such limit: create it, "
    "or train fewer rows a step (batch_size)"
)
PRIORITY: Priority = "low"  # not idle: the caller waits for the result of the trial
NEWEST_JOBS = 50
CHECK = "halfeven.serve.finetune.jobs.policy_check"
COMPARED_STEPS = 8
FP32 = EXACT_FIRST[0]
_AS_TRAINED = (
    "precision", "steps", "total_steps", "seconds_per_step", "peak_memory_bytes", "peak_device_bytes",
    "memory_by_phase", "parameters", "trained",
)  # fmt: skip
Trained = Mapping[str, Any]
StepsWith = Callable[[Mapping[str, Any], int], Trained]  # changed settings, steps → the trainer's last line


class TrialRuns:
    """Tries jobs one at a time: each needs the memory of a training. ``leaving``: the server is shutting down."""

    def __init__(
        self, job_store: JobStore, files: Files, store: Store, device: str, threads: int,
        memory_bytes: int = 0, leaving: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self._job_store, self._files, self._store, self._leaving = job_store, files, store, leaving
        self._place = asked.TrainingPlace(device, threads, PRIORITY, memory_bytes)
        self._running = threading.Lock()

    def run(self, request: JobRequest, compare: bool = False) -> dict[str, Any]:
        """The result of trying an admitted job. ``valid``: its first steps can be trained; if not, ``error`` says why;
        None where that was not found out in `MOST_SECONDS`, since a job has no such limit.
        With ``compare`` its precision is chosen whatever it asks for, and ``compared`` has a few steps of each.

        Raises Overloaded where another trial runs, NotReady where the server leaves."""
        if not self._running.acquire(blocking=False):
            raise Overloaded("another job is being validated; ask again when that has ended", 10.0)
        try:
            # The folder is named as an upload, so that the next server deletes it where this one is killed.
            with tempfile.TemporaryDirectory(prefix=".upload-", dir=self._files.folder) as folder:
                return self._tried(request, Path(folder), compare)
        finally:
            self._running.release()

    def _tried(self, request: JobRequest, folder: Path, compare: bool = False) -> dict[str, Any]:
        parent = self._store.version(request.name, request.parent_version)
        rows = self._rows(parent, request, folder)
        findings = [{"code": "DATA", "message": sentence} for sentence in request.findings]
        trained, error, beside = None, None, {}

        def steps_with(settings: Mapping[str, Any], steps: int = STEPS) -> Mapping[str, Any]:
            return self._first_steps(parent, rows, request, folder, settings, steps)

        try:
            trained = steps_with({"precision": AUTO} if compare else {})
            if compare:
                beside = {"compared": compared(steps_with, trained["chosen"])}
            findings += [*_idle(trained), *_slow(trained)]
            findings += self._policy_findings(parent, trained["precision"], folder)
        except JobFailed as failed:
            error = {"code": failed.code, "message": str(failed)}
        return {
            "object": "fine_tuning.validation",
            "valid": None if error and error["code"] == TOO_SLOW else error is None,
            "error": error,
            "model": request.model,
            "parent_version": request.parent_version,
            "rows": {"training": rows.train, "held_out": rows.held_out.count},
            "hyperparameters": dict(request.hyperparameters),
            "findings": findings,
            **beside,
            "trial": None if trained is None else _figures(trained, self._conversion_seconds(request.name)),
        }

    def _conversion_seconds(self, name: str) -> float | None:
        """The seconds that the model's newest successful job took beside its training: for conversion, proof and
        promotion. None where none of the newest `NEWEST_JOBS` jobs of all models is such a job."""
        for job in self._job_store.jobs(None, NEWEST_JOBS, {}):
            if job.name == name and job.status == SUCCEEDED and job.summary and job.started_at:
                return max(0.0, (job.finished_at or job.started_at) - job.started_at - job.summary["seconds"])
        return None

    def _policy_findings(self, parent: Version, precision: str, folder: Path) -> list[dict[str, Any]]:
        if precision == "fp32":
            return []
        question = {
            "store": str(self._store.root),
            "model": parent.name,
            "version": parent.number,
            "samples": str(folder / HELD_OUT),
            "dtype": "bf16" if precision == "bf16" else "fp16",
            "threads": self._place.threads,
            "priority": PRIORITY,
        }
        found = self._answer(Child.of_module(CHECK, question, folder / "check"), "check")
        return [{"code": fault["code"], "message": fault["message"]} for fault in found["faults"]]

    def _first_steps(
        self, parent: Version, rows: JobRows, request: JobRequest, folder: Path, settings: Mapping[str, Any], steps: int
    ) -> Mapping[str, Any]:  # fmt: skip
        """``settings`` take the place of the job's own."""
        hyperparameters = {**request.hyperparameters, **settings}
        question = asked.training_request(parent, rows, hyperparameters, request.seed, "trial", self._place)
        question |= {"trial_steps": steps}
        return self._answer(Child.of_module(TRAINER, question, folder / "train"), "trainer")

    def _answer(self, child: Child, what: str) -> Mapping[str, Any]:
        """The last line of a child that did its work. Raises JobFailed, NotReady."""
        last: Mapping[str, Any] = {}
        with child:
            for line in child.lines(every_s=0.1):
                if self._leaving():
                    raise NotReady("the server is shutting down; ask the next one")
                if child.seconds > MOST_SECONDS:
                    raise JobFailed(TOO_SLOW, LIMIT_REACHED)
                last = line if line is not None and line["type"] in ("checked", "tried", "failed") else last
        try:
            return result_of(child, last, what)
        except JobFailed as failed:  # the caller reads the message, which may have a traceback
            raise JobFailed(failed.code, without_folders(str(failed))) from failed

    def _rows(self, parent: Version, request: JobRequest, folder: Path) -> JobRows:
        rows = asked_of(request, parent, self._job_store, self._files, PRIORITY)
        return divide(rows, folder, lambda child: lines_until(child, self._leaving))


def _idle(trained: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"code": NO_GRADIENT, "message": trained["idle"]}] if trained["idle"] else []


def _slow(trained: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The findings about precisions that are much slower here: the one asked for, or those that were left out."""
    left_out = [one["sentence"] + ": it is left out" for one in (trained["chosen"] or {}).get("left_out", ())]
    sentences = [trained["slow_precision"]] if trained["slow_precision"] else left_out
    return [{"code": SLOW_PRECISION, "message": sentence} for sentence in sentences]


def _figures(trained: Mapping[str, Any], conversion_s: float | None) -> dict[str, Any]:
    """``estimated_seconds``: of the whole job, by ``estimated_parts``; without the conversion where none is known."""
    step_s = trained["seconds_per_step"]
    parts = {
        "steps": step_s * trained["total_steps"],
        "steps of the range test": step_s * trained["range_test_steps"],
        **trained["seconds_beside_steps"],
    }
    if conversion_s is not None:
        parts["conversion, as of the last job"] = conversion_s
    return {
        **{name: trained[name] for name in _AS_TRAINED},
        "estimated_parts": {name: seconds for name, seconds in parts.items() if seconds},
        "estimated_seconds": sum(parts.values()),
        "conversion_known": conversion_s is not None,
        "skipped": [cause for cause in trained["causes"] if cause is not None],
    }


def compared(steps_with: StepsWith, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Train a few steps of one job in each precision; give their time, memory and loss, and the precision to take.

    The seconds of a step are those by which ``precision = "auto"`` chooses, in turns in one process. Memory and losses
    are those of a process for each precision, which begin with the same weights, rows and random numbers.

    Gives ``choice`` and ``precisions`` by name, the fields of a precision that was not trained being ``left_out``.
    ``chosen``: what ``auto`` measured."""
    slow = {one["precision"]: one["sentence"] for one in chosen["left_out"]}
    found: dict[str, dict[str, Any]] = {}
    losses: dict[str, Any] = {}
    for precision in EXACT_FIRST:  # FP32 in any case: the others are compared with it
        if precision in slow:
            found[precision] = {"left_out": slow[precision]}
            continue
        level_of = {"opt_level": "O1"} if precision == FP32 else {}
        try:
            trained = steps_with({"precision": precision, **level_of}, COMPARED_STEPS)
        except JobFailed as failed:
            found[precision] = {"left_out": f"{failed.code}: {failed}"}
            continue
        found[precision] = _figures_of_one(
            trained, chosen["seconds"].get(precision, trained["seconds_per_step"])
        )
        losses[precision] = trained["losses"]
    for precision, one in found.items():
        if precision in losses and FP32 in losses:
            one["loss_difference"] = _largest_difference(losses[precision], losses[FP32])
    return {"choice": chosen["precision"], "steps": COMPARED_STEPS, "precisions": found}


def _figures_of_one(trained: Trained, seconds: float) -> dict[str, Any]:
    """The figures of one precision. ``loss``: that of the last step whose loss was finite."""
    return {
        "seconds_per_step": seconds,
        "steps_per_second": 1 / seconds,
        "peak_memory_bytes": trained["peak_memory_bytes"],
        "peak_device_bytes": trained["peak_device_bytes"],
        "steps_memory_bytes": trained["memory_by_phase"].get("steps"),
        "loss": next((one for one in reversed(trained["losses"]) if one is not None), None),
        "skipped": sum(cause is not None for cause in trained["causes"]),
    }


def _largest_difference(losses: list[float | None], of_fp32: list[float | None]) -> float | None:
    """The largest difference between two losses of the same step, relative to FP32's; None if none are both finite."""
    pairs = [(one, other) for one, other in zip(losses, of_fp32, strict=False) if None not in (one, other)]
    return max((abs(one - other) / max(abs(other), 1e-12) for one, other in pairs), default=None)  # type: ignore[operator, arg-type]
