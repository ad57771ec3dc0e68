"""A fine-tuning job as its page shows it."""

import math
import random
from typing import Any


def a_job(status: str = "succeeded", **ours: Any) -> dict[str, Any]:
    """A job as the API gives it; ``ours`` goes into its "halfeven" object."""
    progress = {"step": 120, "total_steps": 120, "loss": 0.041, "scale": 32768.0, "skipped": 2}
    return {
        "id": "ftjob-1",
        "object": "fine_tuning.job",
        "created_at": 1_760_000_000,
        "model": "digits",
        "fine_tuned_model": "digits@2" if status == "succeeded" else None,
        "status": status,
        "hyperparameters": {"n_epochs": 4, "learning_rate": 1e-3, "scale_floor": 1.0, "clip_norm": 1.0},
        "training_file": "file-1",
        "validation_file": None,
        "error": None,
        "seed": 7,
        "halfeven": {"stage": "training", "progress": progress, "parent_version": 1, **ours},
    }


def the_steps(
    count: int, skipped: dict[int, str] | None = None, scale: float = 65536.0
) -> list[dict[str, Any]]:
    """A run's records: the loss falls, each skipped step halves the scale."""
    noise, skipped, steps = random.Random(random.randrange(2**32)), skipped or {}, []
    for number in range(1, count + 1):
        cause = skipped.get(number)
        scale /= 2 if cause == "gradient overflow" else 1
        loss = 2.4 * math.exp(-number / 40) + noise.random() * 0.08
        norm = None if cause else 4 * math.exp(-number / 60) * (0.5 + noise.random())
        base = {"step": number, "epoch": 1, "scale": scale, "skipped": cause is not None, "cause": cause}
        steps.append({**base, "loss": None if cause == "non-finite loss" else loss, "grad_norm": norm})
    return steps


def the_gate(after_new: float = 0.975, after_old: float = 0.986) -> dict[str, Any]:
    def scored(value: float, rows: int, **more: Any) -> dict[str, Any]:
        metrics = {"accuracy": value, "auroc": 0.5}
        return {"logits": {"metric": "accuracy", "value": value, "rows": rows, "metrics": metrics, **more}}

    def compared(value: float, before: float, rows: int) -> dict[str, Any]:
        comparison = {"at_most": before - value + 0.01, "allowed": 0.03, "holds": before - value <= 0.02}
        return scored(value, rows, comparison=comparison)

    return {
        "active": {"held_out": scored(0.112, 287), "judging": scored(0.991, 216)},
        "forms": {
            "onnx": {
                "held_out": compared(after_new, 0.112, 287),
                "judging": compared(after_old, 0.991, 216),
            }
        },
        "tolerance": 0.02,
        "passed": after_new >= 0.112 and 0.991 - after_old <= 0.02,
    }
