"""Load, unload and index over a real server, by tritonclient."""

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from halfeven.models.errors import EngineFailed
from tritonclient.utils import InferenceServerException


@pytest.fixture
def client(server: str) -> Iterator[Any]:
    with triton.InferenceServerClient(server) as client:
        yield client


def test_a_model_is_unloaded_and_loaded_again(client: Any, http: httpx.Client) -> None:
    client.unload_model("double")
    assert not client.is_model_ready("double")
    with pytest.raises(InferenceServerException, match="Request for unknown model: 'double'"):
        client.infer("double", [infer_input()])
    states = {
        entry["name"]: (entry["state"], entry["reason"]) for entry in client.get_model_repository_index()
    }
    assert states == {"double": ("UNAVAILABLE", "unloaded"), "scores": ("READY", ""), "pair": ("READY", "")}
    ready = http.post("/v2/repository/index", content=b'{"ready": true}').json()
    assert {entry["name"] for entry in ready} == {"scores", "pair"}
    client.load_model("double")
    assert (
        client.is_model_ready("double") and client.infer("double", [infer_input()]).as_numpy("y").sum() == 8
    )


def infer_input() -> triton.InferInput:
    return triton.InferInput("x", [1, 4], "FP32").set_data_from_numpy(np.ones((1, 4), np.float32))


def test_success_has_an_empty_body(http: httpx.Client) -> None:
    for verb in ("unload", "load"):
        answer = http.post(f"/v2/repository/models/double/{verb}")
        assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize(
    ("name", "config", "status", "fault"),
    [
        ("nobody", None, 404, "failed to load 'nobody', the store has no model 'nobody'"),
        ("double", '{"backend": "x"}', 400, "failed to load 'double', the config's 'backend' cannot be set"),
    ],
)
def test_a_load_that_cannot_be_is_refused_and_the_model_goes_on(
    name: str, config: str | None, status: int, fault: str, client: Any
) -> None:
    with pytest.raises(InferenceServerException) as refused:
        client.load_model(name, config=config)
    assert str(refused.value).startswith(f"[{status}] {fault}")
    assert client.is_model_ready("double")


def test_a_version_that_fails_to_load_is_our_fault_and_said(client: Any, roster: Any) -> None:
    roster.load_fault = EngineFailed("the device raised X")
    with pytest.raises(
        InferenceServerException, match=r"^\[500\] failed to load 'double', the device raised X"
    ):
        client.load_model("double")
    assert client.is_model_ready("double")


def test_model_files_are_refused_with_the_way_out(http: httpx.Client, roster: Any) -> None:
    body = {"parameters": {"config": "{}", "file:1/model.onnx": "QUJD"}}
    answer = http.post("/v2/repository/models/double/load", json=body)
    assert answer.status_code == 400 and "halfeven convert FOLDER" in answer.json()["error"]
    large = http.post(
        "/v2/repository/models/double/load", content=b'{"parameters": {"file:1": "' + bytes(5000)
    )
    assert large.status_code == 413
    assert roster.asked_to_load == []


def test_unloading_who_is_not_there_is_refused(client: Any) -> None:
    with pytest.raises(InferenceServerException, match=r"^\[404\].*'nobody' is not found"):
        client.unload_model("nobody")


@pytest.mark.parametrize("verb", ["load", "unload"])
@pytest.mark.parametrize(
    "name", ["%2e%2e", "..%5c", "%00", ".hidden", "-dash", "a%20b", "%E2%82%AC", "a" * 129]
)
def test_a_name_that_cannot_be_one_never_reaches_the_store(
    verb: str, name: str, http: httpx.Client, roster: Any
) -> None:
    answer = http.post(f"/v2/repository/models/{name}/{verb}")
    assert answer.status_code == 400 and "invalid model name" in answer.json()["error"]
    assert roster.asked_to_load == []
