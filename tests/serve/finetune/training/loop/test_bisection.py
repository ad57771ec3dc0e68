"""Bisection names every culprit and nobody else, in few passes, and never asks one row alone."""

import math

import numpy as np
import pytest
import torch
from halfeven.serve.finetune.training.loop.passes import culprits
from torch import Tensor


class Asked:
    """A test that is bad where one of the culprits is among the rows; like BatchNorm it needs two rows."""

    def __init__(self, bad: set[int]) -> None:
        self.bad, self.passes = bad, 0

    def __call__(self, rows: Tensor) -> bool:
        assert len(rows) > 1
        self.passes += 1
        return bool(self.bad & set(rows.tolist()))


@pytest.mark.parametrize("good", [[], [100, 101]])
@pytest.mark.parametrize("many", [1, 2, 5])
def test_exactly_the_culprits_are_found_in_few_passes(good: list[int], many: int) -> None:
    batch = torch.tensor(np.random.default_rng().permutation(64))
    bad = set(batch[torch.randperm(64)[:many]].tolist())
    asked = Asked(bad)
    assert culprits(asked, batch, torch.tensor(good, dtype=torch.int64)).tolist() == sorted(bad)
    assert asked.passes <= many * (2 * math.log2(64) + 2) + 1


def test_without_a_good_row_or_where_rows_spoil_only_together_none_is_named() -> None:
    nobody = torch.empty(0, dtype=torch.int64)
    assert culprits(Asked({0, 2}), torch.arange(4), nobody).tolist() == []
    together = lambda rows: {1, 6} <= set(rows.tolist())  # noqa: E731
    assert culprits(together, torch.arange(8), torch.tensor([9, 10])).tolist() == []


def test_a_batch_of_one_row_is_its_own_culprit() -> None:
    assert culprits(Asked({3}), torch.tensor([3]), torch.tensor([1, 2])).tolist() == [3]
