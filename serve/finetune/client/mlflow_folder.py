"""A job's series as a run in an MLflow folder (``mlruns``), which `mlflow migrate-filestore` takes into a database.

The layout is that of MLflow's file store, which is in maintenance mode and changes no more; MLflow itself (with
everything that it brings) is not needed to write it. Source: ``mlflow/store/tracking/file_store.py`` of MLflow 3.17.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from .job_record import JobRecord, replaced

_STATUS = {"succeeded": 3, "failed": 4, "cancelled": 5}  # of mlflow.entities.RunStatus; 1: running
_LONGEST_PARAMETER = 6000  # characters


def write_mlflow(record: JobRecord, folder: Path) -> Path:
    """The folder of the run. One experiment per model; a job that is written again takes its earlier run's place."""
    model = hashlib.sha256(record.model.encode()).digest()
    experiment = str(10**17 + int.from_bytes(model[:7]))  # MLflow's own have eighteen digits too
    run_id = hashlib.sha256(record.id.encode()).hexdigest()[:32]
    began, ended = _milliseconds(record.began_s), record.ended_s
    place = folder / experiment
    if not (place / "meta.yaml").exists():
        place.mkdir(parents=True, exist_ok=True)
        _write_meta(
            place,
            {
                "artifact_location": place.absolute().as_uri(),
                "creation_time": began,
                "experiment_id": experiment,
                "last_update_time": began,
                "lifecycle_stage": "active",
                "name": f"halfeven {record.model}",
            },
        )
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
            draft,
            {
                "artifact_uri": (run / "artifacts").absolute().as_uri(),
                "end_time": None if ended is None else _milliseconds(ended),
                "entry_point_name": "",
                "experiment_id": experiment,
                "lifecycle_stage": "active",
                "run_id": run_id,
                "run_name": record.id,
                "source_name": "",
                "source_type": 4,
                "source_version": "",
                "start_time": began,
                "status": _STATUS.get(record.status, 1),
                "tags": [],
                "user_id": "halfeven",
            },
        )
    return run


def _write_meta(folder: Path, facts: Mapping[str, object]) -> None:
    """As YAML, of which each JSON value is a part."""
    (folder / "meta.yaml").write_text(
        "".join(f"{name}: {json.dumps(value)}\n" for name, value in facts.items())
    )


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)
