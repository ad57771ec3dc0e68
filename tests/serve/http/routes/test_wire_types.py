"""A model that is smaller on the wire, converted and served: the same answers to the bit, and it says what it takes."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from halfeven.exporters.conversion.convert import Options, convert
from halfeven.models.store.store import Store
from halfeven.serve.server import build
from halfeven.serve.settings import Settings
from tritonclient.utils import InferenceServerException

from tests.kept import kept_store
from tests.model_folders import tensor, write_folder
from tests.patience import PATIENCE_S
from tests.serve.conftest import running
from tests.serve.http.bodies import png
from tests.server_process import settle

SEEING = """
import torch
from torch import nn

def build():
    torch.manual_seed(7)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
"""
PICTURE = {"color": "RGB", "scale": 1 / 255, "mean": [0.5, 0.4, 0.3], "std": [0.25, 0.5, 0.75]}
IMAGE = tensor("image", "FP32", [-1, 3, 8, 8], picture=PICTURE)
SCORES = (tensor("scores", "FP32", [-1, 5]),)
SMALL = {"wide": {}, "small": {"wire_datatype": "UINT8"}}


def _convert(where: Path) -> None:
    """One network under two names: as it is, and with pixels on the wire."""
    for name, wire in SMALL.items():
        inputs = [IMAGE | wire]
        folder = write_folder(
            where / name, SEEING, inputs=inputs, outputs=SCORES, form="torch", max_batch_size=8
        )
        converted = convert(folder, Store(where / "store"), Options(forms=("torch",)))
        assert converted.version.spec().inputs[0].datatype == "FP32"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    kept = kept_store(__file__, _convert) / "store"
    store = Store(Path(shutil.copytree(kept, tmp_path_factory.mktemp("wire") / "store")))
    settle(store)
    settings: dict[str, Any] = {"store": store.root, "device": "cpu"}
    app, roster = build(Settings(**settings), store)
    with running(app) as address:
        roster.wait(PATIENCE_S)
        yield address


def infer(address: str, name: str, array: np.ndarray, datatype: str) -> np.ndarray:
    asked = triton.InferInput("image", list(array.shape), datatype)
    asked.set_data_from_numpy(array)
    answer = triton.InferenceServerClient(address).infer(name, [asked]).as_numpy("scores")
    assert answer is not None
    return answer


@pytest.fixture
def pixels() -> np.ndarray:
    return np.random.default_rng().integers(0, 256, (3, 3, 8, 8), np.uint8)


def widened(pixels: np.ndarray) -> np.ndarray:
    """pixel · (scale / std) − mean / std, each step in FP32."""
    mean, std = (np.reshape(PICTURE[key], (3, 1, 1)) for key in ("mean", "std"))
    return pixels.astype(np.float32) * np.float32(PICTURE["scale"] / std) + np.float32(-mean / std)


@pytest.mark.slow
def test_pixels_get_the_answer_of_the_widened_numbers_to_the_bit(address: str, pixels: np.ndarray) -> None:
    wanted = infer(address, "wide", widened(pixels), "FP32")
    np.testing.assert_array_equal(infer(address, "small", pixels, "UINT8"), wanted)


@pytest.mark.slow
def test_json_and_pictures_carry_pixels_as_well(address: str, pixels: np.ndarray) -> None:
    wanted = infer(address, "small", pixels[:1], "UINT8")
    url = f"http://{address}/v1/models/small:predict"
    picture = png(pixels[0].transpose(1, 2, 0))
    for body in (json.dumps({"instances": pixels[:1].tolist()}).encode(), picture):
        came = httpx.post(url, content=body).json()["predictions"]
        np.testing.assert_array_equal(np.array(came, np.float32), wanted)
    bad = httpx.post(url, json={"instances": (pixels[:1] / 255).tolist()})
    assert bad.status_code == 400 and "expected an integer for UINT8 (0 to 255)" in bad.json()["detail"]


@pytest.mark.slow(seconds=6)
def test_the_model_says_what_it_takes_and_refuses_what_it_computes_in(
    address: str, pixels: np.ndarray
) -> None:
    client = triton.InferenceServerClient(address)
    assert client.get_model_metadata("small")["inputs"][0]["datatype"] == "UINT8"
    assert client.get_model_config("small")["input"][0]["data_type"] == "TYPE_UINT8"
    with pytest.raises(
        InferenceServerException, match="data-type is 'FP32', but model 'small' expects 'UINT8'"
    ):
        infer(address, "small", widened(pixels), "FP32")
