"""A unary call whose answer the caller does not take counts until it does, or leaves."""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
from halfeven.serve.access.access_control import AccessControl
from halfeven.serve.access.keys import KeyFile
from halfeven.serve.http.limits.memory_budget import FREE_BYTES

from tests.patience import until
from tests.serve.grpc.conftest import Start
from tests.serve.grpc.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    NO_WINDOW,
    Connection,
    frame,
    head_of,
)
from tests.serve.grpc.theirs import service_pb2, service_pb2_grpc

PATH = "/inference.GRPCInferenceService/"


@contextmanager
def not_taken(address: str, call: str, message: bytes, **head: str) -> Iterator[None]:
    """A call that is answered, and whose caller takes no byte of the answer while the block runs."""
    connection = Connection(address)
    connection.send(
        NO_WINDOW,
        frame(HEADERS, END_HEADERS, 1, head_of(PATH + call, **head)),
        frame(DATA, END_STREAM, 1, struct.pack("!BI", 0, len(message)) + message),
    )
    assert any(kind == HEADERS for kind, _, _ in connection.read())  # no window holds these back
    try:
        yield
    finally:
        connection.close()


def test_a_large_answer_counts_in_the_memory_of_all_requests(start: Start) -> None:
    both = start()
    budget, large = both.front.bounds.budget, np.ones((1, FREE_BYTES), np.float32)
    both.roster.models["double"].compute = lambda _: [large]
    x = service_pb2.ModelInferRequest.InferInputTensor(
        name="x", datatype="FP32", shape=[1, 4], contents={"fp32_contents": [1, 2, 3, 4]}
    )
    message = service_pb2.ModelInferRequest(model_name="double", inputs=[x]).SerializeToString()
    with not_taken(both.grpc, "ModelInfer", message):
        until(lambda: budget.used > large.nbytes)
    until(lambda: budget.used == 0)


def test_the_call_is_one_of_those_that_its_key_may_have_at_once(tmp_path: Path, start: Start) -> None:
    file = KeyFile(tmp_path / "keys.json")
    key, _ = file.add("one", ["infer"], concurrency=1)
    authorization, asked = f"Bearer {key}", service_pb2.ModelReadyRequest(name="double")
    both = start(access=AccessControl(file))
    with grpc.insecure_channel(both.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

        def status() -> str:
            try:
                stub.ModelReady(asked, metadata=[("authorization", authorization)])
            except grpc.RpcError as error:
                return error.code().name  # type: ignore[attr-defined] (a Call as well)
            return "OK"

        assert [status() for _ in range(100)] == ["OK"] * 100
        message = asked.SerializeToString()
        with not_taken(both.grpc, "ModelReady", message, authorization=authorization):
            assert status() == "RESOURCE_EXHAUSTED"
        until(lambda: status() == "OK")
