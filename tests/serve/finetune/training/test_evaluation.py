"""The held-out curve, the best step and the early end; an evaluation does not disturb the training."""

import math
from pathlib import Path

import pytest
import torch
from halfeven.serve.finetune.training.evaluation import BestStep
from halfeven.serve.finetune.training.training_job import NO_BEST_STEP
from safetensors.torch import load_file, save_file

from tests.serve.finetune.training.hard_training import elsewhere, evaluations, hard_job, held_out_loss_of
from tests.serve.finetune.training.trainer_runs import Line, run

OVERFITS = {"n_epochs": 200, "batch_size": 16, "learning_rate": 0.05, "schedule": "constant"}


def overfitting(folder: Path, **more: object) -> Line:
    """16 rows to learn from, of targets that are mostly noise: the held-out loss falls, then rises."""
    job = hard_job(folder)
    return job | {
        "rows": list(range(16)),
        "precision": "fp32",
        "hyperparameters": OVERFITS,
        "checkpoint_every": 1,
        **more,
    }


@pytest.mark.slow
def test_the_weights_of_the_best_step_are_published_and_the_training_ends_early(tmp_path: Path) -> None:
    job = overfitting(tmp_path / "job", patience=8)
    lines, _ = run(job)
    curve, summary = evaluations(lines), lines[-1]["summary"]
    best = min(curve, key=lambda step: curve[step])
    assert summary["ended_early"] and summary["steps"] == best + 8 < 200
    assert (summary["best_step"], summary["held_out_loss"]) == (best, curve[best])
    assert [line["best"] for line in lines if line["type"] == "evaluation"][best - 1 :] == [True] + [
        False
    ] * 8
    weights = Path(lines[-1]["weights"])
    found = held_out_loss_of(job, weights)
    assert found == pytest.approx(curve[best], rel=1e-4) and found < curve[max(curve)]
    weights.unlink()  # as if it had been killed before it wrote them
    again, _ = run(job)
    assert again[-1]["digest"] == lines[-1]["digest"], "and it makes no further step"
    assert all(line["replayed"] for line in again if line["type"] in ("step", "evaluation"))


@pytest.mark.slow
def test_however_often_it_is_evaluated_the_steps_are_the_same(tmp_path: Path) -> None:
    often = hard_job(tmp_path / "often") | {"checkpoint_every": 3}
    once = elsewhere(often) | {"checkpoint_every": 40}
    steps = [[line for line in run(job)[0] if line["type"] == "step"] for job in (often, once)]
    assert steps[0] == steps[1]


def test_a_loss_that_is_not_finite_is_never_the_best() -> None:
    best = BestStep(patience=3)
    assert not best.is_best(math.nan) and not best.is_best(math.inf) and not best.ends
    assert best.is_best(2.0)
    best.take(3, 2.0, {})
    assert not best.is_best(2.0) and not best.is_best(math.nan)
    assert not best.ends
    assert not best.is_best(3.0) and best.ends


@pytest.mark.slow
def test_a_held_out_loss_that_is_never_finite_is_said_and_the_last_step_is_taken(tmp_path: Path) -> None:
    job = hard_job(tmp_path / "job")
    rows = load_file(job["held_out"])
    save_file({**rows, "x": torch.full_like(rows["x"], 1e30)}, job["held_out"])
    lines, _ = run(job)
    assert set(evaluations(lines).values()) == {None}
    assert lines[-1]["summary"]["best_step"] is None
    assert [line["code"] for line in lines if line["type"] == "note"] == [NO_BEST_STEP]


def test_without_patience_it_never_ends() -> None:
    best = BestStep(patience=0)
    assert not any(best.is_best(math.nan) or best.ends for _ in range(1000))
