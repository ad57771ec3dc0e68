"""A training with all that has a state, what it leaves, and its held-out losses."""

import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import mse_loss

from tests.serve.finetune.training.trainer_runs import Line, job

# Dropout, and numbers of all three generators; a line in "kill" is the call of forward at which the process is killed.
SOURCE = """
import os, random, signal
from pathlib import Path
import numpy as np
import torch
from torch import nn

KILL = Path(__file__).with_name("kill")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)
        self.drop, self.calls = nn.Dropout(0.2), 0

    def forward(self, x):
        self.calls += 1
        if KILL.exists() and self.calls == int(KILL.read_text()):
            KILL.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        hidden = self.norm(self.first(x))
        noise = 0.01 * (random.random() + float(np.random.rand()) + torch.rand(1))  # drawn in evaluations too
        if self.training:
            hidden = hidden + noise
        return self.last(self.drop(hidden.relu()))

def build():
    return Net()
"""
# Draws from all three generators too.
AUGMENT = """
import random
import numpy as np
import torch

def shifted(inputs, targets):
    shift = 0.1 * (torch.randn(()) + random.gauss(0, 1) + float(np.random.standard_normal()))
    return {"x": inputs["x"] + shift}, targets
"""
STEPS, EVERY = 40, 5
# Accumulation in two parts of 8 rows, the cosine schedule, clipping; overflows at first and whenever the scale grows.
HARD = {
    "n_epochs": 10, "batch_size": 16, "learning_rate": 0.01, "clip_norm": 0.5, "schedule": "cosine",
    "init_scale": 2.0**20, "growth_interval": 3,
}  # fmt: skip


def hard_job(folder: Path) -> Line:
    """A job with all that has a state; 64 rows to learn from and 32 held out."""
    draw = np.random.default_rng()
    x = torch.from_numpy(draw.standard_normal((96, 4)).astype(np.float32))
    y = x[:, :3] * 2 + torch.from_numpy(draw.standard_normal((96, 3)).astype(np.float32))
    folder.mkdir(exist_ok=True)
    request = job(folder, {"x": x[:64], "target:y": y[:64]}, ["x"], "y", "mse")
    save_file({"x": x[64:].clone(), "target:y": y[64:].clone()}, folder / "held_out.safetensors")
    (folder / "source").mkdir()
    (folder / "source" / "model.py").write_text(SOURCE)
    (folder / "source" / "augment.py").write_text(AUGMENT)
    weights = {
        "first.weight": torch.randn(16, 4), "first.bias": torch.zeros(16), "norm.weight": torch.ones(16),
        "norm.bias": torch.zeros(16), "norm.running_mean": torch.zeros(16), "norm.running_var": torch.ones(16),
        "norm.num_batches_tracked": torch.tensor(0), "last.weight": torch.randn(3, 16), "last.bias": torch.zeros(3),
    }  # fmt: skip
    save_file(weights, folder / "parent.safetensors")
    return request | {
        "job": "ftjob-hard", "rows": list(range(64)), "held_out": str(folder / "held_out.safetensors"),
        "source": {"folder": str(folder / "source"), "source": "model.py:build", "path": []},
        "weights": str(folder / "parent.safetensors"), "max_batch_size": 8, "precision": "fp16", "priority": "normal",
        "transform": "augment.py:shifted", "hyperparameters": HARD, "checkpoint_every": EVERY, "patience": 0,
    }  # fmt: skip


def kill_at(request: Line, call: int) -> None:
    (Path(request["source"]["folder"]) / "kill").write_text(str(call))


def elsewhere(request: Line) -> Line:
    """The request of a job, with another folder, in which nothing has happened yet."""
    out = Path(request["out"]).with_name("left-alone")
    out.mkdir(exist_ok=True)
    return request | {"out": str(out)}


def outcome(request: Line, lines: list[Line]) -> tuple[str, str]:
    """The digests of the weights and of the log: every step and every evaluation."""
    assert lines[-1]["type"] == "done", lines[-1]
    log = Path(request["out"]) / "checkpoints" / "log.jsonl"
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["step"] for line in steps if line["type"] == "step"] == list(range(1, STEPS + 1))
    return lines[-1]["digest"], hashlib.sha256(log.read_bytes()).hexdigest()


def evaluations(lines: list[Line]) -> dict[int, float]:
    return {line["step"]: line["held_out_loss"] for line in lines if line["type"] == "evaluation"}


def held_out_loss_of(job: Line, weights: Path) -> float:
    net = nn.ModuleDict(
        {"first": nn.Linear(4, 16), "norm": nn.BatchNorm1d(16), "last": nn.Linear(16, 3)}
    ).eval()
    net.load_state_dict(load_file(weights))
    rows = load_file(job["held_out"])
    with torch.no_grad():
        return mse_loss(net["last"](net["norm"](net["first"](rows["x"])).relu()), rows["target:y"]).item()
