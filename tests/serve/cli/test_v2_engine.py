"""A V2 server as an engine: what is asked of it, and that no answer takes more time or memory than is allowed."""

import json
import threading
from typing import Any

import numpy as np
import pytest
from halfeven.models.errors import BadInput, BadSetting, EngineFailed, NotReady
from halfeven.serve.cli import v2_engine as client
from halfeven.serve.cli.v2_engine import v2_engine

from tests.patience import PATIENCE_S
from tests.serve.cli.odd_server import odd
from tests.serve.conftest import FakeRoster

ROWS = np.array([[1, 2, 3, 4], [5, 6, 7, np.inf]], np.float32)
TENSOR = {"name": "x", "datatype": "FP32", "shape": [-1, 2]}
MODEL = {"inputs": [TENSOR], "outputs": [{**TENSOR, "name": "y"}]}


def doubled(body: bytes) -> dict[str, Any]:
    (x,) = json.loads(body)["inputs"]
    y = {"name": "y", "datatype": "FP32", "shape": x["shape"], "data": [2 * number for number in x["data"]]}
    return {"outputs": [y]}


@pytest.mark.parametrize("path", ["", "/", "/v2/models/double", "/v2/models/double/versions/3"])
def test_a_server_with_binary_tensors_is_asked_in_binary(path: str, server: str, roster: FakeRoster) -> None:
    engine = v2_engine(f"http://{server}{path}", "double", 10, {})
    assert engine.binary
    outputs = engine({"x": ROWS})
    assert outputs.keys() == {"y"} and np.array_equal(outputs["y"], 2 * ROWS)
    assert outputs["y"].dtype == np.float32 and roster.models["double"].rows == [2]


def test_one_without_is_asked_in_json() -> None:
    paths = {"/v2": {"extensions": []}, "/v2/models/m": MODEL, "/v2/models/m/infer": doubled}
    with odd(paths) as (url, asked):
        engine = v2_engine(url, "m", 10, {})
        assert not engine.binary
        assert np.array_equal(engine({"x": ROWS[:1]})["y"], 2 * ROWS[:1])
    assert json.loads(asked[-1][1]) == {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1.0, 2.0, 3.0, 4.0]}]
    }


def test_headers_go_with_every_request() -> None:
    paths = {"/v2": {"extensions": []}, "/v2/models/m": MODEL, "/v2/models/m/infer": doubled}
    with odd(paths, needs=("Authorization", "Bearer k")) as (url, asked):
        assert v2_engine(url, "m", 10, {"Authorization": "Bearer k"})({"x": ROWS[:1]}).keys() == {"y"}
        with pytest.raises(EngineFailed, match="answers 401"):
            v2_engine(url, "m", 10, {})
    assert len(asked) == 4


def test_what_the_server_refuses_is_the_engines_failure_with_its_words(
    server: str, roster: FakeRoster
) -> None:
    with pytest.raises(EngineFailed, match="answers 400"):
        v2_engine(f"http://{server}", "double", 10, {})({"x": ROWS[:, :3]})
    with pytest.raises(EngineFailed, match="answers 404"):
        v2_engine(f"http://{server}", "nobody", 10, {})


def test_an_input_of_another_datatype_is_refused_before_it_is_sent(server: str, roster: FakeRoster) -> None:
    with pytest.raises(BadInput, match="'x' is FP64 in the model and FP32 at"):
        v2_engine(f"http://{server}", "double", 10, {})({"x": ROWS.astype(np.float64)})
    assert roster.models["double"].rows == []


def test_a_redirect_is_not_followed() -> None:
    with (
        odd({"/v2": {}}) as (other, asked),
        odd({"/v2": (302, {"location": f"{other}/v2"}, b"")}) as (url, _),
    ):
        with pytest.raises(EngineFailed, match="answers 302"):
            v2_engine(url, "m", 10, {})
        assert asked == []


@pytest.mark.parametrize(
    "answer",
    [
        b"<html>",
        {"outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [1.0]}]},
        {"outputs": [{"name": "y", "datatype": "BYTES", "shape": [1], "data": ["x"]}]},
        {
            "outputs": [
                {"name": "y", "datatype": "FP32", "shape": [4], "parameters": {"binary_data_size": 16}}
            ]
        },
        {"outputs": [{"name": "y", "datatype": "FP32", "shape": [1], "data": [1.0], "parameters": None}]},
        {"error": "x"},
        [],
        (200, {"Inference-Header-Content-Length": "x"}, b"{}"),
    ],
)
def test_an_answer_that_is_none_of_the_protocol_is_the_engines_failure(answer: Any) -> None:
    with odd({"/v2": {}, "/v2/models/m": MODEL, "/v2/models/m/infer": answer}) as (url, _):
        engine = v2_engine(url, "m", 10, {})
        with pytest.raises(EngineFailed, match="it is not the V2 protocol's"):
            engine({"x": ROWS})


def on_axis(axis: Any) -> dict[str, Any]:
    return {"inputs": [{**TENSOR, "parameters": {"batch_axis": axis}}], "outputs": []}


@pytest.mark.parametrize("side", ["inputs", "outputs"])
def test_a_batch_on_an_axis_that_is_not_there_is_the_engines_failure(side: str) -> None:
    model = {**MODEL, side: [{**MODEL[side][0], "parameters": {"batch_axis": 7}}]}
    with odd({"/v2": {}, "/v2/models/m": model, "/v2/models/m/infer": doubled}) as (url, _):
        engine = v2_engine(url, "m", 10, {})
        with pytest.raises(EngineFailed, match="axis"):
            engine({"x": ROWS[:1]})


@pytest.mark.parametrize(
    "said",
    [b"<html>", {"inputs": 3, "outputs": []}, {}, [], on_axis("x"), on_axis(1e400), on_axis([])],
)
def test_a_description_that_is_none_of_the_protocol_is_the_engines_failure(said: Any) -> None:
    with odd({"/v2": {}, "/v2/models/m": said}) as (url, _), pytest.raises(EngineFailed):
        v2_engine(url, "m", 10, {})


def test_an_answer_beyond_the_bound_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MOST_BYTES", 1000)
    with odd({"/v2": b" " * 1001}) as (url, _), pytest.raises(EngineFailed, match="more than 1000 bytes"):
        v2_engine(url, "m", 10, {})


def test_a_server_that_answers_late_or_never_ends_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    with odd({"/v2": lambda _: ended.wait(PATIENCE_S) and {}}) as (url, _):
        with pytest.raises(NotReady, match=r"within 0\.1 s"):
            v2_engine(url, "m", 0.1, {})
        ended.set()
    clock = iter(range(0, 1000, 6))  # every look at the clock is 6 seconds later
    monkeypatch.setattr(client.time, "monotonic", lambda: float(next(clock)))
    with odd({"/v2": b" " * (3 << 20)}) as (url, _), pytest.raises(NotReady, match="goes on beyond it"):
        v2_engine(url, "m", 10, {})


@pytest.mark.parametrize(
    "url", ["ftp://host/x", "http://", "file:///etc/passwd", "http://[::1", "http://a..b", "http://host/ü"]
)
def test_another_kind_of_url_is_refused(url: str) -> None:
    with pytest.raises(BadSetting, match="expected http://HOST:PORT"):
        v2_engine(url, "m", 10, {})


def test_a_batch_on_another_axis_is_sent_and_read_there() -> None:
    state = {"name": "h", "datatype": "FP32", "shape": [2, -1], "parameters": {"batch_axis": 1}}
    model = {"inputs": [state], "outputs": [{**state, "name": "y"}]}

    def same(body: bytes) -> dict[str, Any]:
        (h,) = json.loads(body)["inputs"]
        return {"outputs": [{**h, "name": "y"}]}

    h = np.arange(6, dtype=np.float32).reshape(3, 2)
    with odd({"/v2": {}, "/v2/models/m": model, "/v2/models/m/infer": same}) as (url, asked):
        assert np.array_equal(v2_engine(url, "m", 10, {})({"h": h})["y"], h)
    (sent,) = json.loads(asked[-1][1])["inputs"]
    assert sent["shape"] == [2, 3] and sent["data"] == [0, 2, 4, 1, 3, 5]
