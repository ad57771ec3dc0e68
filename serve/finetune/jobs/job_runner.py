"""The stages of one job: its data are checked, a process trains, another converts and scores, the result is promoted.

It writes progress and events into the job store. The end of a job is an exception or a return, which `supervisor.py`
writes. How far a job is stands in its folder (`job_folder.py`): whichever process ends, its work goes on from there.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ....exporters.inputs.samples import Samples
from ....models.errors import DamagedFile
from ....models.files.tensor_file import save_tensors
from ....models.store.store import Store, Version
from ...batching.place import Place
from ...versions.roster import Roster
from ..data.files import Files
from ..judging.active_version import ActiveVersion, MeasuredActive, same_signature
from ..judging.judging_sets import classes_not_judged, judging_sets, not_judged, sets_of
from . import training_request as asked
from .choices.hyperparameter_table import REFUSE, RETRAIN
from .concluding import Conclusion, ends_stale
from .job_folder import MOST_STARTS, JobFolder, JobState, StateUnread
from .job_rows import JobRows, ReaderLost, asked_of, divide
from .records.job_store import JobStore
from .records.job_types import ACTIVATING, NO_JUDGING_SET, RUNNING, STALE_PARENT, IllegalMove, JobRow
from .training_request import TRAINER
from .training_watch import TrainingWatch
from .worker_process import (
    Child,
    JobFailed,
    Paused,
    ServerStops,
    StaleParent,
    WorkerLost,
    lines_of,
    result_of,
)

logger = logging.getLogger("halfeven.finetune")
Result = TypeVar("Result")
MOST_PASSES = 3  # from or against which one job is made, where the active version changes meanwhile


class JobRunner:
    """Runs jobs, each in a thread of its own (`supervisor.py`). ``training`` is the trainer's; ``stopping`` interrupts
    every job. ``at_once``: the number of jobs at once."""

    def __init__(
        self, job_store: JobStore, files: Files, store: Store, roster: Roster, place: Place,
        stopping: threading.Event, training: asked.TrainingPlace, at_once: int = 1,
    ) -> None:  # fmt: skip
        self._job_store, self._files, self._store, self._roster = job_store, files, store, roster
        self._stopping, self._training, self._at_once = stopping, training, at_once
        self._active = ActiveVersion(store, roster, place.until(stopping))
        self.conclude = Conclusion(job_store, store, roster, stopping).conclude

    def go(self, job: JobRow) -> None:
        """Take a queued job through all stages, from where it is; nothing where it is not queued any more. Raises
        JobFailed, Cancelled, Paused, ServerStops, or an error of ours."""
        try:
            stage = ACTIVATING if job.stage == ACTIVATING else "checking"
            self._job_store.move(job.id, RUNNING, stage=stage)
        except IllegalMove:
            return  # paused or cancelled since it was looked up
        job, folder = self._job_store.job(job.id), self._folder(job.id)
        try:
            self._passes(job, folder)
        except (Paused, ServerStops) as ended:
            try:
                folder.was_interrupted()
                if isinstance(ended, Paused):
                    folder.shrink()
            except (OSError, StateUnread) as error:  # what the job has done must not be lost for that
                logger.warning("job %s was interrupted, and this start counts: %s", job.id, error)
            raise

    def published(self, job: JobRow, number: int | None = None) -> Version | None:
        """The version that this job published last, or in its pass ``number``; None where there is none."""
        for found in reversed(self._store.numbers(job.name)):
            try:
                version = self._store.version(job.name, found)
            except DamagedFile:  # of another version: an ended job published the newest ones
                continue
            lineage = version.manifest.get("lineage") or {}
            if lineage.get("job") == job.id and number in (None, lineage.get("pass", 1)):
                return version
        return None

    def remove_ended(self) -> None:
        """Delete the folders of jobs that have ended, and drafts of versions whose conversion is dead."""
        kept = set(self._job_store.unfinished())
        for path in (self._store.root / "jobs").glob("*"):
            if path.name not in kept:
                JobFolder(path).remove()
        self._store.remove_dead_drafts()

    def remove(self, id: str) -> None:
        """Delete the folder of a job that fails."""
        self._folder(id).remove()

    def _folder(self, id: str) -> JobFolder:
        return JobFolder(self._store.root / "jobs" / id)

    def _passes(self, job: JobRow, folder: JobFolder) -> None:
        """Once, or again where another version became active meanwhile and the job says what then (`stale_parent`)."""
        stale = job.hyperparameters.get("stale_parent", REFUSE)
        while True:
            if (state := folder.state()) is None:
                folder.begin(state := JobState(1, self._first_parent(job, stale)))
            version = self.published(job, state.number) or self._pass(job, folder, state)
            try:
                self.conclude(job.id, version)
                return
            except StaleParent as error:
                if stale == REFUSE or state.number == MOST_PASSES:
                    raise
                self._job_store.record(
                    job.id, "warn", f"{error}; now it is done ({stale})", {"code": error.code}
                )
            if stale == RETRAIN:
                folder.begin(JobState(state.number + 1, self._active.of(job.name).number))
            else:
                known = folder.state() or state
                folder.begin(JobState(state.number + 1, state.parent, known.trained))

    def _first_parent(self, job: JobRow, stale: str) -> int:
        """The version to train from: the one that the job names; of a job that names none the one that is active now,
        after it has waited, where its rows can be asked of that one and it can be trained."""
        live = self._active.of(job.name).number if stale == RETRAIN else self._store.live_number(job.name)
        if live in (None, job.parent_version) or (stale != RETRAIN and "@" in job.model):
            return job.parent_version
        parent, newest = (self._store.version(job.name, one) for one in (job.parent_version, live))
        fits = all(map(newest.has, asked.NEEDED)) and same_signature(newest.spec(), parent.spec())
        if stale != RETRAIN and not fits:
            return job.parent_version
        self._job_store.note(job.id, parent_version=live)
        sentence = (
            f"{newest} became active while the job waited: it is trained from that one, not from {parent}"
        )
        self._job_store.record(job.id, "info", sentence, {"parent_version": live})
        return live

    def _pass(self, job: JobRow, folder: JobFolder, state: JobState) -> Version:
        """Train, where that is not done yet, and convert."""
        parent = self._store.version(job.name, state.parent)
        rows = self._rows(job, parent, folder)
        if (trained := state.trained) is None:
            if folder.last_step() == 0:
                self._warn(job, parent, rows)
            self._job_store.note(job.id, stage="training")
            trained = self._started_again(job, folder, lambda: self._train(job, parent, rows, folder))
            folder.keep_trained(trained)
        self._job_store.note(job.id, stage="converting", summary=trained["summary"])

        def convert() -> Version:
            published = self.published(job, state.number)  # by a process that could not report it any more
            return published or self._convert(job, parent, rows, trained, state.number, folder.of_pass)

        return self._started_again(job, folder, convert)

    def _started_again(self, job: JobRow, folder: JobFolder, work: Callable[[], Result]) -> Result:
        """The result of a process's work; where the process is killed it is started again, as often as it makes
        progress between."""
        lost: WorkerLost | None = None
        while True:
            if not folder.starts_again():
                times = f"a process of this job ended {MOST_STARTS} times without progress between"
                raise lost or JobFailed(
                    "WORKER_LOST", f"{times}, with its server or alone: it is not tried again"
                )
            try:
                return work()
            except WorkerLost as error:
                lost = error
                self._store.remove_dead_drafts()
                self._job_store.record(job.id, "warn", f"{error}; it is started again", {"code": error.code})

    def _rows(self, job: JobRow, parent: Version, folder: JobFolder) -> JobRows:
        """The job's rows, divided by a process, which is started again where it is killed."""
        asked = asked_of(job, parent, self._job_store, self._files, self._training.priority)

        def lines(child: Child) -> Iterator[Mapping[str, Any]]:
            return lines_of(child, job.id, self._job_store, self._stopping)

        for left in reversed(range(MOST_STARTS)):
            try:
                return divide(asked, folder.of_pass, lines)
            except ReaderLost as error:
                if not left:
                    raise WorkerLost("WORKER_LOST", f"{error.param}: {error}") from error
                sentence = f"{error.param}: {error}; it is read again"
                self._job_store.record(job.id, "warn", sentence, {"code": "WORKER_LOST"})
        raise AssertionError("the last one raises")

    def _warn(self, job: JobRow, parent: Version, rows: JobRows) -> None:
        """Record a warning, before the training, where the score will be too good, and where the result will not become
        active."""
        if rows.twins:
            sentence = f"{rows.twin_count} held-out rows are among the training rows too: they make the score too good"
            self._job_store.record(job.id, "warn", sentence, {"rows": rows.numbers(rows.twins)})
        spec, sets = parent.spec(), sets_of(parent, rows.held_out)
        judges = judging_sets(sets, job.validation_file is not None)
        if why := not_judged(spec, rows.losses, judges):
            sentence = f"the version that this job makes will be published and held, not made active: {why}"
            self._job_store.record(job.id, "warn", sentence, {"code": NO_JUDGING_SET})
        elif why := classes_not_judged(spec, judges):
            self._job_store.record(job.id, "warn", why)
        stale = job.hyperparameters.get("stale_parent", REFUSE)
        if why := ends_stale(parent, self._store.live_number(job.name), stale):
            self._job_store.record(job.id, "warn", why, {"code": STALE_PARENT})

    def _train(self, job: JobRow, parent: Version, rows: JobRows, folder: JobFolder) -> Mapping[str, Any]:
        request = asked.training_request(parent, rows, job.hyperparameters, job.seed, job.id, self._training)
        child = Child.of_module(TRAINER, request, folder.of_pass / "train")
        watch = TrainingWatch(self._job_store, job.id, rows.numbers)
        last = watch.follow(child, lines_of(child, job.id, self._job_store, self._stopping, pauses=True))
        done = result_of(child, last, "trainer")
        left_out = sorted([*rows.left_out, *rows.numbers(done["summary"]["quarantined"])])
        return {**done, "summary": {**done["summary"], "quarantined": left_out}}

    def _convert(
        self, job: JobRow, parent: Version, rows: JobRows, trained: Mapping[str, Any], number: int, folder: Path,
    ) -> Version:  # fmt: skip
        """``number``: of the pass, whose files are in ``folder``."""
        metrics = parent.manifest.get("training", {}).get("metrics", [])
        measured = self._measured(job, parent, rows.held_out, metrics)
        save_tensors(folder / "active.safetensors", measured.predictions, private=True)
        judges = judging_sets(measured.sets, job.validation_file is not None)
        request = {
            "store": str(self._store.root),
            "model": job.name,
            "parent": parent.number,
            "weights": trained["weights"],
            "held_out": str(folder / "held_out.safetensors"),
            "seen": str(folder / "seen.safetensors"),
            "active": str(folder / "active.safetensors"),
            "terms": {
                "margin": job.hyperparameters["forgetting_tolerance"],
                "against": measured.version.number,
                "metrics": metrics,
                "not_judged": not_judged(parent.spec(), rows.losses, judges),
            },
            "lineage": self._lineage(job, rows, trained, number),
            "threads": self._training.threads,
            "priority": self._training.priority,
            "at_once": self._at_once,
        }
        child = Child.of_module(
            "halfeven.serve.finetune.jobs.weights_to_version", request, folder / "convert"
        )
        last: Mapping[str, Any] = {}
        for line in lines_of(child, job.id, self._job_store, self._stopping):
            if line["type"] == "stage":
                self._job_store.note(job.id, stage=line["stage"])
            else:
                last = line
        done = result_of(child, last, "conversion")
        return self._store.version(job.name, done["version"])

    def _measured(
        self, job: JobRow, parent: Version, held_out: Samples, metrics: Sequence[str]
    ) -> MeasuredActive:
        active = self._active.of(job.name)
        if not same_signature(active.spec(), parent.spec()):
            raise JobFailed(
                STALE_PARENT,
                f"{parent} is not active any more, and {active}, which is, has other inputs or outputs: what was "
                f"trained cannot be compared with it, and is not kept; fine-tune {active} with data that fit it",
            )
        try:
            return self._active.measured(job.name, held_out, metrics)
        except Exception as error:
            # The server unloads the version although the job still asks it.
            if self._stopping.is_set():
                raise ServerStops from error
            raise

    def _lineage(self, job: JobRow, rows: JobRows, trained: Mapping[str, Any], number: int) -> dict[str, Any]:
        validation = job.validation_file
        return {
            "by": "fine-tuning",
            "job": job.id,
            "dataset": self._job_store.file(job.training_file).sha256,
            "validation": None if validation is None else self._job_store.file(validation).sha256,
            "rows": rows.rows,
            "pass": number,
            "seed": job.seed,
            "hyperparameters": dict(job.hyperparameters),
            "scaler": dict(trained["summary"]),
            "weights": trained["digest"],
            "trained_with": trained["trained_with"],
        }
