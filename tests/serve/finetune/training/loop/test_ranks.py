"""Two processes that train together (gloo) do what one does on the whole batch, and end together."""

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from halfeven.serve.finetune.training import trainer
from halfeven.serve.finetune.training.training_job import identity_of
from safetensors.torch import load_file, save_file

from tests.patience import PATIENCE_S
from tests.serve.finetune.training.trainer_runs import Line, job, run, started

pytestmark = pytest.mark.slow  # each training has two processes that import torch

# A row of 7s makes the gradient infinite in the process that has it, a row of 8s the loss. A line "2 9" in "kill":
# rank 2 dies at its pass 9.
SOURCE = """
import os, signal
from pathlib import Path
import torch
from torch import nn

KILL = Path(__file__).with_name("kill")

class Net(nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.first, self.last, self.aside = nn.Linear(4, 16), nn.Linear(16, 3), nn.Linear(4, 3)
        self.drop, self.calls = nn.Dropout(drop), 0
        self.register_buffer("seen", torch.zeros(4), persistent=False)  # as large as the part that was passed

    def forward(self, x):
        self.calls += self.training
        if KILL.exists() and KILL.read_text() == f"{torch.distributed.get_rank()} {self.calls}":
            KILL.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        self.seen = x.detach()[:, 0].clone()
        hidden = self.drop(self.first(x).relu())
        if (x == 7).all(1).any() and hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * float("inf"))
        return self.last(hidden) * (float("inf") if (x == 8).all(1).any() else 1)

def build():
    return Net(0.0)

def dropping():
    return Net(0.3)
"""
DYING = """
import os, sys
if sys.orig_argv[4:]:  # of a process that another one has started
    os.kill(os.getpid(), 9)
"""
FAILING = """
import torch

def failing(inputs, targets):
    if torch.distributed.get_rank() == 1:
        raise ValueError("of rank 1")
    return inputs, targets
"""
EVERY = 5


def request(folder: Path, build: str = "build", **hyperparameters: Any) -> Line:
    """64 rows to learn from, among them one whose gradient and one whose loss is infinite; batches of 16 in parts of
    4."""
    folder.mkdir()
    x = torch.randn(64, 4)
    x[11], x[40] = 7, 8
    y = x[:, :3] * 2 + torch.randn(64, 3)
    asked = job(folder, {"x": x, "target:y": y}, ["x"], "y", "mse")
    save_file({"x": x[:8].clone(), "target:y": y[:8].clone()}, folder / "held_out.safetensors")
    (folder / "source").mkdir()
    (folder / "source" / "model.py").write_text(SOURCE)
    weights = {name: torch.randn(shape) / 4 for name, shape in (
        ("first.weight", (16, 4)), ("first.bias", (16,)), ("last.weight", (3, 16)), ("last.bias", (3,)),
        ("aside.weight", (3, 4)), ("aside.bias", (3,)))}  # fmt: skip
    save_file(weights, folder / "parent.safetensors")
    settings = {"n_epochs": 6, "batch_size": 16, "learning_rate": 0.01, "growth_interval": 3}
    return asked | {
        "job": "ftjob-two", "rows": list(range(64)), "held_out": str(folder / "held_out.safetensors"), "patience": 0,
        "source": {"folder": str(folder / "source"), "source": f"model.py:{build}", "path": []},
        "weights": str(folder / "parent.safetensors"), "max_batch_size": 4, "precision": "fp16", "priority": "normal",
        "hyperparameters": settings | hyperparameters, "checkpoint_every": EVERY,
    }  # fmt: skip


def of(asked: Line, processes: int, name: str) -> Line:
    """The job ``asked``, in so many processes and in another folder."""
    out = Path(asked["out"]).with_name(name)
    out.mkdir()
    return asked | {"out": str(out), "processes": processes}


def steps(lines: list[Line]) -> list[Line]:
    return [line for line in lines if line["type"] == "step"]


def alive(folder: Path) -> list[str]:
    """The trainers of this folder that live."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command, state = (process / "cmdline").read_bytes(), (process / "stat").read_text()
        except OSError:
            continue
        if str(folder).encode() in command and state.rpartition(")")[2].split()[0] != "Z":
            found.append(process.name)
    return found


def test_two_processes_take_the_steps_of_one_and_what_is_skipped_in_one_is_skipped_in_both(
    tmp_path: Path,
) -> None:
    asked = request(tmp_path / "job")
    (alone, _), (both, errors) = (run(of(asked, count, f"of-{count}")) for count in (1, 2))
    assert both[-1]["type"] == "done", errors
    assert both[-1]["trained_with"]["processes"] == 2
    for one, two in zip(steps(alone), steps(both), strict=True):
        assert (one["cause"], one["scale"]) == (two["cause"], two["scale"])
        assert (one["loss"] is None) == (two["loss"] is None)
        assert (two["loss"] or 0) == pytest.approx(one["loss"] or 0, abs=1e-6, rel=1e-6)
    causes = [line["cause"] for line in steps(both)]
    assert {"gradient overflow", "non-finite loss", None} == set(causes)
    first, second = (load_file(found[-1]["weights"]) for found in (alone, both))
    for name, weight in first.items():
        assert torch.allclose(weight, second[name], rtol=0, atol=1e-6), name
    untouched = load_file(asked["weights"])
    assert torch.equal(second["aside.weight"], untouched["aside.weight"]), "it has no gradient in any process"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize("rank", [0, 1])
def test_the_death_of_one_ends_both_and_the_training_goes_on_to_the_same_bits(
    tmp_path: Path, rank: int
) -> None:
    asked = request(tmp_path / "job", "dropping")
    undisturbed, _ = run(of(asked, 2, "undisturbed"))
    hard = of(asked, 2, "hard")
    # Two parts of each step are this process's own.
    (Path(asked["source"]["folder"]) / "kill").write_text(f"{rank} {2 * 12 + 1}")
    with started(hard) as process:
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
    deadline = time.monotonic() + PATIENCE_S
    while alive(tmp_path):
        assert time.monotonic() < deadline, "a process is left behind"
        time.sleep(0.05)
    lines, _ = run(hard)
    assert [line["step"] for line in lines if line["type"] == "resumed"] == [10]
    assert lines[-1]["digest"] == undisturbed[-1]["digest"]
    assert [{**line, "replayed": 0} for line in steps(lines)] == [
        {**line, "replayed": 0} for line in steps(undisturbed)
    ]


@pytest.mark.parametrize("size", [2, 5])
def test_a_process_with_fewer_rows_of_a_batch_or_none_takes_the_step_of_the_others(
    tmp_path: Path, size: int
) -> None:
    # FP32: a weight with another last bit may round to another half, and then the next step is another one.
    asked = request(tmp_path / "job", batch_size=size, n_epochs=1) | {"precision": "fp32"}
    (alone, _), (both, errors) = (run(of(asked, count, f"of-{count}")) for count in (1, 2))
    assert both[-1]["type"] == "done", errors
    first, second = (load_file(found[-1]["weights"]) for found in (alone, both))
    for name, weight in first.items():
        assert torch.allclose(weight, second[name], rtol=0, atol=1e-6), name


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_process_that_dies_before_all_have_met_is_not_waited_for(tmp_path: Path) -> None:
    asked = request(tmp_path / "job")
    (Path(asked["source"]["folder"]) / "model.py").write_text(DYING + SOURCE)
    with started(of(asked, 2, "lonely")) as process:
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
    assert alive(tmp_path) == []


def test_the_reason_of_a_process_whose_lines_nobody_reads_is_the_job_s(tmp_path: Path) -> None:
    asked = request(tmp_path / "job")
    (Path(asked["source"]["folder"]) / "augment.py").write_text(FAILING)
    lines, errors = run(of(asked | {"transform": "augment.py:failing"}, 2, "failing"))
    assert lines[-1]["type"] == "failed", errors
    assert (
        lines[-1]["code"] == "USER_CODE"
        and "ValueError in augment.py, line 6: of rank 1" in lines[-1]["message"]
    )


def test_cuda_means_the_gpu_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    for device in ("cuda", "cuda:1"):
        (tmp_path / "request.json").write_text(json.dumps({"device": device}))
        for rank in (0, 1):
            trainer.take_device(trainer.read_request(tmp_path / "request.json", rank)["device"])
    assert taken == ["cuda:1", "cuda:1", "cuda:2"], (
        "the first process takes no device where the server's has no index"
    )


def test_a_checkpoint_of_another_number_of_processes_is_another_s(tmp_path: Path) -> None:
    asked = request(tmp_path / "job")
    assert identity_of(asked | {"processes": 1}) != identity_of(asked | {"processes": 2})
