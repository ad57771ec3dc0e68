"""O2 is Apex's: a half model, FP32 norms and master weights, and FP32 gradients before they are unscaled."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from halfeven.serve.finetune.training.loop.amp import Loop
from halfeven.serve.finetune.training.loop.batch_loop import batches
from halfeven.serve.finetune.training.loop.half_model import HalfModel
from halfeven.serve.finetune.training.loop.training_terms import DTYPES, Settings
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

X, Y = torch.randn(64, 5), torch.randn(64, 3)
SETTINGS = Settings(
    n_epochs=3, batch_size=16, opt_level="O2", schedule="constant", warmup_ratio=0.0, learning_rate=0.01,
    init_scale=2.0**24, growth_interval=4, seed=2,
)  # fmt: skip


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.batch_norm = nn.BatchNorm1d(8)
        self.register_buffer("calls", torch.zeros(1))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.first(x)
        normed = self.batch_norm(self.norm(hidden))
        self.seen = [hidden.dtype, normed.dtype]
        return self.last(normed.relu())


def by_hand(net: Net, settings: Settings) -> tuple[dict[str, Tensor], int]:
    """The loop of Apex's O2 with two models: the half one computes, its gradients go to the FP32 one as FP32."""
    dtype = DTYPES[settings.precision]
    model = copy.deepcopy(net)
    for layer in (model.first, model.last):
        layer.to(dtype)
    # A batch norm takes a half as it is, as in Apex: its kernel computes in FP32, and no FP32 copy is kept.
    model.norm.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(),))
    model.norm.register_forward_hook(lambda _, inputs, answer: answer.to(dtype))
    masters = dict(net.named_parameters())
    spared = {"params": [one for one in masters.values() if one.ndim < 2], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(
        [{"params": [net.first.weight, net.last.weight]}, spared],
        settings.learning_rate, weight_decay=settings.weight_decay,
    )  # fmt: skip
    half = settings.precision == "fp16"
    scaler = torch.amp.GradScaler("cpu", settings.init_scale, growth_interval=4, enabled=half)
    skipped = 0
    for _, rows in batches(64, settings):
        model.zero_grad()
        scaler.scale(mse_loss(model(X[rows].to(dtype)).float(), Y[rows])).backward()
        for name, one in model.named_parameters():
            assert one.grad is not None
            masters[name].grad = one.grad.float()
        scaler.unscale_(optimizer)
        norm = get_total_norm([one.grad for one in masters.values() if one.grad is not None])
        if norm.isfinite():
            clip_grads_with_norm_(masters.values(), settings.clip_norm, norm)
        else:
            skipped += 1
        statistics = copy.deepcopy(net.batch_norm.state_dict())
        if norm.isfinite():
            net.batch_norm.load_state_dict(
                model.batch_norm.state_dict() | dict(net.batch_norm.named_parameters())
            )
        else:
            model.batch_norm.load_state_dict(statistics)
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            for name, one in model.named_parameters():
                one.copy_(masters[name])
    return dict(net.state_dict()), skipped


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_o2_is_bit_for_bit_the_loop_with_a_half_model_and_fp32_masters(precision: str) -> None:
    settings = replace(SETTINGS, precision=precision)
    net, other = Net(), Net()
    other.load_state_dict(net.state_dict())
    forward = HalfModel(net, DTYPES[precision])

    def loss(rows: Tensor) -> Tensor:
        answer: Any = forward(X[rows])
        return mse_loss(answer.float(), Y[rows])

    loop = Loop(net, loss, 64, settings)
    records = list(loop.run())
    expected, skipped = by_hand(other, settings)
    assert skipped == sum(record.skipped for record in records) and (skipped > 0) == (precision == "fp16")
    assert net.seen == [DTYPES[precision]] * 2
    found = net.state_dict()
    for name in expected.keys() - {"calls"}:
        assert found[name].dtype == expected[name].dtype and torch.equal(found[name], expected[name]), name
    assert found["calls"] == len(records) - skipped, (
        "what forward counts in a buffer is kept, of steps that were taken"
    )
