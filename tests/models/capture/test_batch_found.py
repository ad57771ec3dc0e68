"""The batch of a module is the axis along which a row alone is answered as among others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from halfeven.models.capture import describing
from torch import Tensor, nn

Made = Callable[[], nn.Module]


def seen(module: nn.Module, **given: Tensor) -> dict[str, Any]:
    with torch.no_grad():
        found: dict[str, Any] = describing.seen(torch, module.eval(), given)[0]
    return found


def axes(found: dict[str, Any]) -> list[int]:
    return [tensor["batch_axis"] for tensor in (*found["inputs"], *found["outputs"])]


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 1, enable_nested_tensor=False),
        lambda: nn.MultiheadAttention(8, 2),
    ],
    ids=["encoder", "attention"],
)
def test_a_layer_with_time_in_front_has_its_batch_behind_it(make: Made) -> None:
    x = torch.randn(6, 4, 8)
    names = ["query", "key", "value"] if isinstance(module := make(), nn.MultiheadAttention) else ["src"]
    found = seen(module, **dict.fromkeys(names, x))
    assert found["max_batch_size"] == 64 and axes(found)[: len(names) + 1] == [1] * (len(names) + 1)
    assert found["inputs"][0]["shape"] == [-1, 6, 8]  # the batch in front, as inside


def test_states_have_layers_in_front_of_the_batch() -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(4, 8, 2, batch_first=True)

        def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Any:
            return self.layer(x, (h, c))

    states = {name: torch.randn(2, 5, 8) for name in "hc"}
    found = seen(Steps(), x=torch.randn(5, 3, 4), **states)
    assert found["max_batch_size"] == 64 and axes(found) == [0, 1, 1, 0, 1, 1]


def test_inputs_of_two_lengths_have_their_batch_where_both_have_as_many_rows() -> None:
    class Two(nn.Module):
        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            return source.cumsum(0)[-1] + target.cumsum(0)

    found = seen(Two(), source=torch.randn(7, 4), target=torch.randn(5, 4))
    assert found["max_batch_size"] == 64 and axes(found) == [1, 1, 1]


def test_one_sequence_is_not_batched_and_is_one_sample() -> None:
    class Alone(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean()

    found = seen(Alone(), x=torch.randn(6, 8))
    assert found["max_batch_size"] == 0 and found["whole"]
    assert found["inputs"][0]["shape"] == [-1, 8] == found["outputs"][0]["shape"]


def test_an_output_without_rows_is_why_a_module_is_not_batched() -> None:
    class Loses(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x * 2.0, x.mean()

    found = seen(Loses(), x=torch.randn(6, 8))
    assert found["max_batch_size"] == 0 and not found["whole"]
    assert any("output 'output1' has shape [] for 2 rows" in why for _, _, why in found["doubts"])


def test_what_runs_as_a_whole_only_is_not_batched_and_has_the_sizes_that_it_was_given() -> None:
    class Graph(nn.Module):
        def forward(self, x: Tensor, edges: Tensor, scale: Tensor) -> Tensor:
            return x.index_add(0, edges[1], x[edges[0]] * scale)

    edges = torch.randint(0, 6, (2, 9))
    found = seen(Graph(), x=torch.randn(6, 8), edges=edges, scale=torch.tensor(2.0))
    assert found["max_batch_size"] == 0 and found["whole"]
    assert [tensor["shape"] for tensor in found["inputs"]] == [[6, 8], [2, 9], []]


def test_rows_that_are_answered_alone_as_among_others_are_the_batch() -> None:
    found = seen(nn.Linear(4, 3), input=torch.randn(6, 4))
    assert found["max_batch_size"] == 64 and axes(found) == [0, 0] and not found["whole"]
