"""A difference counts in every part of a tensor, in every sample that is asked, in large numbers and in integers."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from halfeven.exporters.differing import diff
from halfeven.exporters.differing.onnx_side import OnnxSide

from tests.exporters.onnx.onnx_files import parsed

RANDOM = np.random.default_rng(0)
WEIGHT = RANDOM.standard_normal((8, 8)).astype(np.float32)


def file_of(path: Path, text: str, **weights: np.ndarray) -> Path:
    onnx.save(parsed(text, weights), path)
    return path


def compared(a: Path, b: Path, x: np.ndarray) -> Any:
    samples = a.with_name("x.npz")
    np.savez(samples, x=x)
    return diff.differences(OnnxSide(a), OnnxSide(b), samples)


@pytest.mark.parametrize("batch", ["1", "2", "3", "4", "n"])
@pytest.mark.parametrize("row", [*range(4), *range(60, 64)])
def test_each_of_the_first_four_and_the_last_four_samples_is_compared(
    tmp_path: Path, row: int, batch: str
) -> None:
    text = f"g (float[{batch},8] x) => (float[{batch},8] y) {{ y = Clip(x, low, high) }}"
    a, b = (
        file_of(tmp_path / f"{name}.onnx", text, low=np.float32(-1e6), high=np.float32(high))
        for name, high in (("a", 1e6), ("b", 5))
    )
    x = np.zeros((64, 8), np.float32)
    x[:, 0] = 1
    assert compared(a, b, x)["equal"]
    x[row] = 50
    assert compared(a, b, x)["first"]["tensor"] == "y"


def test_each_sample_of_a_file_that_is_not_batched_is_compared(tmp_path: Path) -> None:
    text = "g (float[8] x) => (float[8] y) { y = Clip(x, low, high) }"
    a, b = (
        file_of(tmp_path / f"{name}.onnx", text, low=np.float32(-1e6), high=np.float32(high))
        for name, high in (("a", 1e6), ("b", 5))
    )
    x = np.ones((6, 8), np.float32)
    assert compared(a, b, x)["equal"]
    x[1] = 50
    assert compared(a, b, x)["first"]["tensor"] == "y"
