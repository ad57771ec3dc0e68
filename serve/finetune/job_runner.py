"""The stages of one job: its data are checked, a process trains, another converts and scores, the result is promoted.

It writes progress and events into the job store. The end of a job is an exception or a return, which `supervisor.py`
writes.
"""

import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...exporters.inputs.samples import Samples
from ...exporters.prove import Answers, answers_of
from ...models.archive.archive import save_program
from ...models.engines.load import whole_program
from ...models.store import Store, Version
from ..batching.place import Place
from ..versions.roster import Roster
from .concluding import Cancelled, Conclusion, JobFailed, ServerStops
from .datasets import TrainingData, read_training, seen_in_training, split
from .files import Files
from .gate import scores
from .job_store import JobStore
from .jobs import RUNNING, Job
from .judging import Sets, classes_not_judged, judging_sets, not_judged, sets_of
from .reasons import NO_JUDGING_SET, STALE_PARENT
from .worker_process import Child

TRAINER = Path(__file__).with_name("trainer.py")
REPORT_EVERY_S = 0.25
METRICS_EVENTS = 20  # per job: a metrics event for every twentieth of its steps
CANCEL_SECONDS = 10.0
_AMP = (
    "n_epochs", "batch_size", "learning_rate", "weight_decay", "clip_norm", "init_scale", "growth_interval",
    "scale_floor", "max_floor_hits",
)  # fmt: skip


class JobRunner:
    """Runs jobs, one at a time. ``threads`` and ``nice`` are the trainer's; ``stopping`` interrupts a job at once."""

    def __init__(
        self, job_store: JobStore, files: Files, store: Store, roster: Roster, place: Place,
        stopping: threading.Event, threads: int, nice: int,
    ) -> None:  # fmt: skip
        self._job_store, self._files, self._store, self._roster = job_store, files, store, roster
        self._place, self._stopping, self._threads, self._nice = place, stopping, threads, nice
        self.conclude = Conclusion(job_store, store, roster, stopping).conclude

    def go(self, job: Job) -> None:
        """Take a queued job through all stages. Raises JobFailed, Cancelled, ServerStops, or an error of ours."""
        folder = self._store.root / "jobs" / job.id
        shutil.rmtree(folder, ignore_errors=True)
        try:
            folder.mkdir(parents=True)
            self._job_store.move(job.id, RUNNING, stage="checking")
            self._run(self._job_store.job(job.id), folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def published(self, job: Job) -> Version | None:
        """The version that this job published, if it did."""
        for number in reversed(self._store.numbers(job.name)):
            version = self._store.version(job.name, number)
            if version.manifest["lineage"].get("job") == job.id:
                return version
        return None

    def _run(self, job: Job, folder: Path) -> None:
        parent = self._store.version(job.name, job.parent_version)
        data, train, held_out = self._data(job, parent)
        held_out.save(folder / "held_out.safetensors")
        self._warn(job, parent, data, held_out)
        self._job_store.note(job.id, stage="training")
        done = self._train(job, parent, data, train, folder)
        self._job_store.note(job.id, stage="converting", summary=done["summary"])
        self.conclude(job.id, self._convert(job, parent, data, held_out, done, folder))

    def _data(self, job: Job, parent: Version) -> tuple[TrainingData, np.ndarray, Samples]:
        """The training file, the numbers of its rows to learn from, and the held-out samples."""
        spec = parent.spec()
        data = read_training(self._files.path(self._job_store.file(job.training_file).sha256), spec)
        if job.validation_file is not None:
            path = self._files.path(self._job_store.file(job.validation_file).sha256)
            return data, np.arange(data.rows), read_training(path, spec).samples
        train, held = split(data.rows, job.hyperparameters["validation_split"], job.seed)
        if twins := seen_in_training(data, train, held):
            sentence = (
                f"{len(twins)} held-out rows are among the training rows too: they make the score too good"
            )
            self._job_store.record(job.id, "warn", sentence, {"rows": twins[:10]})
        return data, train, data.samples.take(held)

    def _warn(self, job: Job, parent: Version, data: TrainingData, held_out: Samples) -> None:
        """Record a warning, before the training, where the result will not be made active."""
        spec, sets = parent.spec(), sets_of(parent, held_out)
        judges = judging_sets(sets, job.validation_file is not None)
        if why := not_judged(spec, data.losses, judges):
            sentence = f"the version that this job makes will be published and held, not made active: {why}"
            self._job_store.record(job.id, "warn", sentence, {"code": NO_JUDGING_SET})
        elif why := classes_not_judged(spec, judges):
            self._job_store.record(job.id, "warn", why)
        if (live := self._store.live_number(job.name)) not in (None, parent.number):
            sentence = (
                f"{parent} is not active, {job.name}@{live} is: what this job makes will not be made active"
            )
            self._job_store.record(job.id, "warn", sentence, {"code": STALE_PARENT})

    def _train(
        self, job: Job, parent: Version, data: TrainingData, train: np.ndarray, folder: Path
    ) -> Mapping[str, Any]:
        request = self._training_request(job, parent, data, train, folder)
        child = Child.of_script(TRAINER, request, folder / "train")
        steps: list[Mapping[str, Any]] = []
        total, reported, last = 1, time.monotonic(), {}
        for line in self._lines(job, child):
            if line["type"] == "started":
                total = max(1, line["total_steps"])
                what = f"training the {line.get('trained', 'module')}: {total} steps"
                self._job_store.record(job.id, "info", what, line)
            elif line["type"] == "step":
                steps.append(line)
                if line["skipped"]:
                    sentence = (
                        f"step {line['step']} was skipped: {line['cause']} (loss scale {line['scale']:g})"
                    )
                    self._job_store.record(job.id, "warn", sentence, line, kind="metrics")
                elif line["step"] * METRICS_EVENTS % total < METRICS_EVENTS:
                    sentence = f"step {line['step']} of {total}: loss {line['loss']:.4g}"
                    self._job_store.record(job.id, "info", sentence, line, kind="metrics")
                if time.monotonic() - reported >= REPORT_EVERY_S:
                    reported = time.monotonic()
                    self._note_steps(job, steps, total, child.seconds)
                    steps = []
            else:
                last = line
        self._note_steps(job, steps, total, child.seconds)
        return self._ended(child, last, "trainer")

    def _training_request(
        self, job: Job, parent: Version, data: TrainingData, train: np.ndarray, folder: Path
    ) -> dict[str, Any]:
        """The request that trainer.py reads; the operator's module comes from the version's own stored source."""
        spec, source = parent.spec(), parent.manifest["source"]
        data.samples.save(folder / "data.safetensors")
        save_program(whole_program(parent), folder / "whole.pt2", weights=True)
        weights = folder / "weights.safetensors"
        with parent.opened("weights.safetensors") as stored, weights.open("wb") as copy:
            shutil.copyfileobj(stored.handle, copy)
        hyperparameters = {name: job.hyperparameters[name] for name in _AMP}
        return {
            "source": {"folder": str(parent.folder / "source"), **source},
            "program": str(folder / "whole.pt2"),
            "weights": str(weights),
            "data": str(folder / "data.safetensors"),
            "rows": train.tolist(),
            "inputs": [
                {"name": t.name, "dims": [[dim.minimum, dim.maximum] for dim in t.shape]} for t in spec.inputs
            ],
            "outputs": [tensor.name for tensor in spec.outputs],
            "batch_axes": spec.batch_axes,
            "losses": dict(data.losses),
            "max_batch_size": spec.max_batch_size,
            "precision": job.hyperparameters["precision"],
            "device": str(self._place.device),
            "threads": self._threads,
            "nice": self._nice,
            "memory_limit_bytes": 0,
            "hyperparameters": hyperparameters,
            "seed": job.seed,
            "out": str(folder),
        }

    def _convert(
        self, job: Job, parent: Version, data: TrainingData, held_out: Samples,
        trained: Mapping[str, Any], folder: Path,
    ) -> Version:  # fmt: skip
        sets = sets_of(parent, held_out)
        against, active = self._scores_of_active(job, parent, sets)
        request = {
            "store": str(self._store.root),
            "model": job.name,
            "parent": parent.number,
            "weights": trained["weights"],
            "held_out": str(folder / "held_out.safetensors"),
            "active": active,
            "against": against,
            "not_judged": not_judged(
                parent.spec(), data.losses, judging_sets(sets, job.validation_file is not None)
            ),
            "tolerance": job.hyperparameters["forgetting_tolerance"],
            "lineage": self._lineage(job, data, trained),
            "threads": self._threads,
            "nice": self._nice,
        }
        child = Child.of_module("halfeven.serve.finetune.weights_to_version", request, folder / "convert")
        last: Mapping[str, Any] = {}
        for line in self._lines(job, child):
            if line["type"] == "stage":
                self._job_store.note(job.id, stage=line["stage"])
            else:
                last = line
        done = self._ended(child, last, "conversion")
        return self._store.version(job.name, done["version"])

    def _scores_of_active(self, job: Job, parent: Version, sets: Sets) -> tuple[int, dict[str, Any]]:
        """The version that serves now, and its scores on the sets that the new version will be measured on."""
        spec = parent.spec()
        while True:
            prepared = self._roster.find(job.name).prepared
            answers = partial(_on_thread, self._place, answers_of(spec, prepared.engine))
            try:
                found = {name: scores(spec, answers, samples) for name, samples in sets.items()}
            except Exception:
                if self._roster.find(job.name).prepared is prepared:
                    raise
                continue  # the version was replaced and closed meanwhile: find the active one again
            return int(prepared.version), {
                name: {output: score.to_json() for output, score in each.items()}
                for name, each in found.items()
            }

    def _lineage(self, job: Job, data: TrainingData, trained: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "by": "fine-tuning",
            "job": job.id,
            "dataset": self._job_store.file(job.training_file).sha256,
            "rows": data.rows,
            "seed": job.seed,
            "hyperparameters": dict(job.hyperparameters),
            "scaler": dict(trained["summary"]),
            "weights": trained["digest"],
        }

    def _lines(self, job: Job, child: Child) -> Iterator[Mapping[str, Any]]:
        """The lines that a child reports; cancelling and shutting down are handled between them."""
        asked_at: float | None = None
        with child:
            for line in child.lines(every_s=0.1):
                if self._stopping.is_set():
                    raise ServerStops
                if asked_at is None and self._job_store.job(job.id).cancel_requested:
                    asked_at = time.monotonic()
                    child.notify("cancel")
                if asked_at is not None and time.monotonic() > asked_at + CANCEL_SECONDS:
                    raise Cancelled
                if line is not None:
                    yield line

    def _ended(self, child: Child, last: Mapping[str, Any], what: str) -> Mapping[str, Any]:
        """The last line of a child that did its work. Raises JobFailed or Cancelled otherwise."""
        if not last:
            raise JobFailed(
                "WORKER_LOST",
                f"the {what} ended without a result (exit status {child.exit_status}); what serves is unchanged. "
                f"Its last output: {child.last_output()}",
            )
        if last["type"] == "cancelled":
            raise Cancelled
        if last["type"] == "failed":
            sentence = f"\n{last['traceback'].rstrip()}" if last.get("traceback") else ""
            raise JobFailed(last["code"], last["message"] + sentence)
        return last

    def _note_steps(self, job: Job, steps: list[Mapping[str, Any]], total: int, seconds: float) -> None:
        if not steps:
            return
        self._job_store.record_steps(job.id, steps)
        last = steps[-1]
        skipped = sum(step["skipped"] for step in steps) + self._job_store.job(job.id).progress.get(
            "skipped", 0
        )
        eta = seconds / last["step"] * (total - last["step"])
        progress = {
            "step": last["step"],
            "total_steps": total,
            "loss": last["loss"],
            "scale": last["scale"],
            "skipped": skipped if last["step"] > len(steps) else sum(step["skipped"] for step in steps),
            "eta_seconds": round(eta, 1),
        }
        self._job_store.note(job.id, progress=progress, estimated_finish=int(time.time() + eta))


def _on_thread(place: Place, answers: Answers, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    call: Callable[[], dict[str, np.ndarray]] = partial(answers, inputs)
    return place.call(call)
