"""``halfeven predict``: each kind of file to a running server, and the answer printed or written."""

import base64
import io
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from halfeven.models.errors import BadInput, EngineFailed, NotReady, UnknownName
from halfeven.models.spec.spec import ModelSpec
from halfeven.serve.cli.client import predict_file
from PIL import Image
from safetensors.numpy import save_file

from tests.serve.cli.odd_server import odd
from tests.serve.conftest import FakeRoster, FakeServed
from tests.specs import tensor

ENTRY = {"size": [4, 4], "color": "L"}
PAINTING = ModelSpec(
    "painting",
    (tensor("image", "FP32", -1, 1, 4, 4, picture=ENTRY),),
    (tensor("painted", "FP32", -1, 1, 4, 4, kind="image", picture=ENTRY),),
    8,
)
ROWS = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.float32)


@pytest.fixture
def url(server: str, roster: FakeRoster) -> str:
    roster.models["painting"] = FakeServed(PAINTING, lambda x: [255 - x], roster.models["double"].prepared)
    return f"http://{server}"


@pytest.fixture
def picture(tmp_path: Path) -> tuple[Path, np.ndarray]:
    pixels = np.random.default_rng().integers(0, 256, (4, 4), np.uint8)
    path = tmp_path / "picture.PNG"
    Image.fromarray(pixels).save(path)
    return path, pixels


def files(folder: Path) -> dict[str, Path]:
    np.save(folder / "x.npy", ROWS)
    np.savez(folder / "x.npz", x=ROWS)
    save_file({"x": ROWS, "target:y": ROWS}, folder / "x.safetensors")
    (folder / "x.json").write_text(json.dumps({"instances": ROWS.tolist()}))
    return {suffix: folder / f"x.{suffix}" for suffix in ("npy", "npz", "safetensors", "json")}


@pytest.mark.parametrize("suffix", ["npy", "json"])
def test_arrays_and_json_are_predicted(suffix: str, url: str, tmp_path: Path) -> None:
    facts = predict_file(url, "double", files(tmp_path)[suffix])
    assert facts["predictions"] == (ROWS * 2).tolist() and facts["headers"]["halfeven-version"] == "3"


@pytest.mark.parametrize("suffix", ["npy", "npz", "json"])
def test_a_version_may_be_asked_by_its_number(suffix: str, url: str, tmp_path: Path) -> None:
    file = files(tmp_path)[suffix]
    assert predict_file(url, "double@3", file)["headers"]["halfeven-version"] == "3"
    with pytest.raises(UnknownName, match="unknown model: 'double' is not found"):
        predict_file(url, "double@9", file)


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_named_arrays_are_inferred_over_the_open_inference_protocol(
    suffix: str, url: str, tmp_path: Path
) -> None:
    (output,) = predict_file(url, "double", files(tmp_path)[suffix])["outputs"]
    assert output["name"] == "y" and output["data"] == (ROWS * 2).ravel().tolist()


@pytest.mark.parametrize("suffix", ["npy", "npz", "safetensors", "json"])
@pytest.mark.parametrize("out", ["answer.npy", "answer.npz"])
def test_the_answer_may_go_into_a_numpy_file(suffix: str, out: str, url: str, tmp_path: Path) -> None:
    facts = predict_file(url, "double", files(tmp_path)[suffix], tmp_path / out)
    assert facts["file"] == str(tmp_path / out)
    came = np.load(tmp_path / out)
    np.testing.assert_array_equal(came if out.endswith("npy") else came["y"], ROWS * 2)


def test_a_picture_is_sent_as_it_is_and_a_painted_one_comes_back(
    url: str, picture: tuple[Path, np.ndarray], tmp_path: Path
) -> None:
    path, pixels = picture
    (reply,) = predict_file(url, "painting", path)["predictions"]
    predict_file(f"{url}/", "painting", path, tmp_path / "painted.png")
    for data in (base64.b64decode(reply["b64"]), (tmp_path / "painted.png").read_bytes()):
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(data))), 255 - pixels)


@pytest.mark.slow
def test_what_cannot_be_read_sent_or_written_is_said(
    url: str, picture: tuple[Path, np.ndarray], tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=r"no\.png cannot be read: No such file"):
        predict_file(url, "painting", tmp_path / "no.png")
    for name in ("pipe.json", "pipe.npy", "pipe.npz", "pipe.png", "pipe.safetensors"):
        os.mkfifo(tmp_path / name)  # to be read, it would be waited for without end
        with pytest.raises(BadInput, match=f"{name}:? cannot be read.*not a regular file"):
            predict_file(url, "double", tmp_path / name)
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(BadInput, match=r"a\.txt: expected \.png, \.jpg, \.npy"):
        predict_file(url, "double", tmp_path / "a.txt")
    with pytest.raises(BadInput, match=r"refused with 400: .*takes no pictures"):
        predict_file(url, "double", picture[0])
    with pytest.raises(BadInput, match=r"--out .*: expected a name that ends with one of .png, .npy, .npz"):
        predict_file(url, "double", files(tmp_path)["npy"], tmp_path / "a.jpg")
    with pytest.raises(BadInput, match=r"--out .*: this answer is none \(application/json\)"):
        predict_file(url, "double", files(tmp_path)["npy"], tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()
    with pytest.raises(NotReady, match="is `halfeven serve` running there"):
        predict_file("http://127.0.0.1:9", "double", picture[0])


def test_a_server_that_is_none_of_halfevens_is_said(tmp_path: Path) -> None:
    (tmp_path / "named.json").write_text(json.dumps({"x": ROWS.tolist()}))
    bytes_model = {"inputs": [{"name": "x", "datatype": "BYTES", "shape": [1]}]}
    for said in (b"<html>", [1], 3, {"a": 1}, {"inputs": [{"name": "x"}]}, bytes_model):
        with odd({f"/v2/models/m{more}": said for more in ("", "/infer")}) as (url, _):
            with pytest.raises(EngineFailed, match="does not"):
                predict_file(url, "m", tmp_path / "named.json")
            if not isinstance(said, dict):
                with pytest.raises(EngineFailed, match=r"does not answer with (JSON:|a JSON object)"):
                    predict_file(url, "m", files(tmp_path)["npz"])


@pytest.mark.parametrize("url", ["http://[::1", "http://localhost/ü", "localhost:8000", "http://a..b:1"])
def test_a_url_that_is_none_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=f"--url: expected http://HOST:PORT.*, got '{re.escape(url)}"):
        predict_file(url, "m", files(tmp_path)["npz"])


def test_an_array_of_no_datatype_of_a_model_is_refused_by_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "c.npz", x=ROWS.astype(np.complex64))
    with pytest.raises(BadInput, match=r"'x': expected one of the datatypes .*, got complex64"):
        predict_file("http://127.0.0.1:9", "double", tmp_path / "c.npz")


@pytest.mark.parametrize("suffix", ["npz", "safetensors", "json"])
def test_the_name_of_a_file_may_end_in_capitals(suffix: str, url: str, tmp_path: Path) -> None:
    file = files(tmp_path)[suffix]
    assert predict_file(url, "double", file.rename(tmp_path / f"X.{suffix.upper()}"))["status"] == 200
