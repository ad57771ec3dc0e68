"""The compiled protocol is that of its text, and on the wire that of a client written by others."""

import re
from typing import Any

import pytest
from google.protobuf import descriptor_pb2
from halfeven.serve.grpc.calls import CALLS, NOT_OFFERED
from halfeven.serve.grpc.messages import COMPILED, pool
from tritonclient.grpc import model_config_pb2

from tests.serve.grpc.theirs import service_pb2

FILES = descriptor_pb2.FileDescriptorSet.FromString(COMPILED.read_bytes()).file
_FIELD = re.compile(r"^\s*(?:repeated )?(?:map<[^>]*>|\w+) (\w+) = (\d+);", re.MULTILINE)


def all_messages(found: Any) -> dict[str, Any]:
    """Every message by its full name, also those inside others."""
    messages = {message.full_name: message for message in found}
    for message in list(messages.values()):
        messages |= all_messages(message.nested_types)
    return messages


THEIRS = all_messages(
    [
        *service_pb2.DESCRIPTOR.message_types_by_name.values(),
        *model_config_pb2.DESCRIPTOR.message_types_by_name.values(),
    ]
)
OURS = all_messages([pool().FindMessageTypeByName(f"inference.{one.name}") for one in FILES[0].message_type])


@pytest.mark.parametrize("name", OURS)
def test_every_field_is_the_client_s_by_name_number_and_type(name: str) -> None:
    for field in OURS[name].fields:
        theirs = THEIRS[name].fields_by_number[field.number]
        assert (field.name, field.type, field.is_repeated) == (theirs.name, theirs.type, theirs.is_repeated)
        if field.enum_type is not None:
            assert {(one.name, one.number) for one in field.enum_type.values} <= {
                (one.name, one.number) for one in theirs.enum_type.values
            }


def test_every_call_of_the_client_is_answered_or_refused_by_name() -> None:
    service = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    assert {method.name for method in service.methods} == set(CALLS) | set(NOT_OFFERED)
    for name, call in CALLS.items():
        theirs = service.methods_by_name[name]
        assert call.request.DESCRIPTOR.full_name == theirs.input_type.full_name
        assert call.response.DESCRIPTOR.full_name == theirs.output_type.full_name


def test_the_compiled_file_is_its_text() -> None:
    text = COMPILED.with_suffix(".proto").read_text()
    written = _FIELD.findall(re.sub(r"enum \w+ \{[^}]*\}", "", text))
    fields = [
        (field.name, str(field.number))
        for message in OURS.values()
        if not message.GetOptions().map_entry
        for field in message.fields
    ]
    assert sorted(written) == sorted(fields)
    assert re.findall(r"rpc (\w+)\(", text) == [method.name for method in FILES[0].service[0].method]


def test_a_process_that_has_the_client_s_messages_can_have_ours() -> None:
    ours = pool().FindMessageTypeByName("inference.ModelInferRequest")
    assert ours is not service_pb2.ModelInferRequest.DESCRIPTOR
