"""A fault for the self-test to find."""

import torch


def one_bit_off(weight: torch.Tensor) -> torch.Tensor:
    changed = weight.clone()
    changed.view(torch.int16)[0] ^= 1
    return changed
