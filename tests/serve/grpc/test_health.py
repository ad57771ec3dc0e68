"""``grpc.health.v1``, asked with the protocol's bytes: what Kubernetes' own gRPC probe sends."""

from pathlib import Path

import grpc
import pytest
from halfeven.serve.access.access_control import AccessControl
from halfeven.serve.access.key_file import KeyFile

from tests.serve.grpc.conftest import Start

SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"
V2 = b"inference.GRPCInferenceService"


def check(address: str, service: bytes = b"") -> bytes:
    request = b"" if not service else bytes((10, len(service))) + service
    with grpc.insecure_channel(address) as channel:
        return channel.unary_unary("/grpc.health.v1.Health/Check")(request, timeout=20)


@pytest.mark.parametrize("service", [b"", V2])
def test_the_server_is_serving_while_it_is_ready(start: Start, service: bytes) -> None:
    both = start()
    assert check(both.grpc, service) == SERVING
    both.roster.reasons = ["models are being made ready"]
    assert check(both.grpc, service) == NOT_SERVING


def test_another_service_is_not_found(start: Start) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        check(start().grpc, b"double")
    assert refused.value.code().name == "NOT_FOUND"


def test_a_probe_needs_no_key(start: Start, tmp_path: Path) -> None:
    both = start(access=AccessControl(KeyFile(tmp_path / "keys.json"), needed=True))
    assert check(both.grpc) == SERVING


def test_watching_is_not_offered_and_says_so(start: Start) -> None:
    with grpc.insecure_channel(start().grpc) as channel, pytest.raises(grpc.RpcError) as refused:
        list(channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=20))
    assert refused.value.code().name == "UNIMPLEMENTED"
