"""The acts of one gRPC connection: it may ping, hold calls and reset them; none of it touches the calls of others."""

import asyncio
import socket
import struct
import threading
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from halfeven.serve.grpc.grpc_server import GrpcServer
from halfeven.serve.http.limits.request_limits import DEFAULTS

from tests.serve.grpc.conftest import Both, Start
from tests.serve.grpc.frames import (
    ACK,
    CANCEL,
    END_HEADERS,
    GOAWAY,
    HEADERS,
    PING,
    RST_STREAM,
    SETTINGS,
    Connection,
    frame,
    head_of,
)

CALL = "/inference.GRPCInferenceService/ModelInfer"
PINGS, RESETS = 20, 5000
_MOST_STREAMS = 3  # the identifier of SETTINGS_MAX_CONCURRENT_STREAMS


def pinged(both: Both, last: tuple[int, int]) -> list[tuple[int, int]]:
    """Kinds and flags of the frames that answer many pings in a row, to the first or (of acknowledgements) last one."""
    connection, found = Connection(both.grpc), []
    connection.send(*(frame(PING, payload=struct.pack("!Q", number)) for number in range(PINGS)))
    for kind, flags, _ in connection.read():
        found += [(kind, flags)] if kind in (PING, GOAWAY) else []
        if found.count(last) == (PINGS if last == (PING, ACK) else 1):
            break
    connection.close()
    return found


def test_pings_are_answered_as_often_as_the_setting_allows(start: Start) -> None:
    found = pinged(start(limits=replace(DEFAULTS, ping_seconds=0)), (PING, ACK))
    assert found.count((PING, ACK)) == PINGS and (GOAWAY, 0) not in found


def test_a_client_that_pings_all_the_time_is_cut_off(start: Start) -> None:
    assert (GOAWAY, 0) in pinged(start(), (GOAWAY, 0))


def test_a_connection_is_told_how_many_calls_it_may_hold(start: Start) -> None:
    connection = Connection(start().grpc)
    settings = next(payload for kind, flags, payload in connection.read() if kind == SETTINGS and not flags)
    connection.close()
    pairs = [struct.unpack_from("!HI", settings, at) for at in range(0, len(settings), 6)]
    assert (_MOST_STREAMS, DEFAULTS.streams_per_connection) in pairs


def test_limits_beyond_those_of_grpc_do_not_hinder_the_start(start: Start) -> None:
    both, limits = start(), replace(DEFAULTS, arrival_seconds=float("inf"))
    both.front.max_body_bytes = 2**31

    async def starts() -> None:
        another = GrpcServer(both.front, both.roster, "127.0.0.1", 0, limits=limits)
        await another.start()
        await another.stop(0)

    asyncio.run(starts())


@pytest.mark.slow
def test_a_connection_that_begins_nothing_ends_with_the_time_for_a_head(start: Start) -> None:
    both = start(limits=replace(DEFAULTS, arrival_seconds=0.3))
    host, _, port = both.grpc.rpartition(":")
    with socket.create_connection(
        (host, int(port)), 20
    ) as silent:  # seconds: gRPC itself would wait for a minute
        while silent.recv(4096):  # the server's own settings, before it closes
            pass


def test_a_connection_without_a_call_ends_with_the_time_for_idle_ones(start: Start) -> None:
    connection = Connection(start(limits=replace(DEFAULTS, idle_seconds=1)).grpc)
    kinds = [kind for kind, _, _ in connection.read()]
    connection.close()
    assert GOAWAY in kinds


def test_calls_that_are_reset_by_the_thousands_touch_no_other_caller(start: Start) -> None:
    both, faults, ended = start(), list[str](), threading.Event()
    answered = threading.Semaphore(0)

    def ask() -> None:
        with triton.InferenceServerClient(both.grpc) as client:
            while not ended.is_set():
                try:
                    client.is_model_ready("double")
                    answered.release()
                except triton.InferenceServerException as error:
                    faults.append(str(error))
                    answered.release()

    callers = [threading.Thread(target=ask) for _ in range(2)]
    for caller in callers:
        caller.start()
    attackers = [Connection(both.grpc) for _ in range(4)]
    head = head_of(CALL)
    for number in range(RESETS):
        stream = 2 * number + 1
        attackers[number % 4].send(
            frame(HEADERS, END_HEADERS, stream, head), frame(RST_STREAM, 0, stream, CANCEL)
        )
    for _ in range(100):  # answers after the attack, too
        assert answered.acquire(timeout=20)
    ended.set()
    for caller in callers:
        caller.join(20)
    for attacker in attackers:
        attacker.close()
    assert faults == []


def test_compressed_messages_are_read_within_the_limit(start: Start) -> None:
    both = start()
    with triton.InferenceServerClient(both.grpc) as client:
        x = triton.InferInput("x", [1, 4], "FP32")
        x.set_data_from_numpy(np.ones((1, 4), np.float32))
        for algorithm in ("gzip", "deflate"):
            found: Any = client.infer("double", [x], compression_algorithm=algorithm)
            assert found.as_numpy("y").tolist() == [[2] * 4]


def test_what_unpacks_to_more_than_the_limit_is_refused(start: Start) -> None:
    with grpc.insecure_channel(start().grpc, options=[("grpc.max_send_message_length", -1)]) as channel:
        call: Any = channel.unary_unary(CALL)
        with pytest.raises(grpc.RpcError) as refused:
            call(bytes(2**24), compression=grpc.Compression.Gzip, timeout=20)
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
