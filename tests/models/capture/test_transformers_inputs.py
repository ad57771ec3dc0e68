"""Samples of a transformers model decide what it takes; without them its main input and its configuration do."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from halfeven.models.capture import describing, failures
from torch import Tensor, nn


class Text(nn.Module):
    main_input_name, config = "input_ids", SimpleNamespace(max_position_embeddings=40)

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        bbox: Tensor | None = None,
    ) -> Any:
        found = self.table(input_ids)
        for more in (attention_mask, token_type_ids):
            found = found if more is None else found * more[..., None]
        return {"logits": found if bbox is None else found + bbox}


class Series(nn.Module):
    main_input_name, config = "past_values", SimpleNamespace()

    def forward(self, past_values: Tensor, past_time_features: Tensor) -> Tensor:
        return past_values + past_time_features.mean(-1)


def inputs_of(module: nn.Module, **given: Tensor) -> dict[str, list[int | str]]:
    with torch.no_grad():
        found, _ = describing.of_transformers(torch, module, given)
    return {tensor["name"]: tensor["shape"] for tensor in found["inputs"]}


def test_a_text_takes_the_names_of_its_samples_and_every_length() -> None:
    ids, length = torch.ones(4, 7, dtype=torch.int64), [-1, "length=1..40"]
    assert inputs_of(Text()) == {"input_ids": length, "attention_mask": length}
    assert inputs_of(Text(), input_ids=ids) == {"input_ids": length}
    both = inputs_of(Text(), input_ids=ids, token_type_ids=ids)
    assert both == {"input_ids": length, "token_type_ids": length}


def test_a_text_with_something_else_has_the_sizes_of_its_samples() -> None:
    found = inputs_of(Text(), input_ids=torch.ones(4, 7, dtype=torch.int64), bbox=torch.ones(4, 7, 4))
    assert found == {"input_ids": [-1, 7], "bbox": [-1, 7, 4]}


def test_a_series_is_known_by_its_samples_alone() -> None:
    with pytest.raises(failures.Refused, match=r"'past_values'.*--samples FILE"):
        inputs_of(Series())
    wide = torch.randn(4, 6, 2, dtype=torch.float64)  # as numpy draws it
    found = inputs_of(Series(), past_values=torch.randn(4, 6), past_time_features=wide)
    assert found == {"past_values": [-1, 6], "past_time_features": [-1, 6, 2]}


class Asks(nn.Module):
    main_input_name, config = "input_ids", SimpleNamespace()

    def forward(self, input_ids: Tensor, bbox: Tensor | None = None) -> Tensor:
        assert bbox is not None
        return input_ids[..., None] + bbox


def test_a_model_that_needs_more_than_is_guessed_asks_for_samples() -> None:
    with pytest.raises(AssertionError) as caught:
        inputs_of(Asks())
    request = {"folder": "/", "path": [], "memory_limit_bytes": 0}
    assert "Asks does not run with inputs guessed" in failures.described(caught.value, request)["error"]
