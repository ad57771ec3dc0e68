"""Keys over gRPC: every call of the table is refused without the right key, before its message is read."""

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from halfeven.serve.access.access_control import LOOK_EVERY_S, AccessControl
from halfeven.serve.access.certificates import Certificates
from halfeven.serve.access.keys import EVERY_MODEL, SCOPES, KeyFile
from halfeven.serve.grpc import health_and_reflection, messages, open_stream
from halfeven.serve.grpc.calls import CALLS, NOT_OFFERED
from halfeven.serve.http.limits.bounds import ServerBounds
from halfeven.serve.http.limits.connections import Connections
from halfeven.serve.http.route_scopes import need_of
from tritonclient.utils import InferenceServerException

from tests.patience import PATIENCE_S
from tests.serve.access.authority import Pair
from tests.serve.grpc.conftest import Both, Start
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
from tests.serve.grpc.theirs import retry_after, service_pb2, service_pb2_grpc, triton

OPEN = {"ServerLive", "ServerReady"}
SECONDS = PATIENCE_S
PATH = "/inference.GRPCInferenceService/"
HEALTH_PATHS = ["/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"]


class Keyed:
    """A server with one key for each set of scopes, whose clock a test moves."""

    def __init__(self, folder: Path, start: Start) -> None:
        self.file = KeyFile(folder / "keys.json")
        self.keys: dict[frozenset[str], str] = {}
        for size in (1, len(SCOPES) - 1, len(SCOPES)):
            for scopes in combinations(SCOPES, size):
                self.keys[frozenset(scopes)], _ = self.file.add("-".join(scopes), scopes)
        self.limited, _ = self.file.add("limited", SCOPES, ["scores"])
        self.now_s = 0.0
        self.access = AccessControl(self.file, clock=lambda: self.now_s)
        self.both: Both = start(access=self.access)

    @property
    def infers(self) -> str:
        return self.keys[frozenset(("infer",))]


@pytest.fixture
def keyed(tmp_path: Path, start: Start) -> Keyed:
    return Keyed(tmp_path, start)


@pytest.fixture
def channel(keyed: Keyed) -> Any:
    with grpc.insecure_channel(keyed.both.grpc) as channel:
        yield channel


def status_of(channel: Any, path: str, message: bytes = b"", *keys: str) -> str:
    """The status of one call with raw bytes as its message, OK included. A stream ends with its first answer."""
    metadata = [("authorization", f"Bearer {key}") for key in keys]
    call = channel.stream_stream(path)
    try:
        for _ in call(iter([message]), timeout=SECONDS, metadata=metadata):
            return "OK"
    except grpc.RpcError as error:
        return error.code().name
    return "OK"


def message_of(name: str) -> bytes:
    """A message for the call that concerns the model `double`, where it concerns one."""
    if name in NOT_OFFERED:
        return b""
    request = CALLS[name].request()
    if hasattr(request, "model_name"):
        request.model_name = "double"
    elif hasattr(request, "name"):
        request.name = "double"
    return request.SerializeToString()


NAMES = [*CALLS, *NOT_OFFERED]
REFUSED = ("UNAUTHENTICATED", "PERMISSION_DENIED")


@pytest.mark.slow
def test_no_call_but_the_probes_answers_without_a_key_of_this_server(keyed: Keyed, channel: Any) -> None:
    paths = [PATH + name for name in NAMES]
    paths += [PATH + "Nothing", "/x/ServerLive", "/ServerLive", PATH + "serverlive", PATH + "/ServerLive"]
    paths += HEALTH_PATHS
    answered = []
    for path in paths:
        for keys in ((), ("hek_000000000000_x",), (keyed.infers, keyed.infers)):
            if (status := status_of(channel, path, b"", *keys)) != "UNAUTHENTICATED":
                answered.append((path.removeprefix(PATH), len(keys), status))
    assert {(name, count) for name, count, _ in answered} == {
        *((name, n) for name in OPEN for n in (0, 1)),
        *((path, n) for path in HEALTH_PATHS for n in (0, 1, 2)),  # they look at no key
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_call_needs_one_of_the_scopes_of_its_http_route(keyed: Keyed, channel: Any, name: str) -> None:
    like = CALLS[name].like if name in CALLS else NOT_OFFERED[name][0]
    scopes, model = need_of(*like)
    for held, key in keyed.keys.items():
        status = status_of(channel, PATH + name, message_of(name), key)
        # A stream that is refused for its request goes on, and says so in its message.
        expected = bool(scopes) and held.isdisjoint(scopes)
        assert (status == "PERMISSION_DENIED") is expected, (held, status)
    if name != "ModelStreamInfer":
        status = status_of(channel, PATH + name, message_of(name), keyed.limited)
        assert (status == "PERMISSION_DENIED") is (model in ("m", EVERY_MODEL)), status


def test_a_stream_s_request_for_another_model_is_refused_and_not_answered(keyed: Keyed) -> None:
    with grpc.insecure_channel(keyed.both.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        metadata = [("authorization", f"Bearer {keyed.limited}")]
        asked = service_pb2.ModelInferRequest(model_name="double")
        (answer,) = stub.ModelStreamInfer(iter([asked]), metadata=metadata, timeout=SECONDS)
        assert "is for scores" in answer.error_message
        assert keyed.both.roster.models["double"].rows == []


def test_statistics_of_all_models_need_a_key_for_all_models(keyed: Keyed, channel: Any) -> None:
    path = PATH + "ModelStatistics"
    assert status_of(channel, path, b"", keyed.limited) == "PERMISSION_DENIED"
    assert status_of(channel, path, b"", keyed.infers) == "OK"
    own = CALLS["ModelStatistics"].request(name="scores").SerializeToString()
    assert status_of(channel, path, own, keyed.limited) == "OK"


def test_a_call_without_a_key_is_refused_before_its_message_is_sent(keyed: Keyed, channel: Any) -> None:
    """The message comes after the answer, or not at all."""
    ended = threading.Event()

    def never() -> Any:
        ended.wait(SECONDS)
        yield b""

    call = channel.stream_stream(PATH + "ModelInfer")(never(), timeout=SECONDS / 2)
    with pytest.raises(grpc.RpcError) as refused:
        next(iter(call))
    ended.set()
    assert refused.value.code().name == "UNAUTHENTICATED"


@pytest.mark.parametrize("name", [*OPEN, "ServerMetadata"])
def test_a_call_whose_message_has_no_field_is_answered_before_it_is_sent(
    keyed: Keyed, channel: Any, name: str
) -> None:
    """A probe needs no key: its caller can neither make the server read a message nor hold a place by sending none."""
    ended = threading.Event()

    def never() -> Any:
        ended.wait(SECONDS)
        yield b""

    metadata = () if name in OPEN else (("authorization", f"Bearer {keyed.infers}"),)
    call = channel.stream_stream(PATH + name)(never(), timeout=SECONDS / 2, metadata=metadata)
    assert next(iter(call)) is not None
    ended.set()


def test_health_checks_without_a_message_leave_room_for_keys_and_other_probes(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check needs no key: its caller could hold every call, and have any number of large messages taken in."""
    file, waits = KeyFile(tmp_path / "keys.json"), threading.Semaphore(0)
    key, _ = file.add("one", ["infer"])
    both = start(
        access=AccessControl(file), bounds=ServerBounds(seconds=SECONDS, connections=Connections(16))
    )
    ended, only_message = threading.Event(), messages.only_message

    def waiting(*given: Any) -> Any:
        waits.release()
        return only_message(*given)

    monkeypatch.setattr(health_and_reflection, "only_message", waiting)

    def late() -> Any:
        ended.wait(SECONDS)
        yield bytes((10, 6)) + b"double"

    with grpc.insecure_channel(both.grpc) as channel:
        check = channel.stream_stream(HEALTH_PATHS[0])
        first = check(late(), timeout=SECONDS)
        assert waits.acquire(timeout=SECONDS)
        # One after another: eight at once may be more than the calls without a key that may be under way.
        others = [list(check(late(), timeout=SECONDS)) for _ in range(8)]
        assert others == [[b"\x08\x01"]] * 8 and not waits.acquire(blocking=False)
        assert status_of(channel, PATH + "ModelReady", message_of("ModelReady"), key) == "OK"
        ended.set()
        with pytest.raises(grpc.RpcError) as named:
            list(first)
        assert named.value.code().name == "NOT_FOUND"
        assert status_of(channel, HEALTH_PATHS[0], bytes((10, 1)) + b"d") == "NOT_FOUND"


@pytest.mark.parametrize("path", [PATH + "ServerLive", *HEALTH_PATHS])
def test_answers_to_probes_that_are_not_taken_leave_room_for_keys(
    tmp_path: Path, start: Start, path: str
) -> None:
    """The caller's HTTP/2 window is empty: gRPC cannot end such a call, and a caller without a key could hold all."""
    file, most = KeyFile(tmp_path / "keys.json"), 16
    key, _ = file.add("one", ["infer"])
    both = start(access=AccessControl(file), bounds=ServerBounds(connections=Connections(most)))
    prober = Connection(both.grpc)
    prober.send(NO_WINDOW)
    for stream in range(1, 4 * most, 2):
        prober.send(
            frame(HEADERS, END_HEADERS, stream, head_of(path)), frame(DATA, END_STREAM, stream, bytes(5))
        )
    refused = 0
    for kind, flags, _ in prober.read():
        refused += kind == HEADERS and bool(flags & END_STREAM)
        if refused == most:
            break
    with grpc.insecure_channel(both.grpc) as channel:
        assert status_of(channel, PATH + "ModelReady", message_of("ModelReady"), key) == "OK"
        prober.close()
        until(lambda: status_of(channel, path) == "OK")


@pytest.mark.slow
def test_calls_without_their_message_end_and_leave_room_for_others(tmp_path: Path, start: Start) -> None:
    """If they waited without end, one connection could hold every call."""
    file = KeyFile(tmp_path / "keys.json")
    key, _ = file.add("one", ["infer"])
    both = start(access=AccessControl(file), bounds=ServerBounds(seconds=0.5, connections=Connections(4)))
    ended, metadata = threading.Event(), (("authorization", f"Bearer {key}"),)

    def never() -> Any:
        ended.wait(SECONDS)
        yield b""

    path = PATH + "ModelReady"
    with grpc.insecure_channel(both.grpc) as channel:
        ask = channel.stream_stream(path)
        calls = [ask(never(), timeout=SECONDS / 2, metadata=metadata) for _ in range(4)]
        for call in calls:
            with pytest.raises(grpc.RpcError) as late:
                next(iter(call))
            assert "did not arrive within 0.5 s" in (late.value.details() or "")
            assert late.value.code().name == "DEADLINE_EXCEEDED"
        assert status_of(channel, path, message_of("ModelReady"), key) == "OK"
        ended.set()


def test_idle_streams_leave_room_for_unary_calls_and_end_for_new_streams(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams wait between their messages as long as they like: one caller could otherwise hold every call."""
    monkeypatch.setattr(open_stream, "IDLE_SECONDS", 0.0)
    both = start(bounds=ServerBounds(connections=Connections(4)))
    ended = threading.Event()

    def asked(requests: int) -> Iterator[Any]:
        for _ in range(requests):
            yield service_pb2.ModelInferRequest(model_name="nobody")
        ended.wait(SECONDS)

    with grpc.insecure_channel(both.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        idle = []
        for _ in range(3):  # one after another, so that the first is the oldest
            idle.append(stub.ModelStreamInfer(asked(1), timeout=SECONDS))
            assert "unknown model" in next(idle[-1]).error_message
        assert status_of(channel, PATH + "ServerLive") == "OK"
        again = stub.ModelStreamInfer(asked(1), timeout=SECONDS)
        assert "unknown model" in next(again).error_message
        with pytest.raises(grpc.RpcError) as closed:
            next(idle[0])
        assert closed.value.code().name == "UNAVAILABLE" and "was idle" in (closed.value.details() or "")
        assert retry_after(closed.value) == "1"
        monkeypatch.setattr(open_stream, "IDLE_SECONDS", 1e9)
        with pytest.raises(grpc.RpcError) as refused:
            next(stub.ModelStreamInfer(asked(1), timeout=SECONDS))
        assert refused.value.code().name == "UNAVAILABLE" and "none of them is idle" in (
            refused.value.details() or ""
        )
        ended.set()
        assert [list(stream) for stream in (*idle[1:], again)] == [[], [], []]


def test_a_call_that_ends_without_a_message_is_refused(keyed: Keyed, channel: Any) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        metadata = (("authorization", f"Bearer {keyed.infers}"),)
        list(channel.stream_stream(PATH + "ModelReady")(iter(()), timeout=SECONDS / 2, metadata=metadata))
    assert refused.value.code().name == "INVALID_ARGUMENT"


def infer(client: Any, key: str, model: str = "double") -> str:
    """The status of one infer call by tritonclient."""
    given = triton.InferInput("x", [1, 4], "FP32").set_data_from_numpy(np.ones((1, 4), np.float32))
    try:
        client.infer(model, [given], headers={"authorization": f"Bearer {key}"}, client_timeout=SECONDS)
    except InferenceServerException as error:
        return str(error.status()).removeprefix("StatusCode.")
    return "OK"


def test_a_revoked_key_is_refused_on_the_open_connection(keyed: Keyed) -> None:
    with triton.InferenceServerClient(keyed.both.grpc) as client:
        assert infer(client, keyed.infers) == "OK"
        keyed.file.revoke("infer")
        keyed.now_s += LOOK_EVERY_S
        assert infer(client, keyed.infers) == "UNAUTHENTICATED"


def test_a_key_s_limits_are_one_for_both_protocols_and_given_back(keyed: Keyed) -> None:
    at_once, _ = keyed.file.add("at-once", ["infer"], concurrency=1)
    slow, _ = keyed.file.add("slow", ["infer"], rate=0.5)
    keyed.now_s += LOOK_EVERY_S
    with triton.InferenceServerClient(keyed.both.grpc) as client:
        assert [infer(client, at_once) for _ in range(5)] == ["OK"] * 5
        assert [infer(client, at_once, "nobody") for _ in range(5)] == ["NOT_FOUND"] * 5
        by_http = keyed.access.admit(f"Bearer {at_once}", frozenset(("infer",)), "double")
        assert infer(client, at_once) == "RESOURCE_EXHAUSTED"
        by_http.close()
        assert infer(client, at_once) == "OK"
        assert [infer(client, slow), infer(client, slow)] == ["OK", "RESOURCE_EXHAUSTED"]
    with grpc.insecure_channel(keyed.both.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.ModelInfer(
                service_pb2.ModelInferRequest(model_name="double"),
                metadata=[("authorization", f"Bearer {slow}")],
                timeout=SECONDS,
            )
        assert retry_after(refused.value) == "2"


def test_a_call_that_is_cancelled_gives_its_place_back(keyed: Keyed) -> None:
    key, _ = keyed.file.add("at-once", ["infer"], concurrency=1)
    keyed.now_s += LOOK_EVERY_S
    served = keyed.both.roster.models["double"]
    served.holding = True
    asked = service_pb2.ModelInferRequest(
        model_name="double",
        inputs=[{"name": "x", "datatype": "FP32", "shape": [1, 4]}],
        raw_input_contents=[bytes(16)],
    )
    with grpc.insecure_channel(keyed.both.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelInfer.future(asked, metadata=[("authorization", f"Bearer {key}")], timeout=SECONDS)
        assert served.submitted.wait(SECONDS)
        call.cancel()
        assert served.cancelled.wait(SECONDS)
    served.holding = False
    with triton.InferenceServerClient(keyed.both.grpc) as client:
        assert infer(client, key) == "OK"


@pytest.mark.slow
def test_an_order_goes_on_when_its_caller_leaves_and_keeps_its_place_until_it_ends(
    keyed: Keyed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread cannot be cancelled: a caller that cancels and asks again could otherwise begin any number of loads."""
    key, _ = keyed.file.add("at-once", ["manage"], concurrency=1)
    keyed.now_s += LOOK_EVERY_S
    begun, let_go = threading.Semaphore(0), threading.Event()

    def load(name: str, config: Any = None) -> None:
        begun.release()
        assert let_go.wait(SECONDS)

    monkeypatch.setattr(keyed.both.roster, "load", load)
    asked = service_pb2.RepositoryModelLoadRequest(model_name="double")
    more = {"metadata": [("authorization", f"Bearer {key}")], "timeout": SECONDS}
    with grpc.insecure_channel(keyed.both.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.RepositoryModelLoad.future(asked, **more)
        assert begun.acquire(timeout=SECONDS)
        call.cancel()
        for _ in range(5):  # the server hears of it a moment later
            time.sleep(0.1)
            with pytest.raises(grpc.RpcError) as refused:
                stub.RepositoryModelLoad(asked, **{**more, "timeout": 2})
            assert refused.value.code().name == "RESOURCE_EXHAUSTED"
        let_go.set()
        until(lambda: stub.RepositoryModelLoad(asked, **more) is not None)


def until(holds: Callable[[], bool]) -> None:
    """Wait until ``holds`` is true; an error of gRPC counts as not yet."""
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            if holds():
                return
        except grpc.RpcError:
            assert time.monotonic() < deadline
        time.sleep(0.02)


def live(port: str, authority: Any) -> bool:
    """True if the server answers a new connection whose client trusts only this certificate authority."""
    root = authority.cert_pem.bytes()
    with grpc.secure_channel(f"localhost:{port}", grpc.ssl_channel_credentials(root)) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            return stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=2).live
        except grpc.RpcError:
            return False


def test_tls_shows_the_renewed_certificate_to_new_connections(tmp_path: Path, start: Start) -> None:
    pair = Pair(tmp_path)
    both = start(certificates=Certificates(pair.certificate, pair.key))
    port = both.grpc.partition(":")[2]
    old = pair.authority
    other = Pair(tmp_path / "other")
    assert live(port, old) and not live(port, other.authority)
    other.certificate.replace(pair.certificate)
    assert live(port, old), "a certificate without its key is not taken"
    other.key.replace(pair.key)
    assert live(port, other.authority) and not live(port, old)


def test_a_renewed_certificate_that_cannot_be_read_once_is_read_for_the_next_connection(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The certificate's files cannot be read once, for example because the process has too many files open."""
    pair, other = Pair(tmp_path), Pair(tmp_path / "other")
    certificates = Certificates(pair.certificate, pair.key)
    port = start(certificates=certificates).grpc.partition(":")[2]
    made, faults = Certificates._context, [OSError(24, "Too many open files")]

    def context(one: Certificates) -> ssl.SSLContext:
        if faults:
            raise faults.pop()
        return made(one)

    monkeypatch.setattr(Certificates, "_context", context)
    other.certificate.replace(pair.certificate)
    other.key.replace(pair.key)
    live(port, other.authority)
    assert not faults and live(port, other.authority)


def test_connections_above_the_limit_are_ended_before_they_cost_a_call(start: Start) -> None:
    """A connection that is taken gets the server's HTTP/2 settings, one that is too many gets its end."""
    both = start(bounds=ServerBounds(connections=Connections(3)))
    host, _, port = both.grpc.rpartition(":")
    with ExitStack() as stack:
        first = []
        for _ in range(8):
            caller = stack.enter_context(socket.create_connection((host, int(port)), timeout=SECONDS))
            try:
                first.append(caller.recv(1))
            except ConnectionResetError:
                first.append(b"")
    assert sorted(map(bool, first)) == [False] * 5 + [True] * 3
