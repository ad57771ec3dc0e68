"""One table of bad inference requests, asked three ways: the codec, HTTP and gRPC refuse each in the same words."""

import json
import re
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest
from halfeven.models.errors import BadRequest
from halfeven.models.spec.spec import ModelSpec
from halfeven.serve.http.codecs.infer import InferCodec

from tests.patience import PATIENCE_S
from tests.serve.grpc.conftest import serving
from tests.serve.grpc.theirs import service_pb2, service_pb2_grpc
from tests.specs import tensor

X = {"name": "x", "shape": [1, 4], "datatype": "FP32"}
CODEC = InferCodec(ModelSpec("double", (tensor("x", "FP32", -1, 4),), (tensor("y", "FP32", -1, 4),), 8))
URL = "/v2/models/double/infer"
OVER = "input 'x' causes total element count to exceed maximum size of"
SIZE = "attempt to access JSON non-unsigned-integer as unsigned-integer: input 'x'"
SHAPE = "unexpected shape for input 'x' for model 'double'. Expected [-1,4], got"

# The faults that both wires can send: the changes of the input x, or of the request.
BOTH: dict[str, tuple[dict[str, Any], str]] = {
    "another name": ({"name": "X"}, "expected 'x', got 'X'"),
    "a null byte in the name": ({"name": "x\0"}, "expected 'x', got"),
    "another datatype": ({"datatype": "FP64"}, "input 'x' data-type is 'FP64', but model 'double' expects 'FP32'"),
    "no datatype": ({"datatype": ""}, "data-type is ''"),
    "an unheard-of datatype": ({"datatype": "X" * 50_000}, "but model 'double' expects 'FP32'"),
    "BYTES": ({"datatype": "BYTES"}, "BYTES tensors are not offered"),
    "another shape": ({"shape": [1, 3]}, f"{SHAPE} [1,3]"),
    "another rank": ({"shape": [4]}, f"{SHAPE} [4]"),
    "a dimension too many": ({"shape": [1, 4, 1]}, f"{SHAPE} [1,4,1]"),
    "a scalar": ({"shape": []}, f"{SHAPE} []"),
    "50,000 dimensions": ({"shape": [1] * 50_000}, SHAPE),
    "no rows": ({"shape": [0, 4]}, f"{SHAPE} [0,4]; a batch has at least one row"),
    "more rows than are split": ({"shape": [129, 4]}, "batch-size must be <= 128 for 'double': input 'x' has 129 rows"),
    "too many elements": ({"shape": [2**4, 2**60 + 2]}, OVER),
    "too many bytes": ({"shape": [2**2, 2**60 + 2]}, "byte size overflow for input 'x'"),
"a product that wraps to 4": ({"shape": [2**32 + 1, 2**34]}, OVER),
    "a product that wraps to 0": ({"shape": [2**32, 2**32]}, OVER),
    "no inputs": ({"inputs": []}, "'inputs'"),
    "an input too much": ({"inputs": [X, {**X, "name": "z"}]}, "expected 1 inputs but got 2 inputs"),
    "an input twice": ({"inputs": [X, X]}, "input 'x' already exists in request"),
    "an unknown output": ({"outputs": ["z"]}, "unexpected inference output 'z' for model 'double'; it has ['y']"),
    "an output twice": ({"outputs": ["y", "y"]}, "output 'y' already exists in request"),
}  # fmt: skip


def body_of(data: Any = None, given: Any = None, **changes: Any) -> bytes:
    """A JSON request for x; ``given`` are the input's parameters, ``...`` leaves a field out."""
    more = {key: changes.pop(key) for key in ("id", "parameters", "outputs", "inputs") if key in changes}
    entry = {**X, "data": [1, 2, 3, 4] if data is None else data, **({"parameters": given} if given else {})}
    entry = {key: value for key, value in {**entry, **changes}.items() if value is not ...}
    return json.dumps({"inputs": [entry], **more}).encode()


def deep(levels: int) -> bytes:
    return b"[" * levels + b"1" + b"]" * levels


def with_data(text: bytes) -> bytes:
    return body_of("@").replace(b'"@"', text)


NOT_JSON, TOO_DEEP = "the request is not JSON", "JSON nesting depth exceeds maximum allowed limit (100)"
ONE_FIELD, COUNT = "Input must set only one of the following fields", "'binary_data_size' of input 'x'"
RAW = {"binary_data_size": 16}

# The faults that JSON alone can send.
TEXTS: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", f"{NOT_JSON}: its body is empty"),
    "no text": (b"\x93NUMPY", f"{NOT_JSON}: its body is no text, it begins with b'"),
    "half JSON": (b"{", NOT_JSON),
    "not UTF-8": (b'{"\xff": 1}', NOT_JSON),
    "half a pair": (rb'{"id": "\ud800"}', NOT_JSON),
    "half a pair beside NaN": (rb'{"id": "\udc00", "x": NaN}', NOT_JSON),
    "two objects": (body_of() * 2, NOT_JSON),
    "a number of 100,000 digits": (with_data(b"[" + b"1" * 100_000 + b"]"), NOT_JSON),
    "NaN and a number of 100,000 digits": (with_data(b"[NaN," + b"1" * 100_000 + b"]"), NOT_JSON),
    "a list": (b"[]", "is a JSON object"),
    "a number": (b"3", "is a JSON object"),
    "null": (b"null", "is a JSON object"),
    "no inputs": (b"{}", "expected a list of tensors under 'inputs', got no such key"),
    "inputs of another kind": (b'{"inputs": "all"}', """a list of tensors under 'inputs', got "all\""""),
    "inputs of numbers": (b'{"inputs": [1]}', "inputs[0] must be an object with a 'name'"),
    "a name that is no text": (body_of(name=7), "inputs[0] must be an object with a 'name'"),
    "19,999 inputs": (
        b'{"inputs":[' + b'{"name":"a"},' * 19_998 + b'{"name":"a"}]}', "input 'a' already exists in request",
    ),
    "an id that is a number": (body_of(id=7), "'id' must be a string"),
    "a datatype that is none": (body_of(datatype=None), "data-type is missing, but model 'double' expects 'FP32'"),
    "no rows of too many": (body_of(shape=[0, 2**63]), OVER),
    "5,000 outputs": (body_of(outputs=[{"name": "y"}] * 5_000), "already exists in request"),
    "no shape": (body_of(shape=...), "input 'x' must have a list of sizes"),
    "a negative dimension": (body_of(shape=[-1, 4]), SIZE),
    "a fractional dimension": (body_of(shape=[1.0, 4]), SIZE),
    "a dimension that is text": (body_of(shape=["1", 4]), SIZE),
    "a dimension that is true": (body_of(shape=[True, 4]), SIZE),
    "a dimension beyond 64 bits": (body_of(shape=[2**70, 4]), "'shape'"),
    "too few numbers": (
        body_of([1, 2, 3]),
        "Shape does not match true shape of 'data' field: input 'x' declares the shape [1, 4] = 4 elements, got 3",
    ),
    "no numbers": (body_of([]), "4 elements, got 0"),
    "too many numbers": (body_of([1, 2, 3, 4, 5]), "4 elements, got 5"),
    "transposed": (body_of([[1], [2], [3], [4]] * 2, shape=[2, 4]), "nested to [8, 1]"),
    "ragged": (
        body_of([[1, 2], [3]]),
        "input 'x' of model 'double': data[1]: expected a list of 2 like the others, got a list of 1",
    ),
    "no list": (body_of(5), "data: expected a list of numbers, nested or flat, got 5"),
    "an object for data": (body_of({"a": 1}), "data: expected a list of numbers"),
    "a string": (body_of([1, 2, "a", 4]), 'data[2]: expected a number for FP32'),
    "a number in a string": (body_of([1, 2, 3, "4"]), "data[3]: expected a number"),
    "true": (body_of([1, True, 3, 4]), "data[1]: expected a number for FP32"),
    "null in the data": (body_of([[1, 2, 3, None]]), "data[0][3]: expected a number for FP32"),
    "beyond FP32": (body_of([1, 1e39, 3, 4]), "FP32 (at most 3.40282e+38), got 1e+39"),
    "an object": (body_of([1, {}, 3, 4]), "data[1]: expected a number"),
    "101 levels": (with_data(deep(101)), TOO_DEEP),
    "100,000 levels": (with_data(deep(100_000)), TOO_DEEP),
    "100,000 levels of inputs beside NaN": (b'{"a":NaN,"inputs":' + deep(100_000) + b"}", TOO_DEEP),
    "30,000 levels of objects": (b'{"a":' * 30_000 + b"1" + b"}" * 30_000, TOO_DEEP),
    "1,000 levels in a shape": (
        body_of(shape="@").replace(b'"@"', deep(1_000)), "came with the size a list of 1",
    ),
    "1,000 levels for a datatype": (
        body_of(datatype="@").replace(b'"@"', deep(1_000)), "data-type is a list of 1, but model",
    ),
    "no data": (body_of(data=...), f"{ONE_FIELD}"),
    "data twice": (body_of(given=RAW), ONE_FIELD),
    "shared memory": (
        body_of(data=..., given={"shared_memory_region": "r"}), "input 'x': shared memory is not offered",
    ),
    "bytes without a header": (
        body_of(data=..., given=RAW), "unexpected size for input 'x', expecting 16 additional bytes",
    ),
    **{
        f"a byte count of {size!r}": (body_of(data=..., given={"binary_data_size": size}), words)
        for size, words in (
            ("16", COUNT), (-16, COUNT), (16.0, COUNT), (True, COUNT), (None, COUNT), ([16], COUNT), (2**70, "x"),
        )
    },
    "outputs by name": (body_of(outputs=["y"]), "outputs[0] must be an object"),
    "output to shared memory": (
        body_of(outputs=[{"name": "y", "parameters": {"shared_memory_region": "r"}}]), "output 'y': shared memory",
    ),
    "a sequence": (body_of(parameters={"sequence_id": 1}), "sequences are not offered"),
    "a reserved parameter": (body_of(parameters={"triton_x": 1}), "'triton_x' is reserved"),
    "a nested parameter": (
        body_of(parameters={"a": [[]]}), "'a' of the request must be a string, number or bool",
    ),
    "parameters in a list": (body_of(parameters=[]), "those of the request must be an object"),
    "binary_data_output 1": (
        body_of(parameters={"binary_data_output": 1}), "'binary_data_output': expected true or false",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def wires() -> Iterator[tuple[httpx.Client, Any]]:
    """Clients of one server's two wires."""
    with (
        serving() as both,
        grpc.insecure_channel(both.grpc) as channel,
        httpx.Client(base_url=f"http://{both.http}", timeout=PATIENCE_S) as http,
    ):
        yield http, service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer


def refused_by_codec_and_http(body: bytes, words: str, http: httpx.Client) -> str:
    """The words of both."""
    with pytest.raises(BadRequest, match=re.escape(words)) as refused:
        CODEC.read(body)
    answer = http.post(URL, content=body)
    assert (answer.status_code, answer.json()) == (400, {"error": str(refused.value)})
    assert len(str(refused.value)) < 5_000, "a refusal does not send everything back"
    assert http.post(URL, content=body_of()).json()["outputs"][0]["data"] == [2, 4, 6, 8]
    return str(refused.value)


@pytest.mark.parametrize("case", TEXTS)
def test_what_json_says_wrongly_is_refused_by_the_codec_and_over_http(case: str, wires: Any) -> None:
    refused_by_codec_and_http(*TEXTS[case], wires[0])


@pytest.mark.parametrize("case", BOTH)
def test_what_both_wires_can_say_is_refused_in_the_same_words_on_each(case: str, wires: Any) -> None:
    changes, words = BOTH[case]
    http, infer = wires
    inputs = changes.get("inputs", [{**X, **{key: changes[key] for key in changes if key in X}}])
    outputs = (
        {"outputs": [{"name": name} for name in changes.get("outputs", ())]} if "outputs" in changes else {}
    )
    body = json.dumps({"inputs": [{**one, "data": [1, 2, 3, 4]} for one in inputs], **outputs}).encode()
    said = refused_by_codec_and_http(body, words, http)
    asked = service_pb2.ModelInferRequest(
        model_name="double", inputs=inputs, raw_input_contents=[bytes(16)] * len(inputs), **outputs
    )
    with pytest.raises(grpc.RpcError) as refused:
        infer(asked, timeout=PATIENCE_S)
    assert (refused.value.code().name, refused.value.details()) == ("INVALID_ARGUMENT", said)


@pytest.mark.slow
def test_a_hundred_thousand_inputs_are_refused_at_once() -> None:
    entry = b'{"name":"%d"}'
    body = b'{"inputs":[' + b",".join(entry % i for i in range(100_000)) + b"]}"
    with pytest.raises(BadRequest, match="expected 1 inputs but got 100000 inputs"):
        CODEC.read(body)
