"""Finds the rows of a batch that make the loss, or a buffer of the module, not finite. Needs torch and nothing else."""

from collections.abc import Callable

import torch
from torch import Tensor

IsBad = Callable[[Tensor], bool]  # whether a pass over these rows alone makes the loss or a buffer not finite


def culprits(is_bad: IsBad, batch: Tensor, good: Tensor) -> Tensor:
    """The rows of a batch that make the loss or a buffer not finite. Each suspect is passed together with good rows,
    because BatchNorm cannot compute the variance of one row.

    ``good``: rows known to be harmless; where there are none, two are looked for in the batch. Nothing is found where
    that fails, or where only several rows together do harm. About log2(rows) passes for each culprit.
    """
    if len(batch) == 1:
        return batch
    if not len(good):
        good = next((pair for pair in batch.split(2) if len(pair) == 2 and not is_bad(pair)), batch[:0])
        batch = batch[~torch.isin(batch, good)]
    return torch.sort(_among(is_bad, batch, good)).values if len(good) else batch[:0]


def _among(is_bad: IsBad, suspects: Tensor, good: Tensor) -> Tensor:
    if not len(suspects) or not is_bad(torch.cat([suspects, good])):
        return suspects[:0]
    if len(suspects) == 1:
        return suspects
    return torch.cat([_among(is_bad, half, good) for half in suspects.tensor_split(2)])
