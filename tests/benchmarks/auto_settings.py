"""What ``learning_rate = "auto"`` and ``precision = "auto"`` are worth.

    python -m tests.benchmarks.auto_settings

Five trained nets, each on a task that has shifted: the parent's score, those of a sweep of seven rates, and the score
with ``auto``, all on rows that no training saw. Then the seconds of a training in each precision.
"""

import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from halfeven.models.zoo import zoo_folder
from halfeven.models.zoo.digits.model import build as digits_net
from halfeven.serve.finetune.training import training_job
from halfeven.serve.finetune.training.loop.setting_names import EXACT_FIRST
from halfeven.serve.finetune.training.range_test import RATES
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from torch import Tensor, nn

TEST_ROWS, HELD_OUT_ROWS = 500, 100
NET = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
"""


@dataclass(frozen=True)
class ShiftedTask:
    """``score``: of a state_dict on rows that no training sees; higher is better."""

    name: str
    source: Path
    weights: Path
    inputs: Tensor
    targets: Tensor
    loss: str
    score: Callable[[Mapping[str, Tensor]], float]


def digits(name: str, shift: Callable[[Tensor], Tensor], relabel: Callable[[Tensor], Tensor]) -> ShiftedTask:
    """The zoo's digits in another form, or under other names."""
    found: Any = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(1))
    images = shift(torch.tensor(found.images, dtype=torch.float32)[:, None] / 16)[order].contiguous()
    classes = relabel(torch.tensor(found.target))[order]

    def score(state: Mapping[str, Tensor]) -> float:
        net = digits_net().eval()
        net.load_state_dict(state)
        with torch.no_grad():
            return float((net(images[:TEST_ROWS]).argmax(1) == classes[:TEST_ROWS]).double().mean())

    folder = zoo_folder("digits")
    rows = images[TEST_ROWS:], classes[TEST_ROWS:]
    return ShiftedTask(name, folder, folder / "weights.safetensors", *rows, "cross_entropy", score)


def regression(folder: Path) -> ShiftedTask:
    """A net that has learnt one smooth function of eight numbers is to learn another one."""
    (folder / "model.py").write_text(NET)
    build = dict[str, Any]()
    exec(NET, build)
    random = torch.Generator().manual_seed(2)
    x = torch.randn(2500, 8, generator=random)
    before, after = (torch.randn(8, 2, generator=random) for _ in range(2))
    net: nn.Module = build["build"]()
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(400):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), (x @ before).sin()).backward()
        optimizer.step()
    save_file(net.state_dict(), folder / "weights.safetensors")
    targets = (x @ (0.3 * before + 0.7 * after)).sin()

    def score(state: Mapping[str, Tensor]) -> float:
        net.load_state_dict(state)
        with torch.no_grad():
            return -float(nn.functional.mse_loss(net(x[:TEST_ROWS]), targets[:TEST_ROWS]))

    rows = x[TEST_ROWS:], targets[TEST_ROWS:]
    return ShiftedTask("another function", folder, folder / "weights.safetensors", *rows, "mse", score)


def tasks(folder: Path) -> list[ShiftedTask]:
    def same(value: Tensor) -> Tensor:
        return value

    def noisy(images: Tensor) -> Tensor:
        noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(3))
        return 0.4 * images + 0.3 + 0.1 * noise

    return [
        digits("inverted", lambda images: 1 - images, same),
        digits("rotated", lambda images: images.rot90(1, (2, 3)), same),
        digits("faint and noisy", noisy, same),
        digits("other labels", same, lambda classes: (classes * 3 + 1) % 10),
        regression(folder),
    ]


def trained(
    task: ShiftedTask, folder: Path, learning_rate: float | str, precision: str
) -> tuple[float, dict[str, Any], float]:
    """The score after a job of about 300 steps, its summary, and its seconds."""
    out = Path(tempfile.mkdtemp(dir=folder))
    held = {"x": task.inputs[:HELD_OUT_ROWS].clone(), "target:y": task.targets[:HELD_OUT_ROWS].clone()}
    save_file(held, out / "held_out.safetensors")
    save_file(
        {"x": task.inputs.contiguous(), "target:y": task.targets.contiguous()}, out / "data.safetensors"
    )
    count = len(task.inputs)
    request = {
        "job": out.name, "source": {"folder": str(task.source), "source": "model.py:build", "path": []},
        "program": None,
        "weights": str(task.weights), "data": str(out / "data.safetensors"), "out": str(out),
        "held_out": str(out / "held_out.safetensors"), "rows": list(range(HELD_OUT_ROWS, count)),
        "inputs": [{"name": "x", "dims": []}], "outputs": ["y"], "losses": {"y": task.loss}, "max_batch_size": 64,
        "precision": precision, "device": "cpu", "threads": torch.get_num_threads(), "nice": 0,
        "memory_limit_bytes": 0, "seed": 4, "checkpoint_every": 30, "patience": 0,
        "hyperparameters": {
            "n_epochs": 300 * 32 // (count - HELD_OUT_ROWS), "batch_size": 32, "learning_rate": learning_rate,
        },
    }  # fmt: skip
    begun = time.perf_counter()
    path = list(sys.path)
    done = training_job.run(request, lambda line: None, training_job.Orders())
    sys.path[:] = path
    seconds = time.perf_counter() - begun
    return task.score(load_file(done["weights"])), done["summary"], seconds


def rates(task: ShiftedTask, folder: Path) -> dict[str, Any]:
    parent = task.score(load_file(task.weights))
    sweep = {rate: trained(task, folder, rate, "fp32")[0] for rate in RATES}
    score, summary, _ = trained(task, folder, "auto", "fp32")
    return {
        "task": task.name,
        "parent": round(parent, 4),
        "sweep": {f"{rate:g}": round(one, 4) for rate, one in sweep.items()},
        "rate": summary["learning_rate"],
        "auto": round(score, 4),
        "gap_closed": round((score - parent) / (max(sweep.values()) - parent), 3),
    }


def precisions(task: ShiftedTask, folder: Path) -> dict[str, Any]:
    """The seconds of the same training in each precision, the shortest of three, and the one that ``auto`` took."""
    seconds = dict.fromkeys(EXACT_FIRST, math.inf)
    for _ in range(3):
        for one in EXACT_FIRST:
            seconds[one] = min(seconds[one], trained(task, folder, 1e-3, one)[2])
    chosen = trained(task, folder, 1e-3, "auto")[1]["precision"]
    facts = {one: round(found, 2) for one, found in seconds.items()}
    return {
        "task": task.name,
        "seconds": facts,
        "auto": chosen,
        "over_fastest": round(seconds[chosen] / min(seconds.values()), 3),
    }


def main() -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        found = tasks(folder)
        for task in found:
            print(json.dumps(rates(task, folder)), flush=True)
        for task in (found[0], found[-1]):
            print(json.dumps(precisions(task, folder)), flush=True)


if __name__ == "__main__":
    main()
