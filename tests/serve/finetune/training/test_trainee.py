"""The parameters of a module that learn."""

import pytest
import torch
from halfeven.exporters.torch.last_layers import head_of
from halfeven.serve.finetune.training.trainee import learn
from torch import Tensor, nn


class Tied(nn.Module):
    """One weight with two names; the module gives the first of them, the captured program another one."""

    def __init__(self, first: str) -> None:
        super().__init__()
        layers = {"embed": nn.Embedding(7, 4), "head": nn.Linear(4, 7, bias=False)}
        for name in sorted(layers, key=lambda name: name != first):
            self.add_module(name, layers[name])
        self.inner = nn.Linear(4, 4)
        layers["head"].weight = layers["embed"].weight

    def forward(self, x: Tensor) -> Tensor:
        parts = dict(self.named_children())
        return parts["head"](torch.tanh(self.inner(parts["embed"](x))))


@pytest.mark.parametrize("first", ["embed", "head"])
def test_a_tied_weight_learns_by_either_of_its_names(first: str) -> None:
    module = Tied(first).eval()
    head = head_of(torch.export.export(module, (torch.zeros(2, dtype=torch.int64),)), [0])
    for pattern in (*head, "embed.*", "head.*"):
        learn(module, trainable=[pattern])
        assert [name for name, one in module.named_parameters() if one.requires_grad] == [f"{first}.weight"]
