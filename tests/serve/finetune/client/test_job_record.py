"""The course of a job as TensorBoard and MLflow read it."""

import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from halfeven.models.errors import BadSetting, CannotServe
from halfeven.serve.cli.main import app
from halfeven.serve.finetune.client.job_record import JobRecord, job_record, write_mlflow, write_tensorboard
from halfeven.serve.finetune.client.remote import Remote
from typer.testing import CliRunner

STEPS = [
    {"step": 1, "loss": 1.5, "scale": 65536.0, "grad_norm": 2.25, "learning_rate": 0.1, "skipped": False},
    {"step": 2, "loss": None, "scale": 32768.0, "grad_norm": None, "learning_rate": 0.1, "skipped": True},
    {"step": 3, "loss": 0.1, "scale": 32768.0, "grad_norm": 1.0, "learning_rate": 0.05, "skipped": False},
]
JOB = {
    "id": "ftjob-1", "model": "net@3", "status": "succeeded", "created_at": 90, "finished_at": 160, "seed": 7,
    "fine_tuned_model": "net@4", "hyperparameters": {"batch_size": 16, "trainable": None},
    "halfeven": {"started_at": 100, "parent_version": 3},
}  # fmt: skip


class Server(Remote):
    """A server that answers as a real one does, two evaluations a page."""

    def _call(self, method: str, path: str, *more: Any, **options: Any) -> dict[str, Any]:
        if path.endswith("/metrics?most=10000"):
            return {"data": STEPS}
        if "/checkpoints?" in path:
            all_of_them = [
                {"id": f"c{step}", "step_number": step, "metrics": {"valid_loss": 1 / step}}
                for step in (3, 2, 1)
            ]
            begin = 0 if "after" not in path else 2
            return {"data": all_of_them[begin : begin + 2], "has_more": begin == 0}
        assert path.endswith("/v1/fine_tuning/jobs/ftjob-1")
        return JOB


@pytest.fixture
def record() -> JobRecord:
    return job_record(Server("http://127.0.0.1:1"), "ftjob-1")


@pytest.mark.parametrize(
    "changes",
    [
        {"id": "x/../../documents"},
        {"id": ".."},
        {"model": "../net@3"},
        {"hyperparameters": {"../../../.profile": "run me"}},
        {"hyperparameters": {"/tmp/x": 1}},
    ],
)
def test_a_server_names_no_file_outside_of_the_folder_that_is_written(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in changes.items():
        monkeypatch.setitem(JOB, name, value)
    with pytest.raises(CannotServe, match="cannot be a file's name"):
        job_record(Server("http://127.0.0.1:1"), "ftjob-1")


def test_a_record_has_every_series_and_no_value_that_is_not_finite(record: JobRecord) -> None:
    assert record.series == {
        "loss": [(1, 1.5), (3, 0.1)],
        "scale": [(1, 65536.0), (2, 32768.0), (3, 32768.0)],
        "grad_norm": [(1, 2.25), (3, 1.0)],
        "learning_rate": [(1, 0.1), (2, 0.1), (3, 0.05)],
        "skipped": [(1, 0.0), (2, 1.0), (3, 0.0)],
        "held_out_loss": [(1, 1.0), (2, 0.5), (3, 1 / 3)],
    }
    assert (record.model, record.began_s, record.ended_s) == ("net", 100.0, 160)
    assert record.settings == {
        "parent_version": "3",
        "fine_tuned_model": "net@4",
        "seed": "7",
        "batch_size": "16",
    }


def events(file: Path) -> Iterator[Any]:
    """The events of a file: records of a length, its checksum, the data and their checksum (TFRecord)."""
    event = pytest.importorskip("tensorboardX.proto.event_pb2").Event
    data = file.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        yield event.FromString(data[12 : 12 + length])
        data = data[16 + length :]


def test_an_event_file_holds_each_value_and_takes_the_place_of_an_earlier_one(
    record: JobRecord, tmp_path: Path
) -> None:
    pytest.importorskip("tensorboardX", reason="pip install 'halfeven[tensorboard]'")
    write_tensorboard(record, tmp_path / "runs")
    run = write_tensorboard(record, tmp_path / "runs")
    assert run.name == "net-ftjob-1" and list((tmp_path / "runs").iterdir()) == [run]
    (file,) = run.iterdir()
    found: dict[str, list[tuple[int, float]]] = {}
    for event in events(file):
        for value in event.summary.value:
            if value.HasField("simple_value"):
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
                assert event.wall_time == 100.0
    in_fp32 = {
        name: [(step, float(np.float32(value))) for step, value in points]
        for name, points in record.series.items()
    }
    assert found == in_fp32


def test_without_its_library_the_export_names_what_to_install(
    record: JobRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(BadSetting, match=r"pip install 'halfeven\[tensorboard\]'"):
        write_tensorboard(record, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_an_mlflow_folder_holds_the_run_once(record: JobRecord, tmp_path: Path) -> None:
    folder = tmp_path / "mlruns"
    assert write_mlflow(record, folder) == (run := write_mlflow(record, folder))
    assert (run / "metrics/loss").read_text() == "100000 1.5 1\n100000 0.1 3\n"
    assert (run / "params/batch_size").read_text() == "16"
    assert 'run_name: "ftjob-1"\n' in (run / "meta.yaml").read_text()
    assert sorted(path.name for path in run.parent.iterdir()) == sorted([run.name, "meta.yaml"])


def test_mlflow_reads_the_folder(record: JobRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    tracking = pytest.importorskip("mlflow.tracking", reason="mlflow or mlflow-skinny is not installed")
    write_mlflow(record, tmp_path / "mlruns")
    client = tracking.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("halfeven net")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status, run.data.params["seed"]) == ("ftjob-1", "FINISHED", "7")
    history = client.get_metric_history(run.info.run_id, "held_out_loss")
    assert [(metric.step, metric.value) for metric in history] == record.series["held_out_loss"]


def test_the_command_asks_for_one_form_and_names_a_server_that_does_not_answer(tmp_path: Path) -> None:
    neither = CliRunner().invoke(app, ["job-metrics", "ftjob-1"])
    both = CliRunner().invoke(app, ["job-metrics", "ftjob-1", "--mlflow", "a", "--tensorboard", "b"])
    for done in (neither, both):
        assert done.exit_code == 2 and "one of --tensorboard DIR and --mlflow DIR" in done.stderr
    away = CliRunner().invoke(
        app, ["job-metrics", "ftjob-1", "--mlflow", str(tmp_path / "m"), "--url", "http://127.0.0.1:9"]
    )
    assert away.exit_code == 1 and "no server answers" in away.stderr and not (tmp_path / "m").exists()
