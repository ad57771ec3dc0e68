"""The curves of a fine-tuning job (loss, loss scale, learning rate, …), read from its server for another program."""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....models.errors import CannotServe
from ....models.model_name import NAME
from .remote import Remote

MOST_STEPS = 10_000  # of a longer job every k-th
_OF_STEPS = ("loss", "scale", "grad_norm", "learning_rate", "skipped")
_OF_EVALUATIONS = {"valid_loss": "held_out_loss"}


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
