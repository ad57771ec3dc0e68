"""The examples of a model's page are requests that the model takes, whatever its inputs are."""

import json
import shlex
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from halfeven.models.errors import BadRequest
from halfeven.models.spec.spec import ModelSpec, TensorSpec
from halfeven.models.spec.value_range import ValueRange
from halfeven.serve.dashboard.examples import curl, example, python, read_typed
from halfeven.serve.http.codecs.predict import read_body_of, read_predict
from halfeven.serve.http.limits.memory_budget import unlimited

from tests.serve.dashboard.conftest import typed
from tests.specs import tensor

Y = tensor("y", "FP32", -1, 2)
IDS = tensor("ids", "INT64", -1, "length=1..6", range=ValueRange((5,), (9,)))
PAIRS = tensor("pair", "INT32", -1, 2, range=ValueRange((3, 70), (4, 90)))
SPECS = [
    ModelSpec("plain", (tensor("x", "FP32", -1, 4),), (Y,), 8),
    ModelSpec("free", (tensor("x", "FP16", -1, -1, "2..9"), tensor("on", "BOOL", -1, "3..3")), (Y,), 8),
    ModelSpec("ids", (IDS, tensor("mask", "UINT8", -1, "length=1..6")), (Y,), 8),
    ModelSpec("places", (PAIRS,), (Y,), 8),
    ModelSpec("large", (tensor("x", "FP32", -1, 3, 32, 32), tensor("z", "INT64", -1)), (Y,), 8),
    ModelSpec("brain", (tensor("x", "BF16", -1, 3),), (Y,), 8),
    ModelSpec("large-brain", (tensor("x", "BF16", -1, 300),), (Y,), 8),
    ModelSpec("one", (tensor("it's x", "FP64", 2, 3),), (Y,), 0),
    ModelSpec("scalar", (tensor("x", "FP32"),), (Y,), 0),
]


@pytest.fixture(params=SPECS, ids=[spec.name for spec in SPECS])
def spec(request: Any) -> ModelSpec:
    return request.param


def test_the_command_for_a_shell_sends_what_the_model_takes(
    spec: ModelSpec, tmp_path: Any, monkeypatch: Any
) -> None:
    *makes, asks = curl(spec, "http://localhost:8000", needs_key=True).splitlines()
    words = shlex.split(asks)
    assert words[:3] == ["curl", "-H", "Authorization: Bearer $HALFEVEN_API_KEY"]
    assert words[-1] == f"http://localhost:8000/v1/models/{spec.name}:predict"
    if makes:
        monkeypatch.chdir(tmp_path)
        exec(shlex.split(makes[0])[2], {})
        read = read_body_of(spec, "", (tmp_path / "inputs.npz").read_bytes(), 2**20, unlimited())
    else:
        read = read_predict(spec, words[4].encode(), unlimited())
    assert read.rows == 1


def test_the_program_sends_what_the_model_takes(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []

    class Client:
        def __init__(self, url: str) -> None:
            assert url == "http://localhost:8000"

        def infer(self, name: str, inputs: Any) -> None:
            sent.append((name, spec.as_called().check_inputs(inputs)))

    text = python(spec, "http://localhost:8000").replace("import halfeven as he", "")
    exec(text, {"he": type("he", (), {"Client": Client})})
    assert sent == [(spec.name, 1)]


def test_the_form_as_it_is_filled_in_is_taken(spec: ModelSpec) -> None:
    fields = [json.dumps(example(spec, one)).encode() for one in spec.inputs]
    body, kind = typed(*fields)
    assert read_typed(spec, kind, body, unlimited()).rows == 1


@pytest.mark.parametrize(("came", "numbers"), [(b"[1, 2]", 2), (b"[]", 0)])
def test_a_list_in_the_form_of_one_number_is_refused(came: bytes, numbers: int) -> None:
    body, kind = typed(came)
    with pytest.raises(BadRequest, match=f"input 'x': expected one number, got {numbers}"):
        read_typed(SPECS[-1], kind, body, unlimited())


def test_an_array_file_is_taken_with_and_without_the_axis_of_the_batch(tmp_path: Any) -> None:
    spec = ModelSpec("m", (tensor("x", "BF16", -1, 2, 3),), (Y,), 8)
    for shape in ((2, 3), (1, 2, 3)):
        np.save(tmp_path / "x.npy", np.arange(6).reshape(shape).astype(ml_dtypes.bfloat16))
        body, kind = typed((tmp_path / "x.npy").read_bytes())
        (array,) = read_typed(spec, kind, body, unlimited()).arrays
        assert array.shape == (1, 2, 3) and array.ravel().tolist() == [0, 1, 2, 3, 4, 5]


def test_a_picture_is_sent_as_a_file() -> None:
    entry = {"size": [8, 8], "color": "L"}
    shot: TensorSpec = tensor("shot", "FP32", -1, 1, 8, 8, picture=entry)
    assert (
        curl(ModelSpec("m", (shot,), (Y,), 8), "http://h", False)
        == "curl -F shot=@picture.png http://h/v1/models/m:predict"
    )
