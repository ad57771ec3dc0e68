"""The V2 protocol over gRPC, with its own client and with messages that no client would send."""

import queue
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest
from halfeven.models.errors import EngineFailed, Overloaded
from halfeven.models.spec.datatypes import DATATYPES
from halfeven.models.spec.spec import ModelSpec
from halfeven.serve.batching.interface import Answer
from halfeven.serve.grpc import open_stream
from halfeven.serve.grpc.grpc_server import AHEAD
from halfeven.serve.grpc.tensors import response_of
from halfeven.serve.http.codecs import json_numbers
from halfeven.serve.http.limits.bounds import ServerBounds
from halfeven.serve.http.limits.memory_budget import MemoryBudget
from halfeven.serve.http.limits.request_limits import DEFAULTS
from tritonclient.utils import InferenceServerException

from tests.patience import PATIENCE_S, until
from tests.serve.conftest import FakeServed
from tests.serve.grpc.conftest import Both, Start, serving
from tests.serve.grpc.theirs import retry_after, service_pb2, service_pb2_grpc, triton
from tests.specs import tensor

ROWS = np.arange(8, dtype=np.float32).reshape(2, 4)
RAW = ROWS.tobytes()
SECONDS = PATIENCE_S


@pytest.fixture
def both(start: Start) -> Both:
    return start()


@pytest.fixture
def client(both: Both) -> Any:
    with triton.InferenceServerClient(both.grpc) as client:
        yield client


@pytest.fixture
def stub(both: Both) -> Any:
    with grpc.insecure_channel(both.grpc) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def given(array: np.ndarray = ROWS, name: str = "x", datatype: str = "FP32") -> Any:
    return triton.InferInput(name, list(array.shape), datatype).set_data_from_numpy(array)


def request(**changed: Any) -> Any:
    """A ModelInferRequest to `double` with raw contents."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [2, 4], **changed.pop("tensor", {})}
    fields = {"model_name": "double", "inputs": [tensor], "raw_input_contents": [RAW], **changed}
    return service_pb2.ModelInferRequest(**fields)


def refusal(call: Any, message: Any) -> tuple[str, str]:
    """(status, words)"""
    with pytest.raises(grpc.RpcError) as refused:
        call(message, timeout=SECONDS)
    return refused.value.code().name, refused.value.details() or ""


def test_health_metadata_configuration_statistics_and_index(both: Both, client: Any) -> None:
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("double")
    assert client.is_model_ready("double", "3") and not client.is_model_ready("double", "9")
    assert not client.is_model_ready("nobody") and not client.is_model_ready("starting")
    assert client.get_server_metadata().name == "triton"
    metadata = client.get_model_metadata("pair")
    assert [(one.name, one.datatype, list(one.shape)) for one in metadata.inputs] == [
        ("ids", "INT64", [-1, -1]), ("mask", "FP32", [-1, -1]),
    ]  # fmt: skip
    config = client.get_model_config("double").config
    assert (config.max_batch_size, config.input[0].dims, config.instance_group[0].count) == (8, [4], 1)
    client.infer("double", [given()])
    (entry,) = client.get_inference_statistics("double").model_stats
    assert (entry.inference_count, entry.inference_stats.success.count) == (2, 1)
    assert len(client.get_inference_statistics().model_stats) == 3
    assert {one.name for one in client.get_model_repository_index().models} == set(both.roster.models)


def test_readiness_falls_with_the_server_s(both: Both, client: Any) -> None:
    both.roster.reasons = ["double failed"]
    assert not client.is_server_ready()
    both.roster.leaving = True
    assert not client.is_model_ready("double") and client.is_server_live()
    assert client.infer("double", [given()]).as_numpy("y") is not None, "it is answered all the same"


def test_models_are_unloaded_and_loaded_with_an_override(both: Both, client: Any) -> None:
    client.unload_model("double")
    assert not client.is_model_ready("double")
    client.load_model("double", config='{"max_batch_size": "4"}')
    assert client.is_model_ready("double")
    assert both.roster.asked_to_load == [("double", {"max_batch_size": 4})]
    for name, words in (("nobody", "failed to load"), ("../x", "path traversal")):
        with pytest.raises(InferenceServerException, match=words):
            client.load_model(name)
    with pytest.raises(InferenceServerException, match="model files are not taken"):
        client.load_model("double", config="{}", files={"file:1/model.onnx": b"code"})


@pytest.mark.parametrize("request_id", ["", "seven"])
def test_an_answer_has_the_version_the_id_and_the_precision(client: Any, request_id: str) -> None:
    answer = client.infer("double", [given()], model_version="3", request_id=request_id)
    np.testing.assert_array_equal(answer.as_numpy("y"), ROWS * 2)
    said = answer.get_response()
    assert (said.id, said.model_version) == (request_id, "3")
    assert said.parameters["halfeven_precision"].string_param == "fp16"


def test_outputs_come_in_the_order_asked_for_and_as_classes(client: Any) -> None:
    answer = client.infer(
        "pair",
        [
            given(np.array([[1, 2]], np.int64), "ids", "INT64"),
            given(np.array([[1, 3]], np.float32), "mask"),
        ],
        outputs=[triton.InferRequestedOutput("masked"), triton.InferRequestedOutput("total")],
    )
    assert [output.name for output in answer.get_response().outputs] == ["masked", "total"]
    assert answer.as_numpy("masked").tolist() == [[1, 6]] and answer.as_numpy("total").tolist() == [7]
    best = client.infer(
        "scores",
        [given(np.array([[1, 3, 2]], np.float32))],
        outputs=[triton.InferRequestedOutput("logits", class_count=2)],
    )
    assert best.as_numpy("logits").tolist() == [[b"6.000000:1:bee", b"4.000000:2:cat"]]


def test_many_scores_are_ranked_in_a_thread(both: Both, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = list[str]()

    def noted(*given: Any) -> Any:
        threads.append(threading.current_thread().name)
        return response_of(*given)

    monkeypatch.setattr("halfeven.serve.grpc.calls.response_of", noted)
    outputs = (tensor("y", "FP32", -1, json_numbers.MANY + 1),)
    both.roster.models["many"] = FakeServed(
        ModelSpec("many", (tensor("x", "FP32", -1, 4),), outputs, 8),
        lambda x: [np.ones((len(x), json_numbers.MANY + 1), np.float32)],
        both.roster.models["double"].prepared,
    )
    for classes in (0, 2):
        asked = [triton.InferRequestedOutput("y", class_count=classes)]
        answer = client.infer("many", [given(ROWS[:1])], outputs=asked).as_numpy("y")
        assert answer.shape == (1, classes or json_numbers.MANY + 1)
    assert [name.startswith("halfeven-predict") for name in threads] == [False, True]


def test_an_output_is_raw_whatever_its_parameters_say(stub: Any) -> None:
    asked = {"name": "y", "parameters": {"binary_data": {"bool_param": False}}}
    answer = stub.ModelInfer(request(outputs=[asked]), timeout=SECONDS)
    assert answer.raw_output_contents[0] == (ROWS * 2).tobytes()


def test_terms_are_handed_on(both: Both, client: Any) -> None:
    client.infer(
        "double", [given()], request_id="id", priority=1, timeout=5, parameters={"deterministic": True}
    )
    (terms,) = both.roster.models["double"].terms
    assert (terms.priority, terms.timeout_ns, terms.deterministic, terms.key) == (1, 5000, True, "id")


FIELDS = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents",
}  # fmt: skip


def echo(both: Both, datatype: str) -> None:
    spec = ModelSpec("echo", (tensor("x", datatype, -1, 3),), (tensor("y", datatype, -1, 3),), 8)
    both.roster.models["echo"] = FakeServed(spec, lambda x: [x], both.roster.models["double"].prepared)


@pytest.mark.parametrize("datatype", DATATYPES)
def test_every_datatype_comes_back_as_it_went_raw_and_typed(
    both: Both, stub: Any, datatype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    echo(both, datatype)
    kind = DATATYPES[datatype].numpy
    random = np.random.default_rng()
    array = random.integers(0, 2, (2, 3)).astype(kind)
    if np.issubdtype(kind, np.integer):
        array = random.integers(np.iinfo(kind).min, np.iinfo(kind).max, (2, 3), kind.type, endpoint=True)
        array = array.astype(kind)
    sent = {"model_name": "echo", "tensor": {"datatype": datatype, "shape": [2, 3]}}
    answer = stub.ModelInfer(request(**sent, raw_input_contents=[array.tobytes()]), timeout=SECONDS)
    assert answer.raw_output_contents[0] == array.tobytes() and answer.outputs[0].datatype == datatype
    if datatype not in FIELDS:
        sent["tensor"]["contents"] = {"fp32_contents": [1.0] * 6}
        status, words = refusal(stub.ModelInfer, request(**sent, raw_input_contents=[]))
        assert status == "INVALID_ARGUMENT" and "raw_input_contents" in words
        return
    sent["tensor"]["contents"] = {FIELDS[datatype]: array.ravel().tolist()}
    monkeypatch.setattr("halfeven.serve.grpc.tensors.PIECE", 4)
    answer = stub.ModelInfer(request(**sent, raw_input_contents=[]), timeout=SECONDS)
    assert answer.raw_output_contents[0] == array.tobytes()


BAD = {
    "unknown model": ({"model_name": "nobody"}, "NOT_FOUND", "Request for unknown model"),
    "no name": ({"model_name": ""}, "NOT_FOUND", "Request for unknown model"),
    "unknown version": ({"model_version": "9"}, "NOT_FOUND", "Request for unknown model"),
    "not ready": ({"model_name": "starting"}, "UNAVAILABLE", "no active version"),
    "short": ({"raw_input_contents": [RAW[:-1]]}, "INVALID_ARGUMENT", "Expected 32, got 31"),
    "too few": ({"raw_input_contents": []}, "INVALID_ARGUMENT", "Expected 32, got 0"),
    "too many": ({"raw_input_contents": [RAW, RAW]}, "INVALID_ARGUMENT", "expected 1 raw_input_contents"),
    "both kinds": (
        {"tensor": {"contents": {"fp32_contents": [1.0]}}},
        "INVALID_ARGUMENT",
        "contents field must not be specified when using raw_input_contents",
    ),
    "another field": (
        {"tensor": {"contents": {"fp64_contents": [1.0] * 8}}, "raw_input_contents": []},
        "INVALID_ARGUMENT",
        "must be in contents.fp32_contents",
    ),
    "sequence": (
        {"parameters": {"sequence_id": {"int64_param": 1}}}, "INVALID_ARGUMENT", "sequences are not offered",
    ),
    "shared memory": (
        {"tensor": {"parameters": {"shared_memory_region": {"string_param": "x"}}}, "raw_input_contents": []},
        "INVALID_ARGUMENT",
        "shared memory is not offered",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_is_refused_with_its_status_and_the_words_of_http(stub: Any, case: str) -> None:
    changed, status, words = BAD[case]
    came = refusal(stub.ModelInfer, request(**changed))
    assert came[0] == status and words in came[1], came


@pytest.mark.parametrize("character", ["é", "\N{GRINNING FACE}", "\0"], ids=["two", "four", "control"])
def test_a_refusal_that_quotes_an_endless_name_still_arrives(stub: Any, character: str) -> None:
    for _ in range(20):  # above 8 KiB of headers clients refuse by chance, the likelier the more they are
        status, words = refusal(stub.ModelInfer, request(model_name=character * 5000))
        assert status == "NOT_FOUND" and words.startswith("Request for unknown model")


def test_an_element_that_does_not_fit_its_datatype_is_refused(both: Both, stub: Any) -> None:
    echo(both, "INT8")
    contents = {"int_contents": [1, 2, 300]}
    bad = request(
        model_name="echo",
        tensor={"datatype": "INT8", "shape": [1, 3], "contents": contents},
        raw_input_contents=[],
    )
    status, words = refusal(stub.ModelInfer, bad)
    assert status == "INVALID_ARGUMENT" and "does not fit INT8" in words


def test_failures_of_the_server_have_their_status_and_no_traceback(both: Both, stub: Any) -> None:
    served = both.roster.models["double"]
    served.refusal = Overloaded("the queue is full", 2.5)
    with pytest.raises(grpc.RpcError) as refused:
        stub.ModelInfer(request(), timeout=SECONDS)
    assert refused.value.code().name == "UNAVAILABLE"
    assert retry_after(refused.value) == "3"
    served.refusal = EngineFailed("the engine failed")
    assert refusal(stub.ModelInfer, request()) == ("INTERNAL", "the engine failed")

    def compute(*_: Any) -> Any:
        raise KeyError("/secret/path")

    served.refusal, served.compute = None, compute
    status, words = refusal(stub.ModelInfer, request())
    assert status == "INTERNAL" and "secret" not in words and "bug in halfeven" in words


def test_bytes_that_are_no_message_end_the_call_and_not_the_server(
    both: Both, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with grpc.insecure_channel(both.grpc) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        for call in (infer, check):
            for nonsense in (b"\xff" * 64, b"\x0a", b"\xff" + np.random.default_rng().bytes(200)):
                status, words = refusal(call, nonsense)
                assert status == "INVALID_ARGUMENT" and "are not its message" in words
        stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        answers = stream(iter([request().SerializeToString(), b"\xff" * 64]), timeout=SECONDS)
        assert b"double" in next(answers), "what was read before is answered"
        assert refusal(lambda *_, **more: next(answers), None)[0] == "INVALID_ARGUMENT"
    assert "Traceback" not in caplog.text
    np.testing.assert_array_equal(client.infer("double", [given()]).as_numpy("y"), ROWS * 2)


def test_what_is_not_offered_says_the_way_out(client: Any) -> None:
    for call in (client.get_system_shared_memory_status, client.get_trace_settings, client.get_log_settings):
        with pytest.raises(InferenceServerException, match="not offered") as refused:
            call()
        assert refused.value.status() == "StatusCode.UNIMPLEMENTED"


# Limits.


def test_messages_count_in_the_memory_of_all_requests_until_they_are_answered(start: Start) -> None:
    budget = MemoryBudget(100_000)
    both = start(bounds=ServerBounds(budget=budget))
    spec = ModelSpec("long", (tensor("x", "FP32", -1, "n=1..100000"),), (tensor("y", "FP32", -1, 1),), 8)
    served = FakeServed(spec, lambda x: [x[:, :1]], both.roster.models["double"].prepared, holding=True)
    both.roster.models["long"] = served
    with grpc.insecure_channel(both.grpc) as channel:
        infer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer

        def long(elements: int) -> Any:
            sent = {"shape": [1, elements]}
            return request(model_name="long", tensor=sent, raw_input_contents=[bytes(4 * elements)])

        assert refusal(infer, long(50_000))[0] == "RESOURCE_EXHAUSTED", "it never fits"
        call = infer.future(long(30_000), timeout=SECONDS)
        assert served.submitted.wait(SECONDS)
        assert 0 < budget.used < 100_000
        assert refusal(infer, long(30_000))[0] == "UNAVAILABLE"
        typed = request(
            model_name="long",
            tensor={"shape": [1, 8000], "contents": {"fp32_contents": [0.0] * 8000}},
            raw_input_contents=[],
        )
        assert refusal(infer, typed)[0] in ("UNAVAILABLE", "RESOURCE_EXHAUSTED"), "its objects are counted"
        call.cancel()
        assert served.cancelled.wait(SECONDS)
        served.holding = False
        assert infer(long(30_000), timeout=SECONDS).outputs[0].name == "y"
    until(lambda: budget.used == 0)


MANY = b"\x2a\x00" * 30_000 + b"\x3a\x00" * 30_000, b"\x32\x00" * 60_000


@pytest.mark.slow
@pytest.mark.parametrize("fields", MANY, ids=["inputs", "outputs"])
def test_very_many_tensors_are_refused_before_they_are_read(
    both: Both, monkeypatch: pytest.MonkeyPatch, fields: bytes
) -> None:
    """Each tensor is two bytes of the message; to read it took a kilobyte of memory and 30 µs of the event loop."""
    monkeypatch.setattr("halfeven.serve.grpc.calls.fields_of", lambda request: pytest.fail("it was read"))
    with grpc.insecure_channel(both.grpc) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        status, words = refusal(call, b"\x0a\x06double" + fields)
    assert status == "INVALID_ARGUMENT" and "for model 'double'" in words


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ModelInfer", "ModelStreamInfer"])
def test_more_parts_than_a_body_may_have_pieces_are_refused_before_protobuf_reads_them(
    both: Both, name: str
) -> None:
    """Each part is two bytes of the message; a message of 64 MiB took protobuf seconds of the event loop and 2 GB."""
    sent = b"\x0a\x06double" + b"\x2a\x00" * 70_000
    with grpc.insecure_channel(both.grpc) as channel:
        call = channel.stream_stream(f"/inference.GRPCInferenceService/{name}")
        with pytest.raises(grpc.RpcError) as refused:
            list(call(iter([sent]), timeout=SECONDS))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "more than 65536 tensors" in (refused.value.details() or "")
    assert live(both.grpc)


def test_very_many_parameters_are_read_in_a_thread_and_counted(start: Start) -> None:
    budget = MemoryBudget(1_000_000)
    with grpc.insecure_channel(start(bounds=ServerBounds(budget=budget)).grpc) as channel:
        infer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer
        few = {str(number): {"bool_param": True} for number in range(100)}
        assert infer(request(parameters=few), timeout=SECONDS).outputs[0].name == "y"
        many = {str(number): {"bool_param": True} for number in range(12_000)}
        status, words = refusal(infer, request(parameters=many))
        assert status == "RESOURCE_EXHAUSTED" and "reading the request takes" in words
    until(lambda: budget.used == 0)


# Calls that end early, and streams.


def test_a_caller_that_leaves_or_is_out_of_time_cancels_its_request(both: Both, stub: Any) -> None:
    served = both.roster.models["double"]
    served.holding = True
    call = stub.ModelInfer.future(request(), timeout=SECONDS)
    assert served.submitted.wait(SECONDS)
    call.cancel()
    assert served.cancelled.wait(SECONDS)
    served.cancelled.clear()
    with pytest.raises(grpc.RpcError) as late:
        stub.ModelInfer(request(), timeout=0.2)
    assert late.value.code().name == "DEADLINE_EXCEEDED"
    assert served.cancelled.wait(SECONDS)


def test_a_server_that_ends_answers_what_is_under_way_and_takes_nothing_new() -> None:
    with serving(seconds=SECONDS) as both, grpc.insecure_channel(both.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        served = both.roster.models["double"]
        served.holding = True
        call = stub.ModelInfer.future(request(), timeout=SECONDS)
        assert served.submitted.wait(SECONDS)
        (future,) = served.held
        answer = Answer([ROWS * 2], served.prepared, 1, 1, 2)
        loop = future.get_loop()
        both.server.should_exit = True

        until(lambda: not live(both.grpc))
        loop.call_soon_threadsafe(future.set_result, answer)
        assert call.result(SECONDS).raw_output_contents[0] == (ROWS * 2).tobytes()


def live(address: str) -> bool:
    """True if a new connection is answered."""
    with grpc.insecure_channel(address) as channel:
        try:
            service_pb2_grpc.GRPCInferenceServiceStub(channel).ServerLive(
                service_pb2.ServerLiveRequest(), timeout=1
            )
        except grpc.RpcError as error:
            return error.code() is grpc.StatusCode.DEADLINE_EXCEEDED  # type: ignore[attr-defined]  # busy, not gone
    return True


def test_a_stream_is_answered_in_order_and_goes_on_after_a_refusal(client: Any) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    for number in range(200):
        model = "nobody" if number % 10 == 9 else "double"
        client.async_stream_infer(model, [given(ROWS + number)], request_id=str(number))
    for number in range(200):
        result, error = answers.get(timeout=SECONDS)
        if number % 10 == 9:
            assert "unknown model" in str(error)
        else:
            assert error is None and result.get_response().id == str(number)
            np.testing.assert_array_equal(result.as_numpy("y"), (ROWS + number) * 2)
    client.stop_stream()


def test_a_stream_s_requests_share_batches_up_to_a_bound(both: Both, client: Any) -> None:
    served = both.roster.models["double"]
    served.holding = True
    client.start_stream(lambda result, error: None)
    try:
        for _ in range(AHEAD + 20):
            client.async_stream_infer("double", [given()])
        until(lambda: len(served.held) >= AHEAD)
        assert client.is_server_live()
        assert len(served.held) == AHEAD
    finally:
        client.stop_stream(cancel_requests=True)
    until(lambda: all(future.cancelled() for future in served.held))
    assert len(served.held) == AHEAD


@pytest.fixture
def budget() -> MemoryBudget:
    return MemoryBudget(16 * 2**20)


@pytest.fixture
def wide(start: Start, budget: MemoryBudget) -> Iterator[Any]:
    """The stub of a server with this budget and a model `wide`, whose answers have a megabyte each."""
    both = start(bounds=ServerBounds(budget=budget))
    spec = ModelSpec("wide", (tensor("x", "FP32", -1, 4),), (tensor("y", "FP32", -1, 2**18),), 8)
    answer = np.zeros((1, 2**18), np.float32)
    both.roster.models["wide"] = FakeServed(spec, lambda _: [answer], both.roster.models["double"].prepared)
    with grpc.insecure_channel(both.grpc) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def unread_stream(wide: Any, budget: MemoryBudget) -> Any:
    """A stream of requests to `wide` whose answers nobody has read when they fill the budget."""
    asked = request(model_name="wide", tensor={"shape": [1, 4]}, raw_input_contents=[bytes(16)])
    answers = wide.ModelStreamInfer(iter([asked] * AHEAD), timeout=SECONDS)
    until(lambda: budget.used > budget.limit)
    return answers


@pytest.mark.slow
def test_answers_that_a_stream_s_caller_does_not_read_count_in_the_memory_of_all_requests(
    wide: Any, budget: MemoryBudget
) -> None:
    answers = unread_stream(wide, budget)
    assert refusal(wide.ModelInfer, request(raw_input_contents=[bytes(2**17)]))[0] == "UNAVAILABLE"
    assert [len(one.infer_response.raw_output_contents[0]) for one in answers] == [2**20] * AHEAD
    until(lambda: budget.used == 0)
    unread_stream(wide, budget).cancel()
    until(lambda: budget.used == 0)


@pytest.mark.slow
def test_a_stream_whose_answers_are_not_read_ends(
    wide: Any, budget: MemoryBudget, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = replace(DEFAULTS, answer_stall_seconds=1.0, answer_bytes_per_second=10**9)
    monkeypatch.setattr(open_stream, "DEFAULTS", slow)
    answers = unread_stream(wide, budget)
    until(lambda: budget.used == 0)  # while nothing is read
    with pytest.raises(grpc.RpcError) as ended:
        list(answers)
    assert ended.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "was not read within 1 seconds" in (ended.value.details() or "")


def test_a_stream_marks_its_answers_as_final_where_the_client_asks(both: Both, client: Any) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    for wants in (True, False):
        client.async_stream_infer("double", [given()], enable_empty_final_response=wants)
        result, error = answers.get(timeout=SECONDS)
        assert error is None
        assert ("triton_final_response" in result.get_response().parameters) is wants
    client.stop_stream()
