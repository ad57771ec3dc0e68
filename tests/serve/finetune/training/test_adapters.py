"""LoRA: which layers get adapters, and that the merged weights answer as the module with its adapters does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from halfeven.serve.finetune.training.trainee import Adapters, layers_of
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from tests.serve.finetune.training.hard_training import hard_job
from tests.serve.finetune.training.trainer_runs import run

ASKED = {"rank": 2, "alpha": 3.0, "dropout": 0.0, "targets": None}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolve = nn.Conv2d(2, 4, 3)
        self.by_channel = nn.Conv2d(4, 4, 1, groups=4)
        self.parts = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.parts(self.by_channel(self.convolve(x)).mean((2, 3)))


def test_linear_layers_and_ungrouped_convolutions_get_adapters() -> None:
    assert layers_of(Net(), None) == ["convolve", "parts.0", "parts.2"]
    assert layers_of(Net(), ["parts.*", "by*"]) == ["parts.0", "parts.2"]
    with pytest.raises(
        Exception, match=r"lora_targets \['norm'\] fit no linear layer .* train with trainable = head"
    ):
        layers_of(Net(), ["norm"])


def test_a_layer_that_the_model_s_code_froze_gets_no_adapter() -> None:
    net = Net()
    net.frozen_when_built = {"parts.0.weight", "convolve.bias"}  # type: ignore[assignment]
    assert layers_of(net, None) == ["convolve", "parts.2"]
    with pytest.raises(Exception, match="that the model's code did not freeze"):
        layers_of(net, ["parts.0"])


ENCODER = """
import torch
from torch import nn

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.encode(torch.stack([x, x.flip(-1)], 1)).mean(1))

def build():
    return Encoder()
"""


def encoder() -> nn.Module:
    found: dict[str, Any] = {}
    exec(ENCODER, found)
    return found["build"]()


def test_a_layer_that_multi_head_attention_never_calls_gets_no_adapter() -> None:
    assert layers_of(encoder(), None) == ["encode.linear1", "encode.linear2", "head"]


@pytest.mark.slow
def test_the_held_out_loss_of_an_encoder_is_that_of_its_merged_weights(tmp_path: Path) -> None:
    """`torch.nn.TransformerEncoderLayer` has a fused kernel in evaluation, which would not see the adapters."""
    job = hard_job(tmp_path / "job")
    (tmp_path / "job" / "source" / "model.py").write_text(ENCODER)
    save_file(encoder().state_dict(), job["weights"])
    lora = {"rank": 2, "alpha": 16.0, "dropout": 0.0, "targets": None}
    lines, _ = run(job | {"lora": lora, "precision": "fp32", "transform": None})
    net, rows = encoder().eval(), load_file(job["held_out"])
    net.load_state_dict(load_file(lines[-1]["weights"]))
    with torch.no_grad():
        found = mse_loss(net(rows["x"]), rows["target:y"]).item()
    assert lines[-1]["summary"]["held_out_loss"] == pytest.approx(found, rel=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the libraries that peft loads
def test_the_merged_weights_answer_as_the_module_with_its_adapters() -> None:
    net, x = Net(), torch.randn(5, 2, 4, 4)
    names, before = set(net.state_dict()), net(x).detach()
    adapters = Adapters(net, ASKED)
    learning = {name for name, one in net.named_parameters() if one.requires_grad}
    assert learning and all(".lora_" in name for name in learning)
    torch.testing.assert_close(net(x), before)
    with torch.no_grad():
        for name, one in net.named_parameters():
            if name in learning:
                one.add_(0.1 * torch.randn_like(one))
    merged, plain = adapters.merged(net.state_dict()), Net()
    assert set(merged) == names
    plain.load_state_dict(merged)
    assert (net(x) - before).abs().max() > 1e-3
    torch.testing.assert_close(plain(x), net(x))


class Named(nn.Module):
    """Every kind of weight that is not one layer's own, and a part with the name that peft gives."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.twice = nn.Linear(4, 4)
        self.again = self.twice
        self.computed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4, bias=False))
        self.net = nn.ModuleDict({"base_layer": nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))})
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        inner = self.computed(torch.tanh(self.again(torch.tanh(self.twice(self.embed(x))))))
        return self.head(self.net["base_layer"](inner))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the libraries that peft loads
def test_a_weight_that_is_used_elsewhere_or_computed_gets_no_adapter() -> None:
    net, plain, x = Named(), Named(), torch.randint(0, 7, (5,))
    adapters = Adapters(net, ASKED)
    assert adapters.layers == ["net.base_layer.0"]
    with torch.no_grad():
        for one in net.parameters():
            one.add_(0.1 * torch.randn_like(one))
    merged = adapters.merged(net.state_dict())
    plain.load_state_dict(merged)
    torch.testing.assert_close(plain(x), net(x))
