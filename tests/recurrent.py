"""A small recurrent model as folders: its state has the batch on axis 1, as ``nn.GRU`` gives and takes it."""

from pathlib import Path
from typing import Any

import numpy as np

from tests.model_folders import samples_of, tensor, write_folder

LAYERS, STEPS, WIDTH, HIDDEN = 2, 5, 4, 8
GRU = f"""
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU({WIDTH}, {HIDDEN}, num_layers={LAYERS}, batch_first=True)
        self.score = nn.Linear({HIDDEN}, 3)

    def forward(self, x, h):
        hidden, h = self.gru(x, h)
        return self.score(hidden[:, -1]), h

def build():
    torch.manual_seed(11)
    return Net()
"""


def state(name: str, layers: int | str = LAYERS, axis: int = 1) -> dict[str, Any]:
    return tensor(name, "FP32", [layers, -1, HIDDEN], batch_axis=axis)


def recurrent_folder(path: Path, code: str = GRU, **settings: Any) -> Path:
    """``settings`` as for `write_folder`, which wins over what stands here."""
    usual: dict[str, Any] = {
        "inputs": [tensor("x", "FP32", [-1, STEPS, WIDTH]), state("h")],
        "outputs": [tensor("y", "FP32", [-1, 3]), state("hn")],
        "samples": samples_of({"x": (STEPS, WIDTH), "h": (LAYERS, HIDDEN)}, 24),
        "max_batch_size": 8,
    }
    return write_folder(path, code, **usual | settings)


def requests(rows: int) -> dict[str, np.ndarray]:
    """``rows`` fresh rows as a caller sends them."""
    random = np.random.default_rng()
    x = random.standard_normal((rows, STEPS, WIDTH), np.float32)
    return {"x": x, "h": random.standard_normal((LAYERS, rows, HIDDEN), np.float32)}
