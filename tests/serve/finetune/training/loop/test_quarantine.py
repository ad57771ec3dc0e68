"""Bad rows cost nothing but themselves: from the file to the trained module, beside the same file without them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from halfeven.models.spec.spec import Dim, ModelSpec, TensorSpec
from halfeven.serve.finetune.data.datasets import TrainingData, read_training
from halfeven.serve.finetune.training.loop import amp
from halfeven.serve.finetune.training.loop.training_terms import Settings
from safetensors.numpy import save_file
from torch import nn
from torch.nn.functional import cross_entropy

ROWS, CLASSES = 240, 4
BAD = {11: np.nan, 60: np.nan, 119: np.nan, 200: 1e30}
SPEC = ModelSpec(
    "net",
    (TensorSpec("x", "FP32", (Dim(), Dim(8, 8))),),
    (TensorSpec("y", "FP32", (Dim(), Dim(CLASSES, CLASSES)), kind="logits"),),
    max_batch_size=64,
)
FIRST: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(8),
    "layer norm": lambda: nn.LayerNorm(8),
}


def rows() -> dict[str, np.ndarray]:
    """Classes around centres that are far apart."""
    random = np.random.default_rng()
    classes = random.integers(0, CLASSES, ROWS)
    centres = 6 * np.eye(CLASSES, 8)
    x = centres[classes] + random.standard_normal((ROWS, 8))
    return {"x": x.astype(np.float32), "target:y": classes}


def trained(data: TrainingData, first: str, precision: str) -> nn.Module:
    """The trained net; every float buffer of it is finite after every step."""
    torch.manual_seed(0)
    net = nn.Sequential(FIRST[first](), nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    x, y = torch.tensor(data.samples.arrays["x"]), torch.tensor(data.samples.targets["y"])
    settings = Settings(
        n_epochs=8,
        batch_size=32,
        learning_rate=0.02,
        precision=precision,
        bad_rows="quarantine",
        init_scale=256.0,
    )
    for record in amp.train(
        net, lambda rows: cross_entropy(net(x[rows]).float(), y[rows]), data.rows, settings
    ):
        assert all(bool(buffer.isfinite().all()) for buffer in net.buffers())
        assert not record.skipped and not record.quarantined
    return net.eval()


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("first", FIRST)
def test_three_rows_of_nan_and_one_of_1e30_are_named_and_cost_no_point(
    first: str, precision: str, tmp_path: Path
) -> None:
    clean = rows()
    spoilt = {name: array.copy() for name, array in clean.items()}
    for row, value in BAD.items():
        spoilt["x"][row, row % 8] = value
    nets = {}
    for name, arrays in (("clean", clean), ("spoilt", spoilt)):
        save_file(arrays, tmp_path / f"{name}.safetensors")
        data = read_training(tmp_path / f"{name}.safetensors", SPEC, quarantine=True)
        assert list(data.quarantined) == (list(BAD) if name == "spoilt" else [])
        nets[name] = trained(data, first, precision)
    fresh = rows()
    right = {
        name: float((net(torch.tensor(fresh["x"])).argmax(-1).numpy() == fresh["target:y"]).mean())
        for name, net in nets.items()
    }
    assert right["clean"] >= 0.95
    assert right["spoilt"] >= right["clean"] - 0.01
