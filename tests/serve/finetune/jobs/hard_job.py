"""A job with all that has a state (dropout, BatchNorm, cosine, accumulation, overflows), and what it leaves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copytree
from typing import Any

import httpx
import numpy as np
import openai
from halfeven.exporters.conversion.convert import Options, convert
from halfeven.models.store.store import Store
from safetensors.numpy import save_file

from tests.model_folders import tensor, write_folder

# Dropout and BatchNorm; a batch of 16 goes through the model in two parts.
NET = """
import time
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)
        self.drop = nn.Dropout(0.2)
    def forward(self, x):
        if self.training:
            time.sleep(0.001)
        return self.last(self.drop(self.norm(self.first(x)).relu()))

def build():
    torch.manual_seed(5)
    return Net()
"""
STEPS, EVERY = 400, 20
HARD = {
    "n_epochs": 40, "batch_size": 16, "learning_rate": 0.01, "clip_norm": 0.5, "precision": "fp16",
    "init_scale": 2.0**20, "growth_interval": 5, "checkpoint_every": EVERY,
}  # fmt: skip


def rows(count: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng()
    x = draw.standard_normal((count, 4)).astype(np.float32)
    return {"x": x, "target:y": (x[:, :3] > 0).argmax(-1)}


def begin(root: Path) -> None:
    """Write a store in which ``net@1`` is active, the rows to learn from, and so many held-out ones that what a job
    learns shows for every draw."""
    outputs = [tensor("y", "FP32", [-1, 3], kind="logits")]
    folder = write_folder(root / "net", NET, outputs=outputs, max_batch_size=8, samples=rows(64))
    assert convert(folder, Store(root / "store"), Options(forms=("torch",))).asked_passed
    save_file(rows(160), root / "train.safetensors")
    save_file(rows(128), root / "held_out.safetensors")


def store_of(begun: Path, folder: Path) -> Store:
    return Store(Path(copytree(begun / "store", folder / "store")))


def create(client: openai.OpenAI, begun: Path, model: str = "net", **more: Any) -> Any:
    train, held_out = (
        client.files.create(file=begun / f"{name}.safetensors", purpose="fine-tune").id
        for name in ("train", "held_out")
    )
    return client.fine_tuning.jobs.create(
        model=model, training_file=train, validation_file=held_out, seed=7,
        extra_body={"hyperparameters": {**HARD, **more}},
    )  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """The results of a job: the digest of the weights, of the files that serve, every step, every evaluation."""

    store: Store = field(compare=False)
    weights: str
    files: Mapping[str, str]
    steps: Sequence[Mapping[str, Any]]
    evaluations: Sequence[tuple[int, float | None, float | None]]


def outcome(store: Store, client: openai.OpenAI, port: int, job: Any) -> Outcome:
    assert job.status == "succeeded", job.error
    version = store.version("net", job.to_dict()["halfeven"]["version"])
    files = {
        name: version.manifest["files"][name]
        for name in ("weights.safetensors", "original.pt2", "samples.safetensors", "precision.json")
    }
    steps = httpx.get(f"http://127.0.0.1:{port}/v1/fine_tuning/jobs/{job.id}/metrics?most=10000").json()[
        "data"
    ]
    found = client.fine_tuning.jobs.checkpoints.list(job.id, limit=100).data
    evaluations = [(one.step_number, one.metrics.train_loss, one.metrics.valid_loss) for one in found]
    return Outcome(store, version.manifest["lineage"]["weights"], files, steps, evaluations)
