"""A job with all that has a state (dropout, BatchNorm, cosine, accumulation, overflows), and what it leaves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copytree
from typing import Any

import httpx
import numpy as np
import openai
import torch
from halfeven.exporters.conversion.convert import Options, convert
from halfeven.models.store.store import Store
from safetensors.numpy import save_file
from torch import nn

from tests.model_folders import tensor, write_folder
from tests.serve.finetune.jobs import job_server

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
            time.sleep(0.002)
        return self.last(self.drop(self.norm(self.first(x)).relu()))

def build():
    torch.manual_seed(5)
    return Net()
"""
LOSSES = """
from torch.nn.functional import cross_entropy

def smooth(answer, target):
    return cross_entropy(answer, target, label_smoothing=0.1)
"""
STEPS, EVERY = 200, 10
HARD = {
    "n_epochs": 20, "batch_size": 16, "learning_rate": 0.01, "clip_norm": 0.5, "precision": "fp16",
    "init_scale": 2.0**20, "growth_interval": 5, "checkpoint_every": EVERY,
}  # fmt: skip


def rows(count: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng()
    x = draw.standard_normal((count, 4)).astype(np.float32)
    return {"x": x, "target:y": (x[:, :3] > 0).argmax(-1)}


def publish(root: Path, name: str, code: str, **settings: Any) -> None:
    outputs = [tensor("y", "FP32", [-1, 3], kind="logits")]
    folder = write_folder(root / name, code, outputs=outputs, max_batch_size=8, samples=rows(64), **settings)
    assert convert(folder, Store(root / "store"), Options(forms=("torch",))).asked_passed


def begin(root: Path) -> None:
    """Write a store in which ``net@1`` is active, the rows to learn from, and so many held-out ones that what a job
    learns shows for every draw."""
    publish(root, "net", NET)
    save_file(rows(160), root / "train.safetensors")
    save_file(rows(128), root / "held_out.safetensors")


def begin_others(root: Path) -> None:
    """Write a store with ``own``, whose folder has a loss, and with ``program``, which has no modules."""
    publish(root, "own", NET, files={"losses.py": LOSSES}, training={"loss": "losses.py:smooth"})
    free = {0: torch.export.Dim.DYNAMIC(min=1, max=8)}
    exported = torch.export.export(nn.Linear(4, 3).eval(), (torch.randn(4, 4),), dynamic_shapes=(free,))
    (root / "program").mkdir()
    torch.export.save(exported, root / "program" / "net.pt2")
    publish(root, "program", "", source="net.pt2")


def store_of(begun: Path, folder: Path) -> Store:
    return Store(Path(copytree(begun / "store", folder / "store")))


def create(client: openai.OpenAI, begun: Path, model: str = "net", **more: Any) -> Any:
    train, held_out = (begun / f"{name}.safetensors" for name in ("train", "held_out"))
    return job_server.create(client, model, train, HARD | more, held_out)


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
