"""The curves of a fine-tuning job (loss, loss scale, learning rate, …), read from its server, and written for
TensorBoard or MLflow."""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....models.errors import BadSetting, CannotServe
from ....models.folder.model_name import NAME
from .remote import Remote

MOST_STEPS = 10_000  # of a longer job every k-th
_OF_STEPS = ("loss", "scale", "grad_norm", "learning_rate", "skipped")
_OF_EVALUATIONS = {"valid_loss": "held_out_loss"}
_STATUS = {"succeeded": 3, "failed": 4, "cancelled": 5}  # of mlflow.entities.RunStatus; 1: running
_LONGEST_PARAMETER = 6000  # characters


@dataclass(frozen=True, slots=True)
class JobRecord:
    """``series``: name → (step, value); values that are not finite are left out. ``settings``: the hyperparameters, the
    seed and the versions. ``began_s``, ``ended_s``: Unix seconds."""

    id: str
    model: str
    status: str
    began_s: float
    ended_s: float | None
    settings: Mapping[str, str]
    series: Mapping[str, list[tuple[int, float]]]


def job_record(remote: Remote, id: str) -> JobRecord:
    """Raises UnknownName for a job that the server has not, NotReady where no server answers, CannotServe where a name
    in its answer would be another path than a file name here."""
    job, series = remote.job(id), dict[str, list[tuple[int, float]]]()
    model = str(job["model"]).partition("@")[0]
    for step in remote.steps(id, MOST_STEPS):
        for name in _OF_STEPS:
            if step.get(name) is not None:
                series.setdefault(name, []).append((step["step"], float(step[name])))
    for evaluation in sorted(remote.checkpoints(id), key=lambda one: one["step_number"]):
        for field, name in _OF_EVALUATIONS.items():
            if (value := evaluation["metrics"].get(field)) is not None:
                series.setdefault(name, []).append((evaluation["step_number"], float(value)))
    ours = job.get("halfeven") or {}
    facts = {"parent_version": ours.get("parent_version"), "fine_tuned_model": job.get("fine_tuned_model")}
    facts |= {"seed": job.get("seed"), **(job.get("hyperparameters") or {})}
    for name in (job["id"], model, *facts):
        if not NAME.fullmatch(str(name)):
            raise CannotServe(
                f"the server at {remote.url} names {str(name)[:80]!r} as a job, model or setting, which cannot be a "
                "file's name; is this a halfeven server?"
            )
    return JobRecord(
        id=job["id"],
        model=model,
        status=job["status"],
        began_s=float(ours.get("started_at") or job["created_at"]),
        ended_s=job.get("finished_at"),
        settings={name: str(value) for name, value in facts.items() if value is not None},
        series=series,
    )


@contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """A draft that takes the place of ``folder`` when the block is left without an error: whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".draft-", dir=folder.parent) as place:
        draft = Path(place) / folder.name
        draft.mkdir()
        yield draft
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)


def facts_of_record(record: JobRecord, folder: Path) -> dict[str, Any]:
    """The JSON of ``halfeven job-metrics --json``: the job, the folder, and how many points each curve has."""
    counts = {name: len(points) for name, points in record.series.items()}
    return {"job": record.id, "status": record.status, "folder": str(folder), "series": counts}


def write_tensorboard(record: JobRecord, folder: Path) -> Path:
    """Write the run ``folder/MODEL-JOB`` for TensorBoard, in place of an earlier one, and give its path.

    Steps have no time of their own: the wall time of each is that of the job's beginning. Raises BadSetting where
    tensorboardX is not installed.
    """
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise BadSetting(
            "--tensorboard needs the tensorboardX library: pip install 'halfeven[tensorboard]'"
        ) from None
    run = folder / f"{record.model}-{record.id}"
    with replaced(run) as draft:
        writer = SummaryWriter(str(draft))
        try:
            for name, points in record.series.items():
                for step, value in points:
                    writer.add_scalar(name, value, step, walltime=record.began_s)
            settings = "\n".join(f"    {name} = {value}" for name, value in record.settings.items())
            writer.add_text("settings", settings, 0, walltime=record.began_s)
        finally:
            writer.close()
    return run


def write_mlflow(record: JobRecord, folder: Path) -> Path:
    """Write the job as a run for MLflow, in place of an earlier one, and give its folder. Each model is an experiment.

    The layout is that of MLflow's file store, which is in maintenance mode and changes no more; MLflow itself (with
    everything that it brings) is not needed to write it. Source: ``mlflow/store/tracking/file_store.py`` of MLflow
    3.17."""
    model = hashlib.sha256(record.model.encode()).digest()
    experiment = str(10**17 + int.from_bytes(model[:7]))  # MLflow's own have eighteen digits too
    run_id = hashlib.sha256(record.id.encode()).hexdigest()[:32]
    began, ended = _milliseconds(record.began_s), record.ended_s
    place = folder / experiment
    if not (place / "meta.yaml").exists():
        place.mkdir(parents=True, exist_ok=True)
        _write_meta(
            place, artifact_location=place.absolute().as_uri(), creation_time=began, experiment_id=experiment,
            last_update_time=began, lifecycle_stage="active", name=f"halfeven {record.model}",
        )  # fmt: skip
    run = place / run_id
    with replaced(run) as draft:
        for name in ("artifacts", "metrics", "params", "tags"):
            (draft / name).mkdir()
        for name, points in record.series.items():
            lines = [f"{began} {value!r} {step}\n" for step, value in points]
            (draft / "metrics" / name).write_text("".join(lines))
        for name, value in record.settings.items():
            (draft / "params" / name).write_text(value[:_LONGEST_PARAMETER])
        (draft / "tags" / "mlflow.runName").write_text(record.id)
        (draft / "tags" / "halfeven.status").write_text(record.status)
        _write_meta(
            draft, artifact_uri=(run / "artifacts").absolute().as_uri(),
            end_time=None if ended is None else _milliseconds(ended), entry_point_name="", experiment_id=experiment,
            lifecycle_stage="active", run_id=run_id, run_name=record.id, source_name="", source_type=4,
            source_version="", start_time=began, status=_STATUS.get(record.status, 1), tags=[], user_id="halfeven",
        )  # fmt: skip
    return run


def _write_meta(folder: Path, **facts: object) -> None:
    """Write ``facts`` to ``meta.yaml``, each value as JSON, which is also YAML."""
    (folder / "meta.yaml").write_text(
        "".join(f"{name}: {json.dumps(value)}\n" for name, value in facts.items())
    )


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)
