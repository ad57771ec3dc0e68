"""The generators of torch, numpy and Python: seeded together, kept and put back. Needs torch and numpy."""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seed_everything(seed: int) -> None:
    """The generators of torch, numpy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@contextmanager
def generators_untouched() -> Iterator[None]:
    """Whatever is drawn inside, the generators are as before."""
    before = torch_generators(), random.getstate(), numpy_state()
    try:
        yield
    finally:
        set_generators(*before)


def torch_generators() -> dict[str, Tensor]:
    found = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        found |= {f"cuda{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return found


def numpy_state() -> list[Any]:
    name, keys, *rest = np.random.get_state()
    return [name, np.asarray(keys).tolist(), *rest]


def set_torch_generators(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    for index in range(len(states) - 1):
        torch.cuda.set_rng_state(states[f"cuda{index}"], index)


def set_generators(of_torch: Mapping[str, Tensor], of_python: Any, of_numpy: Any) -> None:
    set_torch_generators(of_torch)
    version, words, gauss = of_python
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = of_numpy
    np.random.set_state((name, np.array(keys, np.uint32), *rest))
