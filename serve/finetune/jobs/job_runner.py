"""The stages of one job: its data are checked, a process trains, another converts and scores, the result is promoted.

It writes progress and events into the job store. The end of a job is an exception or a return, which `supervisor.py`
writes.
"""

import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from ....exporters.inputs.samples import Samples
from ....models.archive.archive import save_program
from ....models.engines.load import whole_program
from ....models.spec import ModelSpec
from ....models.store import Store, Version
from ...batching.place import Place
from ...versions.roster import Roster
from ..data.datasets import TrainingData, read_training, seen_in_training, split
from ..data.files import Files
from ..judging.active_version import ActiveVersion, Measured, same_signature
from ..judging.joining import MOST_JOINED, evenly
from ..judging.judging_sets import classes_not_judged, judging_sets, not_judged, sets_of
from .child_watch import lines_of, result_of
from .concluding import Conclusion, JobFailed, StaleParent
from .hyperparameters import QUARANTINE, REFUSE, RETRAIN
from .job_store import JobStore
from .job_types import RUNNING, Job
from .reasons import NO_JUDGING_SET, STALE_PARENT
from .worker_process import Child

TRAINER = Path(__file__).parents[1] / "training" / "trainer.py"
REPORT_EVERY_S = 0.25
METRICS_EVENTS = 20  # per job: a metrics event for every twentieth of its steps
MOST_PARENTS = 3  # from or against which one job is made, where the active version changes meanwhile
_AMP = (
    "n_epochs", "batch_size", "learning_rate", "weight_decay", "clip_norm", "init_scale", "growth_interval",
    "scale_floor", "max_floor_hits", "bad_rows",
)  # fmt: skip


class JobRunner:
    """Runs jobs, one at a time. ``threads`` and ``nice`` are the trainer's; ``stopping`` interrupts a job at once."""

    def __init__(
        self, job_store: JobStore, files: Files, store: Store, roster: Roster, place: Place,
        stopping: threading.Event, threads: int, nice: int,
    ) -> None:  # fmt: skip
        self._job_store, self._files, self._store, self._roster = job_store, files, store, roster
        self._place, self._stopping, self._threads, self._nice = place, stopping, threads, nice
        self._active = ActiveVersion(store, roster, place)
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
        """Once, or again where another version became active meanwhile and the job says what then (`stale_parent`)."""
        stale, trained = job.hyperparameters.get("stale_parent", REFUSE), None
        parent = self._store.version(job.name, job.parent_version)
        for left in reversed(range(MOST_PARENTS)):
            if stale == RETRAIN:
                parent, trained = self._active.of(job.name), None
            data, train, held_out = self._data(job, parent)
            held_out.save(folder / "held_out.safetensors")
            evenly(data.samples.take(train), MOST_JOINED).save(folder / "seen.safetensors")
            if trained is None:
                self._warn(job, parent, data, held_out)
                self._job_store.note(job.id, stage="training")
                trained = self._train(job, parent, data, train, folder)
            self._job_store.note(job.id, stage="converting", summary=trained["summary"])
            version = self._convert(job, parent, data, held_out, trained, folder)
            try:
                self.conclude(job.id, version)
                return
            except StaleParent as error:
                if stale == REFUSE or not left:
                    raise
                self._job_store.record(
                    job.id, "warn", f"{error}; now it is done ({stale})", {"code": error.code}
                )

    def _data(self, job: Job, parent: Version) -> tuple[TrainingData, np.ndarray, Samples]:
        """The training file, the numbers of its rows to learn from, and the held-out samples."""
        spec = parent.spec()
        data = self._read(job.training_file, job, spec)
        if job.validation_file is not None:
            return data, np.arange(data.rows), self._read(job.validation_file, job, spec).samples
        train, held = split(data.rows, job.hyperparameters["validation_split"], job.seed)
        if twins := seen_in_training(data, train, held):
            sentence = (
                f"{len(twins)} held-out rows are among the training rows too: they make the score too good"
            )
            self._job_store.record(job.id, "warn", sentence, {"rows": twins[:10]})
        return data, train, data.samples.take(held)

    def _read(self, file: str, job: Job, spec: ModelSpec) -> TrainingData:
        path = self._files.path(self._job_store.file(file).sha256)
        return read_training(path, spec, quarantine=job.hyperparameters.get("bad_rows") == QUARANTINE)

    def _warn(self, job: Job, parent: Version, data: TrainingData, held_out: Samples) -> None:
        """Record a warning, before the training, where the result will not be made active."""
        spec, sets = parent.spec(), sets_of(parent, held_out)
        judges = judging_sets(sets, job.validation_file is not None)
        if why := not_judged(spec, data.losses, judges):
            sentence = f"the version that this job makes will be published and held, not made active: {why}"
            self._job_store.record(job.id, "warn", sentence, {"code": NO_JUDGING_SET})
        elif why := classes_not_judged(spec, judges):
            self._job_store.record(job.id, "warn", why)
        stale = job.hyperparameters.get("stale_parent", REFUSE)
        if stale == REFUSE and (live := self._store.live_number(job.name)) not in (None, parent.number):
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
        for line in lines_of(child, job.id, self._job_store, self._stopping):
            if line["type"] == "started":
                total = max(1, line["total_steps"])
                what = f"training the {line.get('trained', 'module')}: {total} steps"
                self._job_store.record(job.id, "info", what, line)
            elif line["type"] == "step":
                steps.append(line)
                if rows := data.numbers[line["quarantined"]].tolist():
                    what = (
                        f"step {line['step']}: the loss or a buffer is not finite because of the rows {rows}"
                    )
                    self._job_store.record(job.id, "warn", f"{what}; they are left out", {"rows": rows})
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
        done = result_of(child, last, "trainer")
        rows = sorted([*data.quarantined, *data.numbers[done["summary"]["quarantined"]].tolist()])
        return {**done, "summary": {**done["summary"], "quarantined": rows}}

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
        hyperparameters = {name: job.hyperparameters[name] for name in _AMP if name in job.hyperparameters}
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
        metrics = parent.manifest.get("training", {}).get("metrics", [])
        measured = self._measured(job, parent, held_out, metrics)
        save_file(dict(measured.predictions), folder / "active.safetensors")
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
                "not_judged": not_judged(parent.spec(), data.losses, judges),
            },
            "lineage": self._lineage(job, data, trained),
            "threads": self._threads,
            "nice": self._nice,
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

    def _measured(self, job: Job, parent: Version, held_out: Samples, metrics: Sequence[str]) -> Measured:
        active = self._active.of(job.name)
        if not same_signature(active.spec(), parent.spec()):
            raise JobFailed(
                STALE_PARENT,
                f"{parent} is not active any more, and {active}, which is, has other inputs or outputs: what was "
                f"trained cannot be compared with it, and is not kept; fine-tune {active} with data that fit it",
            )
        return self._active.measured(job.name, held_out, metrics)

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
