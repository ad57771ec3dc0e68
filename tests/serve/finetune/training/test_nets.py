"""The nets beside the model, in the trainer: built, learnt or frozen, kept in checkpoints, not published."""

import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from halfeven.serve.finetune.training.loop.amp import Loop
from halfeven.serve.finetune.training.loop.training_terms import Settings, Stopped
from halfeven.serve.finetune.training.nets import Called, loop_of, step_loss
from halfeven.serve.finetune.training.task import Task
from halfeven.serve.finetune.training.trainee import trainee_of
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.patience import PATIENCE_S
from tests.serve.finetune.training.hard_training import (
    EVERY,
    HARD,
    STEPS,
    elsewhere,
    hard_job,
    kill_at,
    outcome,
)
from tests.serve.finetune.training.trainer_runs import Line, run, started

GAN = """
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

def critic():
    return nn.Sequential(nn.Linear(7, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))

def features():
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3))

def judged(nets, inputs, answer, real):
    found = nets["critic"](torch.cat([inputs["x"], answer], 1))
    return binary_cross_entropy_with_logits(found, torch.full_like(found, real))

def critic_loss(nets, inputs, targets):
    return judged(nets, inputs, targets["y"], 1.0) + judged(nets, inputs, nets["model"](inputs["x"]), 0.0)

def model_loss(nets, inputs, targets):
    answer = nets["model"](inputs["x"])
    alike = mse_loss(nets["features"](answer), nets["features"](targets["y"]))
    return judged(nets, inputs, answer, 1.0) + mse_loss(answer, targets["y"]) + alike
def alone(nets, inputs, targets):
    return mse_loss(nets["model"](inputs["x"]), targets["y"])
"""
DECLARED: dict[str, Any] = {
    "nets": {
        "critic": {"build": "gan.py:critic"},
        "features": {"build": "gan.py:features", "weights": "features.safetensors"},
    },
    "optimizers": {
        "critic": {"nets": ["critic"], "learning_rate": 0.01, "betas": [0.5, 0.999], "clip_norm": 0.5},
        "model": {"nets": ["model"], "learning_rate": 0.02},
    },
    "steps": [
        {"optimizer": "critic", "loss": "gan.py:critic_loss", "scaler": "critic"},
        {"optimizer": "model", "loss": "gan.py:model_loss"},
    ],
}
FEATURES = {
    "0.weight": torch.randn(8, 3), "0.bias": torch.randn(8), "1.weight": torch.ones(8), "1.bias": torch.zeros(8),
    "1.running_mean": torch.randn(8), "1.running_var": torch.rand(8) + 1, "1.num_batches_tracked": torch.tensor(3),
}  # fmt: skip


@pytest.fixture
def adversarial(tmp_path: Path) -> Line:
    request = hard_job(tmp_path / "job")
    folder = Path(request["source"]["folder"])
    (folder / "gan.py").write_text(GAN)
    save_file(FEATURES, folder / "features.safetensors")
    own = {name: value for name, value in HARD.items() if name not in ("learning_rate", "clip_norm")}
    return request | {"hyperparameters": own, "declared_steps": DECLARED}


@pytest.mark.slow
def test_a_killed_training_of_several_optimizers_goes_on_to_the_same_bits(adversarial: Line) -> None:
    """Killed in the model's step of an iteration whose first step is done. Two scalers, dropout and BatchNorm in every
    net, overflows, parts; the frozen net stays as its file has it."""
    alone = elsewhere(adversarial)
    lines, _ = run(alone)
    causes = {line["cause"] for line in lines if line["type"] == "step"}
    assert causes >= {None, "gradient overflow"}
    expected = outcome(alone, lines)
    kill_at(adversarial, 4 * 12 + 4 * (12 // EVERY) + 3)  # 2 parts in each of 2 steps, 4 in an evaluation
    with started(adversarial) as process:
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
    lines, _ = run(adversarial)
    assert {"type": "resumed", "step": 10} in lines
    assert outcome(adversarial, lines) == expected
    held = load_file(Path(adversarial["out"]) / "checkpoints" / f"step-{STEPS:08}" / "state.safetensors")
    assert all(torch.equal(held[f"module:features_net.{name}"], one) for name, one in FEATURES.items())
    assert "module:critic_net.0.weight" in held and "optimizer:critic:0:exp_avg" in held
    published = load_file(Path(adversarial["out"]) / "weights.safetensors")
    assert published.keys() == load_file(adversarial["weights"]).keys()


@pytest.fixture
def learnt_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Tensor]:
    """The loss of three rows by a function of GAN, in the step of the optimizer "critic"."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "gan.py").write_text(GAN)
    x, y = torch.randn(3, 4), torch.randn(3, 3)
    task = cast(Task, SimpleNamespace(tensors=lambda batch: ({"x": x[batch]}, {"y": y[batch]})))

    def loss(function: str, critic: str) -> Tensor:
        nets = Called({"model": nn.Linear(4, 3).requires_grad_(False), critic: nn.Linear(7, 1)})
        step = {"optimizer": "critic", "loss": f"gan.py:{function}"}
        return step_loss(step, nets, task, {"folder": str(tmp_path)})(torch.arange(3))

    return loss


def test_a_loss_gets_the_nets_the_inputs_and_the_targets_by_name(
    learnt_from: Callable[[str, str], Tensor],
) -> None:
    assert learnt_from("critic_loss", "critic").requires_grad


@pytest.mark.parametrize(
    ("function", "critic", "code", "said"),
    [
        (
            "critic_loss",
            "critc",
            "NO_SUCH_NET",
            "net 'critic', and there are ['critc', 'model']. Declare it in",
        ),
        ("alone", "critic", "USER_CODE", "depends on the nets of the optimizer 'critic', got a tensor []"),
        ("gone", "critic", "USER_CODE", "gan.py has no function gone"),
    ],
)
def test_a_loss_that_cannot_be_used_ends_the_job_with_its_reason(
    learnt_from: Callable[[str, str], Tensor], function: str, critic: str, code: str, said: str
) -> None:
    with pytest.raises(Stopped, match=re.escape(said)) as caught:
        learnt_from(function, critic)
    assert caught.value.code == code


def test_a_model_that_cannot_be_built_any_more_is_not_trained_as_a_program(
    adversarial: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "model", None)
    (Path(adversarial["source"]["folder"]) / "model.py").write_text("import gone")
    said = re.escape("[[training.steps]] need the layers of the model's code")
    with pytest.raises(Stopped, match=said) as caught:
        trainee_of({**adversarial, "program": "original.pt2"}, {})
    assert caught.value.code == "NO_MODULES"


def test_rows_that_were_left_out_on_reading_count_among_those_that_a_training_may_leave_out() -> None:
    task = SimpleNamespace(inputs=[torch.ones(95, 2)], rows=torch.arange(80), begin=print, numbers=list)
    task.loss = task.parts = print
    trainee = SimpleNamespace(module=nn.Linear(2, 1), half=None)
    request = {"device": "cpu", "left_out": [1, 4, 6, 8, 9]}  # of 100 rows
    loop = loop_of(request, cast(Any, trainee), cast(Any, task), Settings(bad_rows="quarantine"))
    assert isinstance(loop, Loop) and loop.quarantine.take(torch.arange(5)) == (0, 1, 2, 3, 4)
    with pytest.raises(Stopped, match=r"^6 rows .* at most 5 are left out beside the 5 that") as stopped:
        loop.quarantine.take(torch.tensor([7]))
    assert stopped.value.code == "TOO_MANY_QUARANTINED"
