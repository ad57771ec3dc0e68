"""gRPC's own reflection client learns every service, message and call; a caller without a key learns nothing."""

from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from halfeven.serve.access.access_control import AccessControl
from halfeven.serve.access.keys import KeyFile
from halfeven.serve.grpc.calls import CALLS
from halfeven.serve.grpc.health_and_reflection import _classes
from halfeven.serve.grpc.messages import SERVICE, pool

from tests.serve.grpc.conftest import Start

SERVICES = [
    "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection", SERVICE,
]  # fmt: skip


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
    made, read = _classes()
    call = channel.stream_stream(
        f"/{package}.ServerReflection/ServerReflectionInfo", made.SerializeToString, read.FromString
    )
    return next(call(iter([made(**request)])))


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
