"""The moving average of weights: its values, and which weights an evaluation and the publication see."""

from pathlib import Path

import pytest
import torch
from halfeven.serve.finetune.training.loop.batch_loop import Average
from safetensors.torch import load_file
from torch import nn

from tests.serve.finetune.training.hard_training import HARD, evaluations, hard_job, held_out_loss_of
from tests.serve.finetune.training.trainer_runs import run


def test_the_average_follows_what_learns_and_the_running_statistics() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    net[0].bias.requires_grad_(False)
    average = Average(net, 0.5, {"1.running_mean", "1.running_var"})
    expected = {name: one.clone() for name, one in average.tensors.items()}
    assert set(expected) == {"0.weight", "1.weight", "1.bias", "1.running_mean", "1.running_var"}
    for taken in range(1, 9):
        with torch.no_grad():
            for name in expected:
                tensor = net.state_dict()[name]
                tensor.add_(torch.rand_like(tensor))
                keep = min(0.5, (1 + taken) / (10 + taken))
                expected[name] = keep * expected[name] + (1 - keep) * tensor
        average.take()
    now = {name: one.clone() for name, one in net.state_dict().items()}
    for name, tensor in expected.items():
        torch.testing.assert_close(average.tensors[name], tensor)
    with average.in_place():
        assert all(torch.equal(net.state_dict()[name], average.tensors[name]) for name in expected)
    assert all(torch.equal(tensor, now[name]) for name, tensor in net.state_dict().items())


def test_a_mask_of_infinity_does_not_spoil_the_average() -> None:
    net = nn.Linear(2, 2)
    net.register_buffer("mask", torch.full((2, 2), -torch.inf))
    average = Average(net, 0.9, {"weight", "bias"})
    average.take()
    assert "mask" not in average.tensors


@pytest.mark.slow
def test_the_average_is_evaluated_and_published(tmp_path: Path) -> None:
    averaged = hard_job(tmp_path / "job")
    own, _ = run(averaged)
    (tmp_path / "out").mkdir()
    averaged |= {"hyperparameters": {**HARD, "ema_decay": 0.9}, "out": str(tmp_path / "out")}
    lines, _ = run(averaged)
    assert [line for line in lines if line["type"] == "step"] == [
        line for line in own if line["type"] == "step"
    ]
    curve, best = evaluations(lines), lines[-1]["summary"]["best_step"]
    assert curve != evaluations(own)
    weights = Path(lines[-1]["weights"])
    assert held_out_loss_of(averaged, weights) == pytest.approx(curve[best], rel=2e-2), "evaluated in fp16"
    assert load_file(weights).keys() == load_file(averaged["weights"]).keys()
