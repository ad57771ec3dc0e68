"""The cases of HTTP over gRPC: the same request on both wires has the same outputs, or the same words of refusal."""

import asyncio
import threading
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as by_http
from google.protobuf import json_format
from tritonclient.utils import InferenceServerException

from tests.conformance.conftest import LIMIT, Serving
from tests.conformance.perf_analyzer import BINARY, measure, read
from tests.patience import PATIENCE_S
from tests.serve.grpc.theirs import triton

NAMES = {"INT8": np.int8, "INT32": np.int32, "INT64": np.int64, "FP16": np.float16, "FP32": np.float32}
SECONDS = PATIENCE_S


@pytest.fixture
def client(serving: Serving) -> Any:
    with triton.InferenceServerClient(serving.grpc) as client:
        yield client


@pytest.fixture
def http_client(serving: Serving) -> Any:
    with by_http.InferenceServerClient(serving.address) as client:
        yield client


def inputs_of(module: Any, arrays: dict[str, np.ndarray], datatype: str) -> list[Any]:
    return [
        module.InferInput(name, list(array.shape), datatype).set_data_from_numpy(array)
        for name, array in arrays.items()
    ]


def drawn(datatype: str, *shape: int, inputs: int) -> dict[str, np.ndarray]:
    random, kind = np.random.default_rng(), NAMES[datatype]
    if np.issubdtype(kind, np.integer):
        return {f"INPUT{i}": random.integers(-50, 50, shape).astype(kind) for i in range(inputs)}
    return {f"INPUT{i}": random.standard_normal(shape).astype(kind) for i in range(inputs)}


ANSWERED = {
    "simple": ("INT32", (3, 16), 2),
    "simple_int8": ("INT8", (1, 16), 2),
    "simple_identity_int64": ("INT64", (2, 5), 1),
    "onnx_zero_1_float32": ("FP32", (8, 7), 1),
    "onnx_zero_1_float16": ("FP16", (2, 3, 4), 1),
    "onnx_zero_3_float32": ("FP32", (2, 6), 3),
    "onnx_float32_float32_float32": ("FP32", (20, 16), 2),  # more than its largest batch: it is split
    "ranked": ("FP32", (2, 6), 1),
    "nan_inf_output": ("FP32", (1,), 1),
}


@pytest.mark.parametrize("model", ANSWERED)
def test_both_wires_have_the_same_outputs_bit_by_bit(client: Any, http_client: Any, model: str) -> None:
    datatype, shape, inputs = ANSWERED[model]
    arrays = drawn(datatype, *shape, inputs=inputs)
    if model == "nan_inf_output":
        arrays["INPUT0"][:] = 0  # of which it makes NaN and infinities
    ours = client.infer(model, inputs_of(triton, arrays, datatype)[::-1], request_id="me")
    theirs = http_client.infer(model, inputs_of(by_http, arrays, datatype), request_id="me")
    said, reply = ours.get_response(), theirs.get_response()
    assert (said.id, said.model_name, said.model_version) == ("me", model, reply["model_version"])
    assert {key: value.string_param for key, value in said.parameters.items()} == reply["parameters"]
    assert [output.name for output in said.outputs] == [output["name"] for output in reply["outputs"]]
    for output in reply["outputs"]:
        array = ours.as_numpy(output["name"])
        assert array.dtype == theirs.as_numpy(output["name"]).dtype
        assert array.tobytes() == theirs.as_numpy(output["name"]).tobytes()


def test_an_unknown_models_refusal_begins_with_tritons_words(client: Any) -> None:
    calls = (
        lambda: client.infer(
            "wrong_model_name", inputs_of(triton, {"INPUT0": np.zeros((1, 1), np.float32)}, "FP32")
        ),
        lambda: client.get_model_metadata("wrong_model_name"),
        lambda: client.get_model_config("wrong_model_name"),
        lambda: client.get_inference_statistics("wrong_model_name"),
    )
    for call in calls:
        with pytest.raises(InferenceServerException) as refused:
            call()
        assert str(refused.value.message()).startswith("Request for unknown model")
        assert refused.value.status() == "StatusCode.NOT_FOUND"


def test_what_is_said_of_server_and_models_is_what_http_says(client: Any, http: httpx.Client) -> None:
    def both(message: Any, path: str) -> tuple[Any, Any]:
        return json_format.MessageToDict(message, preserving_proto_field_name=True), http.get(path).json()

    ours, theirs = both(client.get_server_metadata(), "/v2")
    assert ours == theirs
    for model in ANSWERED:
        ours, theirs = both(client.get_model_metadata(model), f"/v2/models/{model}")
        assert ours["versions"] == theirs["versions"] and ours["platform"] == theirs["platform"]
        for kind in ("inputs", "outputs"):
            assert [{**one, "shape": list(map(int, one["shape"]))} for one in ours[kind]] == theirs[kind]
        config = client.get_model_config(model).config
        theirs = http.get(f"/v2/models/{model}/config").json()
        assert (config.name, config.max_batch_size) == (model, theirs["max_batch_size"])
        assert [[str(size) for size in one.dims] for one in config.input] == [
            one["dims"] for one in theirs["input"]
        ]
        (one,) = client.get_inference_statistics(model).model_stats
        (other,) = http.get(f"/v2/models/{model}/stats").json()["model_stats"]
        assert (one.inference_count, one.execution_count) == (
            other["inference_count"],
            other["execution_count"],
        )
        for phase in ("success", "compute_input", "compute_infer", "compute_output"):
            assert getattr(one.inference_stats, phase).count == other["inference_stats"][phase]["count"]


@pytest.mark.parametrize(("elements", "status"), [(LIMIT // 8, "OK"), (LIMIT // 4, "RESOURCE_EXHAUSTED")])
def test_a_message_may_be_as_long_as_a_body(client: Any, elements: int, status: str) -> None:
    array = np.zeros((1, elements), np.float32)
    try:
        client.infer("onnx_zero_1_float32", inputs_of(triton, {"INPUT0": array}, "FP32"))
        came = "OK"
    except InferenceServerException as error:
        came = str(error.status()).removeprefix("StatusCode.")
    assert came == status


def test_async_and_aio_infer_answer_many_at_once_each_with_its_own(serving: Serving, client: Any) -> None:
    from tritonclient.grpc import aio

    arrays = [drawn("INT32", 1, 16, inputs=2) for _ in range(12)]
    answers: dict[int, Any] = {}
    all_here = threading.Event()

    def keep(number: int) -> Any:
        def callback(result: Any, error: Any) -> None:
            answers[number] = error or result
            if len(answers) == len(arrays):
                all_here.set()

        return callback

    for number, each in enumerate(arrays):
        client.async_infer("simple", inputs_of(triton, each, "INT32"), keep(number))
    assert all_here.wait(SECONDS)

    async def infer() -> list[Any]:
        async with aio.InferenceServerClient(serving.grpc) as other:
            return await asyncio.gather(
                *(other.infer("simple", inputs_of(triton, each, "INT32")) for each in arrays)
            )

    for number, (each, answer) in enumerate(zip(arrays, asyncio.run(infer()), strict=True)):
        for result in (answer, answers[number]):
            np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), each["INPUT0"] + each["INPUT1"])


@pytest.mark.slow
def test_a_thousand_requests_leave_no_memory_behind(serving: Serving, client: Any) -> None:
    given = inputs_of(triton, drawn("INT32", 1, 16, inputs=2), "INT32")

    def a_thousand() -> None:
        for _ in range(1000):
            client.infer("simple", given)

    assert serving.leaked_bytes(a_thousand) < 2**19


@pytest.mark.skipif(not BINARY, reason="HALFEVEN_PERF_ANALYZER names no perf_analyzer")
@pytest.mark.parametrize("more", [[], ["--streaming"]], ids=["unary", "streaming"])
def test_perf_analyzer_and_the_server_count_the_same(serving: Serving, more: list[str]) -> None:
    options = ["--measurement-mode", "count_windows", "--measurement-request-count", "1000", "-s", "60"]
    options += ["-i", "grpc", "--concurrency-range", "1:8:7", *more, *(["--async"] if more else [])]
    for item in read(measure(serving.grpc, "simple", options)):
        assert item.disagreements() == []
