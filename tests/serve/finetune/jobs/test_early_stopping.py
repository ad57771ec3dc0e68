"""Early stopping through the API: the job ends before its last step, and serves its best one."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.serve.finetune.jobs.hard_job import EVERY, STEPS, store_of
from tests.serve.finetune.jobs.job_server import ended, served_to_client


@pytest.mark.slow(seconds=30)
def test_a_job_that_gains_nothing_any_more_ends_early_with_its_best_step(begun: Path, tmp_path: Path) -> None:
    """Targets that are noise: what is learnt of them helps no held-out row."""
    rows = load_file(begun / "train.safetensors")
    noise = {**rows, "target:y": np.random.default_rng().integers(0, 3, len(rows["x"]))}
    save_file(noise, tmp_path / "noise.safetensors")
    with served_to_client(store_of(begun, tmp_path), "net") as (_, _, client):
        file = client.files.create(file=tmp_path / "noise.safetensors", purpose="fine-tune")
        hyperparameters = {
            "n_epochs": 40, "batch_size": 16, "learning_rate": 0.03, "precision": "fp32",
            "checkpoint_every": EVERY, "early_stopping_patience": 2,
        }  # fmt: skip
        wanted = {"hyperparameters": hyperparameters}
        job = client.fine_tuning.jobs.create(model="net", training_file=file.id, seed=7, extra_body=wanted)
        ours = ended(client, job.id).to_dict()["halfeven"]
        found = client.fine_tuning.jobs.checkpoints.list(job.id, limit=100).data
    losses = {one.step_number: one.metrics.valid_loss for one in found}
    best = min(losses, key=lambda step: losses[step] or 0.0)
    assert ours["summary"]["ended_early"] and ours["summary"]["steps"] == best + 2 * EVERY < STEPS
    assert (ours["summary"]["best_step"], ours["summary"]["held_out_loss"]) == (best, losses[best])
