"""The requests of ``halfeven finetune --sweep`` to a server, and its ends; a real one runs in `jobs/test_queue.py`."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from halfeven.models.errors import BadInput, NotReady
from halfeven.serve.finetune.client.remote import JOBS
from halfeven.serve.finetune.client.sweep import grid_of, summary_of, sweep, sweep_exit_code
from rich.console import Console

from tests.serve.finetune.client.scripted import Answer, Clock, Script, speaking, state, succeeded


def created(id: str) -> Answer:
    status, job = state("queued")
    assert isinstance(job, dict)
    return status, {**job, "id": id, "seed": 11}


def swept(script: Script, folder: Path, clock: Clock | None = None, **more: Any) -> list[dict[str, Any]]:
    clock, file = clock or Clock(), folder / "rows.npz"
    file.write_bytes(b"rows")
    with speaking(script) as url:
        return sweep(
            url, "digits", file, grid_of(["lr=1e-3,1e-4", "epochs=1"]), notify=lambda line: None,
            console=Console(file=io.StringIO()), clock=lambda: clock.now, sleep=clock.sleep, **more,
        )  # fmt: skip


def test_a_grid_is_every_combination_of_words_numbers_and_lists() -> None:
    found = grid_of(["lr=1e-3,1e-4", "schedule=cosine,linear", "betas=[[0.9,0.99]]"])
    assert found == [
        {"lr": rate, "schedule": word, "betas": [0.9, 0.99]}
        for rate in (1e-3, 1e-4)
        for word in ("cosine", "linear")
    ]
    assert grid_of([]) == [{}]
    for wrong in (["lr"], ["lr="], ["=1"], ["lr=1,"], ["lr=1", "lr=2"], ["lr=[1"], ["lr=[]"]):
        with pytest.raises(BadInput, match=r"expected NAME=VALUE,VALUE"):
            grid_of(wrong)
    with pytest.raises(BadInput, match="65 combinations; at most 64"):
        grid_of(["seed=" + ",".join(map(str, range(65)))])


def test_the_jobs_have_one_file_one_parent_and_one_seed(tmp_path: Path) -> None:
    active = (200, {"name": "digits", "live": 7})
    script = Script(states=[active, succeeded()], creation=[created("ftjob-1"), created("ftjob-2")])
    found = swept(script, tmp_path, hyperparameters={"batch_size": 4, "n_epochs": None})
    first, second = (json.loads(body) for body in script.bodies("POST", JOBS))
    assert (first["model"], second["model"], second["seed"]) == ("digits@7", "digits@7", 11)
    common = {"stale_parent": "rejudge", "batch_size": 4, "epochs": 1}
    assert first["hyperparameters"] == {**common, "lr": 1e-3}
    assert second["hyperparameters"] == {**common, "lr": 1e-4}
    assert len(script.bodies("POST", "/v1/files")) == 1 and sweep_exit_code(found) == 0


@pytest.mark.parametrize(
    ("status", "words", "kind"), [(400, "lr: expected a number", BadInput), (429, "too many jobs", NotReady)]
)
def test_where_one_job_is_refused_none_runs(
    tmp_path: Path, status: int, words: str, kind: type[Exception]
) -> None:
    refusal = {"error": {"message": words, "code": "refused"}}
    script = Script(creation=[created("ftjob-1"), (status, refusal)])
    with pytest.raises(kind, match=words):
        swept(script, tmp_path)
    assert script.asked[-1][:2] == ("POST", f"{JOBS}/ftjob-1/cancel")


def test_after_ctrl_c_the_last_one_is_cancelled_first(tmp_path: Path) -> None:
    def interrupt(count: int) -> None:
        if count == 1:
            raise KeyboardInterrupt

    script = Script(states=[state("running")], creation=[created("ftjob-1"), created("ftjob-2")])
    found = swept(script, tmp_path, Clock(interrupt))
    cancelled = [path for _, path, _, _ in script.asked if path.endswith("/cancel")]
    assert cancelled == [f"{JOBS}/{id}/cancel" for id in ("ftjob-2", "ftjob-1")]
    assert [one["status"] for one in found] == ["cancelled"] * 2 and sweep_exit_code(found) == 1


def test_the_best_has_the_smallest_loss_and_the_active_one_is_the_newest_promoted() -> None:
    def job(version: int, state: str, loss: float | None) -> dict[str, Any]:
        ended = {"status": "succeeded", "error": None, "gate": None, "fine_tuned_model": f"net@{version}"}
        summary = None if loss is None else {"held_out_loss": loss, "seconds": 2.0}
        return {"settings": {"lr": version}, "promotion": {"state": state}, "summary": summary, **ended}

    jobs = [
        job(9, "promoted", 0.5),
        job(10, "promoted", 0.3),
        job(11, "not promoted", 0.2),
        job(12, "held", None),
    ]
    facts = summary_of(jobs)
    assert facts["active"] == "net@10" and facts["best"] == {"lr": 11}
    assert summary_of([job(3, "held", None)]) | {"jobs": []} == {"jobs": [], "best": None, "active": None}
