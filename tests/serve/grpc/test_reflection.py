"""gRPC's own reflection client learns every service, message and call; a caller without a key learns nothing."""

import queue
import struct
from itertools import chain
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from halfeven.serve.access.access_control import AccessControl
from halfeven.serve.access.keys import KeyFile
from halfeven.serve.grpc import open_stream
from halfeven.serve.grpc.calls import CALLS
from halfeven.serve.grpc.messages import SERVICE, message, pool
from halfeven.serve.http.limits.bounds import ServerBounds
from halfeven.serve.http.limits.connections import Connections

from tests.patience import until
from tests.serve.grpc.conftest import Start
from tests.serve.grpc.frames import (
    DATA,
    END_HEADERS,
    HEADERS,
    NO_WINDOW,
    Connection,
    frame,
    head_of,
)

SERVICES = [
    "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection", SERVICE,
]  # fmt: skip
REQUEST, RESPONSE = (
    message(f"ServerReflection{kind}", "grpc.reflection.v1") for kind in ("Request", "Response")
)


def test_the_client_finds_every_service_and_its_calls(start: Start) -> None:
    with grpc.insecure_channel(start().grpc) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert sorted(database.get_services()) == SERVICES
        learnt = DescriptorPool(database)
        for name in SERVICES:
            assert learnt.FindServiceByName(name).methods
        assert {method.name for method in learnt.FindServiceByName(SERVICE).methods} == set(CALLS)
        theirs = learnt.FindMessageTypeByName("inference.ModelInferRequest")
        ours = pool().FindMessageTypeByName("inference.ModelInferRequest")
        assert theirs.fields_by_name.keys() == ours.fields_by_name.keys()


def asked(channel: Any, package: str, **request: Any) -> Any:
    call = channel.stream_stream(
        f"/{package}.ServerReflection/ServerReflectionInfo", REQUEST.SerializeToString, RESPONSE.FromString
    )
    return next(call(iter([REQUEST(**request)])))


@pytest.mark.parametrize("package", ["grpc.reflection.v1", "grpc.reflection.v1alpha"])
def test_both_versions_answer(start: Start, package: str) -> None:
    with grpc.insecure_channel(start().grpc) as channel:
        found = asked(channel, package, list_services="")
        assert sorted(one.name for one in found.list_services_response.service) == SERVICES
        found = asked(channel, package, file_containing_symbol=f"{SERVICE}.ModelInfer")
        assert len(found.file_descriptor_response.file_descriptor_proto) == 1
        for unknown in ({"file_containing_symbol": "a.B"}, {"file_by_filename": "x" * 9999}):
            error = asked(channel, package, **unknown).error_response
            assert error.error_code == 5 and len(error.error_message) < 300
        assert asked(channel, package).error_response.error_code == 12


def test_the_messages_are_those_of_the_client() -> None:
    for theirs in reflection_pb2.DESCRIPTOR.message_types_by_name.values():
        ours = pool().FindMessageTypeByName(theirs.full_name)
        assert [(one.name, one.number, one.type) for one in ours.fields] == [
            (one.name, one.number, one.type) for one in theirs.fields
        ]


def test_a_caller_without_a_key_learns_nothing(start: Start, tmp_path: Path) -> None:
    with grpc.insecure_channel(
        start(access=AccessControl(KeyFile(tmp_path / "keys.json"), True)).grpc
    ) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            asked(channel, "grpc.reflection.v1", list_services="")
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]


def test_a_long_message_is_refused(start: Start) -> None:
    with grpc.insecure_channel(start().grpc) as channel, pytest.raises(grpc.RpcError) as refused:
        asked(channel, "grpc.reflection.v1", host="x" * 2**17)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]


def test_a_call_has_a_place_among_the_streams(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_stream, "IDLE_SECONDS", 1e9)
    never: queue.Queue[Any] = queue.Queue()
    with grpc.insecure_channel(start(bounds=ServerBounds(connections=Connections(2))).grpc) as channel:
        call = channel.stream_stream(
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
            REQUEST.SerializeToString,
            RESPONSE.FromString,
        )
        held = call(chain([REQUEST(list_services="")], iter(never.get, None)))
        assert next(held).list_services_response.service
        with pytest.raises(grpc.RpcError) as refused:
            asked(channel, "grpc.reflection.v1", list_services="")
        never.put(None)
        assert list(held) == []
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]


def test_answers_that_are_not_read_count_in_the_memory_of_all_requests(start: Start) -> None:
    both = start()
    connection = Connection(both.grpc)
    message = REQUEST(list_services="").SerializeToString()
    head = head_of("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
    connection.send(
        NO_WINDOW,
        frame(HEADERS, END_HEADERS, 1, head),
        frame(DATA, 0, 1, struct.pack("!BI", 0, len(message)) + message),
    )
    until(lambda: both.front.bounds.budget.used > 0)
    connection.close()
    until(lambda: both.front.bounds.budget.used == 0)
