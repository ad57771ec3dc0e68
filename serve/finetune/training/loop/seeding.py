"""The generators of torch, numpy and Python, seeded together. Needs torch and numpy."""

import random

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """The generators of torch, numpy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
