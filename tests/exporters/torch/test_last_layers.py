"""The head of a captured program: the last layer before an output, through norms, scales and transposed weights."""

import pytest
import torch
from halfeven.exporters.torch.last_layers import head_of
from torch import Tensor, nn


class Net(nn.Module):
    """Two outputs on one body: a linear layer behind a norm, and a weight that is transposed and tied to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.norm = nn.Embedding(9, 4), nn.Linear(4, 4), nn.LayerNorm(4)
        self.score, self.scale = nn.Linear(4, 2), nn.Parameter(torch.ones(2))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.norm(self.body(self.embed(tokens)).relu())
        return self.score(hidden).softmax(-1) * self.scale, hidden @ self.embed.weight.T


@pytest.mark.parametrize(
    ("outputs", "head"),
    [
        ({0}, ["score.weight", "score.bias", "scale"]),
        ({1}, ["embed.weight"]),
        ({0, 1}, ["score.weight", "score.bias", "scale", "embed.weight"]),
    ],
)
def test_the_head_is_the_last_layer_before_the_outputs(outputs: set[int], head: list[str]) -> None:
    program = torch.export.export(Net().eval(), (torch.tensor([[1, 2, 3]]),))
    assert set(head_of(program, outputs)) == set(head)


def test_a_program_without_parameters_has_no_head() -> None:
    assert head_of(torch.export.export(nn.Tanh(), (torch.ones(2),)), {0}) == []
