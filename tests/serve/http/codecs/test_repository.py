"""The settings that a load may make, and those that it is refused."""

import json
from typing import Any

import pytest
from halfeven.models.errors import BadRequest
from halfeven.models.spec.spec import Batching, Dim, ModelSpec, TensorSpec
from halfeven.serve.http.codecs.metadata import model_config
from halfeven.serve.http.routes.repository import read_index, read_load, read_unload

X = TensorSpec("x", "FP32", (Dim(), Dim(4, 4)))
CURRENT = model_config(
    ModelSpec("m", (X,), (X,), 8, batching=Batching(buckets=(2, 4))), "torch", "cpu", ["3"]
)


def load(config: Any, current: Any = CURRENT) -> Any:
    text = config if isinstance(config, str) else json.dumps(config)
    return read_load(json.dumps({"parameters": {"config": text}}).encode(), current)


@pytest.mark.parametrize("body", [b"", b" ", b"{}", b'{"parameters": {}}', b'{"parameters": null}'])
def test_nothing_asked_is_no_override(body: bytes) -> None:
    assert read_load(body, CURRENT) is None


def test_the_batch_size_and_the_queue_may_be_set_as_numbers_or_text() -> None:
    assert load({"max_batch_size": "16"}) == {"max_batch_size": 16}
    policy = {"max_queue_size": 5}
    asked = {"max_queue_delay_microseconds": "250", "default_queue_policy": policy}
    assert load({"dynamic_batching": asked}) == {"max_queue_delay_us": 250, "max_queue_size": 5}
    assert load({}) == {}


def test_a_queue_without_a_limit_is_triton_s_zero() -> None:
    assert (
        load({"dynamic_batching": {"default_queue_policy": {"max_queue_size": 0}}})["max_queue_size"] > 10**9
    )


def test_the_model_s_own_configuration_may_come_back_changed_where_it_can_be() -> None:
    assert load({**CURRENT, "max_batch_size": 4}) == {
        "max_batch_size": 4,
        "max_queue_delay_us": 0,
        "max_queue_size": 1024,
    }


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ({"backend": "onnxruntime"}, "the config's 'backend' cannot be set by loading"),
        ({"instance_group": []}, "'instance_group' cannot be set"),
        ({"dynamic_batching": {"preferred_batch_size": [3]}}, "'preferred_batch_size' cannot be set"),
        (
            {"dynamic_batching": {"default_queue_policy": {"timeout_action": "DELAY"}}},
            "'timeout_action' cannot be set",
        ),
        ({"max_batch_size": -1}, "'max_batch_size' must be a whole number from 0 to 2147483647, got -1"),
        ({"max_batch_size": True}, "'max_batch_size' must be a whole number"),
        ({"max_batch_size": "many"}, "'max_batch_size' must be a whole number"),
        ({"max_batch_size": 2**31}, "'max_batch_size' must be a whole number"),
        ({"dynamic_batching": []}, "'dynamic_batching' must be an object, got a list of 0"),
        (
            {"dynamic_batching": {"default_queue_policy": 1}},
            "'default_queue_policy' must be an object, got 1",
        ),
        ("{", "not JSON"),
        ("[]", "must be a JSON object as text"),
    ],
)
def test_a_config_that_cannot_be_honoured_is_refused_by_its_field(config: Any, fault: str) -> None:
    with pytest.raises(BadRequest) as refused:
        load(config)
    assert fault in str(refused.value)


def test_a_model_that_does_not_serve_has_nothing_to_be_equal_to() -> None:
    with pytest.raises(BadRequest, match="'name' cannot be set"):
        load({"name": "m"}, {})


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (
            {"parameters": {"file:1/model.onnx": "QUJD"}},
            "'file:1/model.onnx': model files are not taken over HTTP",
        ),
        ({"parameters": {"config": 5}}, "'config' must be a JSON object as text, got 5"),
        ({"parameters": [1]}, "must be an object"),
        ([], "expected an empty body"),
    ],
)
def test_what_is_no_load_request_is_refused(body: Any, fault: str) -> None:
    with pytest.raises(BadRequest, match=fault):
        read_load(json.dumps(body).encode(), CURRENT)


def test_unload_takes_triton_s_parameter_and_no_nonsense() -> None:
    read_unload(b"")
    read_unload(b'{"parameters": {"unload_dependents": true}}')
    with pytest.raises(BadRequest, match="expected an empty body"):
        read_unload(b"7")


def test_an_index_may_leave_out_what_is_not_ready() -> None:
    assert [read_index(body) for body in (b"", b"{}", b'{"ready": true}', b'{"ready": false}')] == [
        False,
        False,
        True,
        False,
    ]


def test_a_config_that_is_no_json_is_called_the_config_and_not_the_request() -> None:
    for text in ("{", '{"a": NaN,}'):
        with pytest.raises(BadRequest, match=r"^the parameter 'config' is not JSON: "):
            load(text)
