"""Finds the rows of a batch that make the loss, or a buffer of the module, not finite. Needs torch and nothing else."""

from collections.abc import Callable

import torch
from torch import Tensor

IsBad = Callable[[Tensor], bool]  # whether these rows, passed alone, spoil the loss or a buffer


def culprits(is_bad: IsBad, batch: Tensor, good: Tensor) -> Tensor:
    """The rows that spoil a batch, each asked together with good ones: BatchNorm has no variance of one row.

    ``good``: rows that are known to be; where there are none, two are looked for in the batch. No culprit is found
    where there are none either, or where rows spoil only together. About log2(rows) passes for each culprit.
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
