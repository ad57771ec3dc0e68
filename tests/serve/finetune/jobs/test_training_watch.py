"""The records that the job store gets of a trainer's lines."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from halfeven.serve.finetune.jobs import training_watch as module
from halfeven.serve.finetune.jobs.records.job_store import JobStore
from halfeven.serve.finetune.jobs.records.job_types import RUNNING, FileRecord, JobRequest
from halfeven.serve.finetune.jobs.training_watch import FURTHER_SKIPS, MOST_SKIP_EVENTS, TrainingWatch


def test_of_a_very_long_job_every_kth_step_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT_OF_A_JOB", 4)
    job_store, child = JobStore(tmp_path / "halfeven.db"), SimpleNamespace(seconds=1.0)
    job_store.add_file(FileRecord("file-1", "a" * 64, 10, "train.npz", 1))
    job, _ = job_store.create_job(JobRequest("net", "net", 1, "file-1", {}, 3))
    job_store.move(job.id, RUNNING)
    step = {"type": "step", "loss": 1.0, "scale": 1.0, "skipped": False, "quarantined": []}
    lines = [{"type": "started", "total_steps": 10}, *({**step, "step": n} for n in range(1, 11))]
    TrainingWatch(job_store, job.id, lambda rows: rows).follow(child, lines)  # type: ignore[arg-type]
    assert [one["step"] for one in job_store.steps(job.id)] == [1, 3, 6, 9, 10]
    assert job_store.job(job.id).progress["step"] == 10
    job_store.close()


def test_of_very_many_skipped_steps_each_is_in_the_metrics_and_only_some_have_an_event(
    tmp_path: Path,
) -> None:
    job_store, child = JobStore(tmp_path / "halfeven.db"), SimpleNamespace(seconds=1.0)
    job_store.add_file(FileRecord("file-1", "a" * 64, 10, "train.npz", 1))
    job, _ = job_store.create_job(JobRequest("net", "net", 1, "file-1", {}, 3))
    job_store.move(job.id, RUNNING)
    steps = MOST_SKIP_EVENTS + 100
    skipped = {"type": "step", "loss": 1.0, "scale": 1.0, "skipped": True, "cause": "x", "quarantined": []}
    lines: list[dict[str, Any]] = [
        {"type": "trying", "tried": 2, "rates": 7},
        {"type": "started", "total_steps": steps, "slow_precision": "training in fp16 is slow"},
    ]
    lines[1] |= {"in_fp32": {f"norm{i}": "a LayerNorm" for i in range(30)}, "mixed": ["", "head"]}
    lines += [{**skipped, "step": step} for step in range(1, steps + 1)]
    lines[2]["overflow"] = {
        "words": "the gradients of body.2 left the range of half first, in mul",
        "rows": [7, 9],
    }
    TrainingWatch(job_store, job.id, lambda rows: rows).follow(child, lines)  # type: ignore[arg-type]
    events = [event.message for event in job_store.events(job.id, limit=1000)]
    assert "training in fp16 is slow" in events
    assert any(
        one.startswith("these modules compute in FP32: 'norm0' (a LayerNorm), 'norm1'") for one in events
    )
    assert any("… (30 modules)" in one for one in events)
    assert any("compute in half: the model itself, 'head'. Write the norm" in one for one in events)
    assert sum("was skipped" in message for message in events) == MOST_SKIP_EVENTS
    overflow = [message for message in events if "the gradients of body.2" in message and "7" in message]
    assert len(overflow) == 1 and "in the rows" in overflow[0]
    assert sum(FURTHER_SKIPS in message for message in events) == 1
    assert job_store.job(job.id).progress["rates_tried"] == 2
    assert len(job_store.steps(job.id)) == steps and job_store.job(job.id).progress["skipped"] == steps
    job_store.close()
