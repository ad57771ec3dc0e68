"""``grpc.health.v1``, asked with the protocol's bytes (what Kubernetes' own gRPC probe sends), and by gRPC's own
clients, which watch the servers that they choose among."""

import json
import queue
import threading
from itertools import chain
from pathlib import Path
from typing import Any

import grpc
import pytest
from halfeven.serve.access.access_control import AccessControl
from halfeven.serve.access.keys import KeyFile
from halfeven.serve.grpc import open_stream
from halfeven.serve.http.limits.bounds import ServerBounds
from halfeven.serve.http.limits.connections import Connections, OpenConnection

from tests.patience import PATIENCE_S
from tests.serve.grpc.conftest import Start
from tests.serve.grpc.theirs import retry_after, service_pb2, service_pb2_grpc

SERVING, NOT_SERVING, SERVICE_UNKNOWN = b"\x08\x01", b"\x08\x02", b"\x08\x03"
V2 = b"inference.GRPCInferenceService"
LOADING = ["models are being made ready"]
SECONDS = PATIENCE_S


def check(address: str, service: bytes = b"") -> bytes:
    with grpc.insecure_channel(address) as channel:
        return channel.unary_unary("/grpc.health.v1.Health/Check")(request_for(service), timeout=SECONDS)


def watch(channel: grpc.Channel, service: bytes = b"") -> Any:
    """The statuses that the server sends."""
    return channel.unary_stream("/grpc.health.v1.Health/Watch")(request_for(service), timeout=SECONDS)


def request_for(service: bytes) -> bytes:
    return b"" if not service else bytes((10, len(service))) + service


def end_of(statuses: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as ended:
        next(statuses)
    return ended.value


@pytest.mark.parametrize("service", [b"", V2])
def test_the_server_is_serving_while_it_is_ready(start: Start, service: bytes) -> None:
    both = start()
    assert check(both.grpc, service) == SERVING
    both.roster.reasons = LOADING
    assert check(both.grpc, service) == NOT_SERVING


def test_another_service_is_not_found(start: Start) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        check(start().grpc, b"double")
    assert refused.value.code().name == "NOT_FOUND"


def test_a_probe_needs_no_key(start: Start, tmp_path: Path) -> None:
    both = start(access=AccessControl(KeyFile(tmp_path / "keys.json"), needed=True))
    assert check(both.grpc) == SERVING
    with grpc.insecure_channel(both.grpc) as channel:
        assert next(watch(channel)) == SERVING


@pytest.mark.slow
@pytest.mark.parametrize("service", [b"", V2])
def test_a_watcher_gets_the_status_at_once_and_each_change_once(start: Start, service: bytes) -> None:
    both = start()
    with grpc.insecure_channel(both.grpc) as channel:
        statuses = watch(channel, service)
        assert next(statuses) == SERVING
        for _ in range(2):
            both.roster.reasons = LOADING
            assert next(statuses) == NOT_SERVING
            both.roster.reasons = []
            assert next(statuses) == SERVING


@pytest.mark.slow
def test_a_watcher_of_another_service_waits_for_it(start: Start) -> None:
    """The protocol: the stream stays open, for a service may come."""
    both = start()
    with grpc.insecure_channel(both.grpc) as channel:
        of_another, of_all = watch(channel, b"double"), watch(channel)
        assert (next(of_another), next(of_all)) == (SERVICE_UNKNOWN, SERVING)
        both.roster.reasons = LOADING
        assert next(of_all) == NOT_SERVING
        assert of_another.is_active()


@pytest.mark.slow
def test_a_client_of_grpc_goes_by_what_it_watches(start: Start) -> None:
    """gRPC's own client with health checks in its service configuration."""
    both = start()
    asked = {
        "loadBalancingConfig": [{"round_robin": {}}],
        "healthCheckConfig": {"serviceName": V2.decode()},
    }
    states: queue.Queue[grpc.ChannelConnectivity] = queue.Queue()
    with grpc.insecure_channel(both.grpc, [("grpc.service_config", json.dumps(asked))]) as channel:
        channel.subscribe(states.put, try_to_connect=True)

        def becomes(state: grpc.ChannelConnectivity) -> bool:
            return any(states.get(timeout=SECONDS) is state for _ in range(10))

        assert becomes(grpc.ChannelConnectivity.READY)
        both.roster.reasons = LOADING
        assert becomes(grpc.ChannelConnectivity.TRANSIENT_FAILURE)
        both.roster.reasons = []
        assert becomes(grpc.ChannelConnectivity.READY)


def test_watchers_are_bounded_apart_from_streams_with_keys(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Watching needs no key: whoever watches may end another watcher that is idle, and nothing else."""
    monkeypatch.setattr(open_stream, "IDLE_SECONDS", 0.0)
    both = start(bounds=ServerBounds(connections=Connections(32)))  # 24 streams, four watchers
    never: queue.Queue[Any] = queue.Queue()
    with grpc.insecure_channel(both.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        asked = service_pb2.ModelInferRequest(model_name="nobody")
        streams = [stub.ModelStreamInfer(chain([asked], iter(never.get, None))) for _ in range(24)]
        assert all("unknown model" in next(stream).error_message for stream in streams)
        watchers = []
        for _ in range(5):
            watchers.append(watch(channel))
            assert next(watchers[-1]) == SERVING
        assert check(both.grpc) == SERVING
        closed = end_of(watchers[0])
        assert closed.code().name == "UNAVAILABLE" and "was idle" in (closed.details() or "")
        monkeypatch.setattr(open_stream, "IDLE_SECONDS", 1e9)
        refused = end_of(watch(channel))
        assert refused.code().name == "UNAVAILABLE" and "use Check" in (refused.details() or "")
        assert retry_after(refused) == "1"
        assert all(stream.is_active() for stream in (*streams, *watchers[1:]))
        for _ in streams:
            never.put(None)
        assert [list(stream) for stream in streams] == [[]] * 24


@pytest.mark.slow
def test_a_watch_whose_message_does_not_come_or_is_none_ends(start: Start) -> None:
    both = start(bounds=ServerBounds(seconds=0.5, connections=Connections(8)))
    never: queue.Queue[Any] = queue.Queue()
    with grpc.insecure_channel(both.grpc) as channel:
        call = channel.stream_stream("/grpc.health.v1.Health/Watch")
        late = end_of(call(iter(never.get, None), timeout=SECONDS))
        assert late.code().name == "DEADLINE_EXCEEDED" and "within 0.5 s" in (late.details() or "")
        never.put(None)
        long = b"\x0a\x80\x80\x08" + bytes(2**17)
        ends = {
            "without its message": [],
            "are not its message": [b"\xff" * 64],
            "the name of a service": [long],
        }
        for words, sent in ends.items():
            refused = end_of(call(iter(sent), timeout=SECONDS))
            assert refused.code().name == "INVALID_ARGUMENT" and words in (refused.details() or "")


def test_a_watcher_that_leaves_gives_its_place_back(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    both, left = start(bounds=ServerBounds(connections=Connections(16))), threading.Semaphore(0)
    leave = Connections.leave

    def leaving(self: Connections, connection: OpenConnection) -> None:
        leave(self, connection)
        left.release()

    monkeypatch.setattr(Connections, "leave", leaving)
    with grpc.insecure_channel(both.grpc) as channel:
        for _ in range(3):
            statuses = watch(channel)
            assert next(statuses) == SERVING
            statuses.cancel()
            assert left.acquire(timeout=SECONDS)


@pytest.mark.slow
def test_the_end_of_the_server_is_a_watcher_s_last_status(start: Start) -> None:
    both = start(seconds=SECONDS)
    with grpc.insecure_channel(both.grpc) as channel:
        statuses = watch(channel)
        assert next(statuses) == SERVING
        both.roster.reasons = ["the server is shutting down"]
        both.server.should_exit = True
        assert next(statuses) == NOT_SERVING
        ended = end_of(statuses)
        assert ended.code().name == "UNAVAILABLE" and "has shut down" in (ended.details() or "")
