"""An error on a sample that chose the plan counts against a half, although others judge it."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from halfeven.models.engines.load import load_half, load_original
from halfeven.models.store.store import Store

from tests.command_line import run
from tests.exporters.onnx.onnx_files import parsed
from tests.model_folders import tensor, write_folder

STEEP = """
import torch
from torch import nn

class Steep(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(16, 8, bias=False)

    def forward(self, x):
        hidden = self.one(x)
        return 1 / (hidden.abs() + 0.02)

def build():
    return Steep()
"""
CPU = torch.device("cpu")
NEAR, FAR = 0.01, 1.0  # to the pole, of the number closest to it in a row
LIMIT_U = 4.5  # of the gate; the kernels of an engine add up in another order than those of a proof


@pytest.fixture
def weights(random: np.random.Generator) -> np.ndarray:
    return random.standard_normal((16, 8)).astype(np.float32)


def samples(random: np.random.Generator, weights: np.ndarray, row: int) -> dict[str, np.ndarray]:
    """64 samples; that of ``row`` is close to the pole, where a half errs by far more than 4u."""
    many = random.standard_normal((20_000, 16)).astype(np.float32)
    distances = np.abs(many @ weights).min(1)
    chosen = many[distances > FAR][:64]
    chosen[row] = many[distances < NEAR][0]
    return {"x": chosen}


@pytest.mark.slow
@pytest.mark.parametrize("row", [5, 6], ids=["a sample that chooses the plan", "a sample that judges"])
@pytest.mark.parametrize("form", ["onnx", "torch", "live"])
def test_no_half_is_proven_that_errs_beyond_the_limit_on_a_sample(
    form: str, row: int, weights: np.ndarray, random: np.random.Generator, tmp_path: Path
) -> None:
    given = samples(random, weights, row)
    if form == "onnx":
        text = "g (float[n,16] x) => (float[n,8] y) { h = MatMul(x, w) a = Abs(h) b = Add(a, e) y = Reciprocal(b) }"
        onnx.save(parsed(text, {"w": weights, "e": np.array(0.02, np.float32)}), tmp_path / "net.onnx")
        np.savez(tmp_path / "samples.npz", x=given["x"])
        asked = [tmp_path / "net.onnx", "--samples", tmp_path / "samples.npz"]
    else:
        state = {"one.weight": torch.from_numpy(weights.T.copy())}
        inputs, outputs = [tensor("x", "FP32", [-1, 16])], [tensor("y", "FP32", [-1, 8])]
        asked = [
            write_folder(
                tmp_path / "net",
                STEEP,
                inputs=inputs,
                outputs=outputs,
                samples=given,
                weights=state,
                form=form,
            )
        ]
    code, facts, said = run("convert", *asked, "--store", tmp_path / "store")
    version = Store(tmp_path / "store").version("net", 1)
    made = facts["forms"][form]
    if made["passed"] and made["half_nodes"]:
        fp32, half = (load(version, form, CPU).run([[given["x"]]])[0] for load in (load_original, load_half))
        assert np.abs(half - fp32).max() <= LIMIT_U * 2**-11 * np.abs(fp32).max(), said
    else:
        assert code == 3 or "it is served in FP32" in facts["reason"], said
