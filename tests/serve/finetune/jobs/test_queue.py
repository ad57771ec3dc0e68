"""Several jobs from one parent as one order with a table at its end."""

import io
from pathlib import Path
from typing import Any

import pytest
from halfeven.models.machine.usable_cores import usable_cores
from halfeven.serve.finetune.client.sweep import summary_of, sweep, sweep_exit_code, table_of
from rich.console import Console

from tests.serve.finetune.jobs.hard_job import HARD, store_of
from tests.serve.finetune.jobs.job_server import served_to_client

REFUSED = "METRIC_REGRESSED"  # also a judgement: worse than the version that is active then


def judged(status: str, promotion: Any, error: Any) -> bool:
    if status == "failed":
        return error["code"] == REFUSED
    return status == "succeeded" and promotion["state"] in ("promoted", "not promoted")


@pytest.mark.slow(seconds=25)
def test_a_sweep_is_one_order_with_a_table_and_its_jobs_run_beside_each_other(
    begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALFEVEN_JOBS", "2")
    grid = [{"lr": 1e-6, "epochs": 2}, {"lr": 1e-2, "epochs": 20}]
    common = HARD | {"precision": "fp32"}
    del common["n_epochs"], common["learning_rate"]
    said, screen = list[str](), Console(file=io.StringIO(), width=160)
    with served_to_client(store_of(begun, tmp_path), "net") as (_, port, client):
        found = sweep(
            f"http://127.0.0.1:{port}", "net", begun / "train.safetensors", grid,
            validation=begun / "held_out.safetensors", hyperparameters=common, notify=said.append, console=screen,
        )  # fmt: skip
        times = [client.fine_tuning.jobs.retrieve(one["job"]).to_dict() for one in found]
        served = {one["training_file"] for one in times}
    assert len(served) == 1 and [one["settings"] for one in found] == grid and len(said) == 2
    assert [one["parent_version"] for one in found] == [1] * 2 and len({job["seed"] for job in times}) == 1
    assert all(
        judged(one["status"], one["promotion"], one["error"]) and one["gate"]["forms"] for one in found
    )
    second: Any = times[1]["halfeven"]
    assert usable_cores() < 2 or second["started_at"] <= times[0]["finished_at"]
    facts = summary_of(found)
    assert facts["best"] == {"lr": 1e-2, "epochs": 20} and facts["active"] and sweep_exit_code(found) == 0
    screen.print(table_of(facts))
    assert isinstance(screen.file, io.StringIO)
    table = screen.file.getvalue().splitlines()
    assert sum(str(rate) in line for line in table for rate in (0.01, 1e-06)) == 2
    assert next(line for line in table if "best" in line).split()[:2] == ["0.01", "20"]
