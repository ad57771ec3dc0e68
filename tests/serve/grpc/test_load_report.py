"""A call says the server's load where it is asked to, as an answer over HTTP does."""

import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from halfeven.models.errors import Overloaded
from halfeven.serve.access.access_control import AccessControl
from halfeven.serve.access.keys import KeyFile
from halfeven.serve.batching.counters import Counters
from halfeven.serve.http.server_load import ServerLoad

from tests.patience import PATIENCE_S
from tests.serve.grpc.conftest import Both, serving
from tests.serve.grpc.theirs import service_pb2, service_pb2_grpc

FORMAT, TEXT = "endpoint-load-metrics-format", "endpoint-load-metrics"
SECONDS = PATIENCE_S


class Waiting:
    name, number, waiting, expected_wait_s = "double", 3, 3, 0.25

    def all_counters(self) -> list[Counters]:
        return []


WAITING: Any = Waiting()


@pytest.fixture(scope="module")
def both() -> Iterator[Both]:
    with serving(load=ServerLoad(lambda: [WAITING])) as both:
        yield both


def trailing(address: str, form: str | None, *metadata: tuple[str, str]) -> dict[str, str | bytes]:
    """The trailing metadata of a call, whether it is answered or refused."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4]}
    request = service_pb2.ModelInferRequest(
        model_name="double", inputs=[tensor], raw_input_contents=[bytes(16)]
    )
    with grpc.insecure_channel(address) as channel:
        infer: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer
        try:
            asked = ((FORMAT, form),) if form else ()
            _, call = infer.with_call(request, SECONDS, metadata=(*asked, *metadata))
        except grpc.RpcError as error:
            call: Any = error
        return dict(call.trailing_metadata())


def sent_for(address: str, form: str) -> bytes:
    """The bytes that the server sends for a call; grpcio's clients keep ``endpoint-load-metrics-bin`` to themselves."""
    sent = list[bytes]()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def copy(source: socket.socket, target: socket.socket, seen: list[bytes]) -> None:
            with suppress(OSError):
                while data := source.recv(65536):
                    seen.append(data)
                    target.sendall(data)

        def between() -> None:
            host, _, port = address.rpartition(":")
            with listening.accept()[0] as client, socket.create_connection((host, int(port))) as server:
                Thread(target=copy, args=(client, server, []), daemon=True).start()
                copy(server, client, sent)

        Thread(target=between, daemon=True).start()
        trailing(f"127.0.0.1:{listening.getsockname()[1]}", form)
    return b"".join(sent)


def orca_load_report() -> Any:
    """The message class, by the numbers of xds/data/orca/v3/orca_load_report.proto."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="orca.proto", package="xds", syntax="proto3")
    report = file.message_type.add(name="OrcaLoadReport")
    entry = report.nested_type.add(name="NamedMetricsEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    entry.field.add(name="value", number=2, type=field.TYPE_DOUBLE, label=field.LABEL_OPTIONAL)
    of_entry = {"type": field.TYPE_MESSAGE, "type_name": ".xds.OrcaLoadReport.NamedMetricsEntry"}
    report.field.add(name="named_metrics", number=8, label=field.LABEL_REPEATED, **of_entry)
    report.field.add(
        name="application_utilization", number=9, type=field.TYPE_DOUBLE, label=field.LABEL_OPTIONAL
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("xds.OrcaLoadReport"))


def test_a_call_gets_the_load_in_the_format_that_it_asks_for(both: Both) -> None:
    assert trailing(both.grpc, "TEXT")[TEXT] == (
        "TEXT application_utilization=0.0,named_metrics.queue_requests=3,named_metrics.queue_seconds=0.25"
    )
    kind, _, report = str(trailing(both.grpc, "json")[TEXT]).partition(" ")
    assert (kind, json.loads(report)["named_metrics"]["queue_seconds"]) == ("JSON", 0.25)


def test_the_binary_report_is_read_by_the_message_of_orca(both: Both) -> None:
    _, _, after = sent_for(both.grpc, "BIN").partition(f"{TEXT}-bin".encode())
    length, is_binary = after[0], after[1]  # HPACK's length, and a zero before bytes that are not in base 64
    assert length < 127 and is_binary == 0
    report = orca_load_report().FromString(after[2 : 1 + length])
    assert dict(report.named_metrics) == {"queue_requests": 3.0, "queue_seconds": 0.25}
    assert report.application_utilization == 0.0


def test_a_refusal_says_the_load_beside_when_to_come_again(both: Both) -> None:
    both.roster.models["double"].refusal = Overloaded("the queue is full", 1.0)
    found = trailing(both.grpc, "TEXT")
    both.roster.models["double"].refusal = None
    assert "queue_requests=3" in str(found[TEXT]) and found["retry-after"] == "1"


@pytest.mark.parametrize("form", [None, "XML"])
def test_no_load_is_said_where_none_or_an_unknown_format_is_asked_for(both: Both, form: str | None) -> None:
    assert TEXT not in trailing(both.grpc, form)


def test_a_key_is_not_told_the_load_of_a_model_that_it_may_not_reach(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    keys = {model: file.add(model, ["infer"], models=[model])[0] for model in ("double", "other")}
    with serving(AccessControl(file), load=ServerLoad(lambda: [WAITING])) as both:
        for model, is_there in (("double", True), ("other", False)):
            found = trailing(both.grpc, "text", ("authorization", f"Bearer {keys[model]}"))
            assert (TEXT in found) == is_there, found
