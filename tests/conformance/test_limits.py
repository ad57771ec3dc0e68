"""Triton's `http_input_size_limit_test.py` and `http_request_many_chunks.py` with a limit of 1 MiB, and callers
who are slow, half gone or never finished: memory stays bounded and everybody else is served meanwhile.
"""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.conformance.conftest import (
    BODY_SECONDS,
    COUNTING,
    LIMIT,
    ONES,
    SIMPLE,
    Serving,
    answers_right,
    error_of,
)
from tests.patience import PATIENCE_S, until

FLOATS = "/v2/models/onnx_zero_1_float32/infer"
RAW = {"Inference-Header-Content-Length": "0"}
TOO_LARGE = "exceeds the maximum allowed input size"
MOST_CHUNKS = 65_536


@pytest.mark.parametrize(("offset", "status"), [(-8, 200), (0, 200), (8, 413)])
def test_limit_raw_binary(http: httpx.Client, offset: int, status: int) -> None:
    sent = np.random.default_rng(7).standard_normal(LIMIT // 4 + offset, np.float32).tobytes()
    answer = http.post(FLOATS, content=sent, headers=RAW)
    assert answer.status_code == status
    if status == 200:
        assert answer.content[int(answer.headers["inference-header-content-length"]) :] == sent
    else:
        assert TOO_LARGE in error_of(answer)
        assert str(LIMIT) in error_of(answer) and str(len(sent)) in error_of(answer)


@pytest.mark.parametrize(("count", "status"), [(LIMIT // 5, 200), (LIMIT // 4, 413)])
def test_limit_json(http: httpx.Client, count: int, status: int) -> None:
    given = {"name": "INPUT0", "shape": [1, count], "datatype": "FP32", "data": [1.0] * count}
    text = json.dumps({"inputs": [given]}, separators=(",", ":"))[: -2 if status == 200 else None]
    text = text if status == 413 else text + "]}"
    answer = http.post(FLOATS, content=text)
    assert answer.status_code == status, answer.text[:300]
    if status == 200:
        assert answer.json()["outputs"][0]["data"] == [1.0] * count


@pytest.mark.parametrize(("more", "status"), [(0, 200), (8, 413)])
def test_limit_of_a_body_that_declares_no_length(http: httpx.Client, more: int, status: int) -> None:
    sent = [bytes(LIMIT // 2), bytes(LIMIT // 2 + more)]
    answer = http.post(FLOATS, content=iter(sent), headers=RAW)
    assert answer.status_code == status
    assert status == 200 or TOO_LARGE in error_of(answer)


def test_small_json_that_declares_a_large_tensor_allocates_nothing(
    http: httpx.Client, serving: Serving
) -> None:
    def declare() -> None:
        for size in (2**28, 2**40, 2**61):
            given = {"name": "INPUT0", "shape": [1, size], "datatype": "FP32", "data": [1.0]}
            assert http.post(FLOATS, json={"inputs": [given]}).status_code == 400
            declared = {**given, "parameters": {"binary_data_size": 4 * size}}
            del declared["data"]
            text = json.dumps({"inputs": [declared]}).encode()
            headers = {"Inference-Header-Content-Length": str(len(text))}
            assert http.post(FLOATS, content=text + bytes(64), headers=headers).status_code == 400

    assert serving.leaked_bytes(declare) < 2**19


@pytest.mark.parametrize("path", [SIMPLE, "/v2/repository/index", "/v1/models/simple:predict"])
def test_a_declared_length_above_the_limit_is_refused_before_a_byte_is_sent(
    serving: Serving, path: str
) -> None:
    with connected(serving) as wire:
        wire.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {2**40}\r\n\r\n".encode())
        assert status_of(wire) == 413


@pytest.mark.parametrize(("chunks", "status"), [(MOST_CHUNKS - 1, 400), (MOST_CHUNKS + 10, 413)])
def test_many_chunks(serving: Serving, chunks: int, status: int) -> None:
    """One chunk per piece of a packet: uvicorn joins what arrives together, so few of these are ever counted."""
    with connected(serving) as wire:
        wire.sendall(chunked_head())
        send_as_far_as_it_goes(wire, b"1\r\nA\r\n" * chunks + b"0\r\n\r\n")
        assert status_of(wire) in (400, status)


@pytest.mark.slow(seconds=8)
def test_a_flood_of_chunks_leaves_memory_where_it_was(serving: Serving) -> None:
    def flood() -> None:
        for _ in range(2):
            with connected(serving) as wire:
                wire.sendall(chunked_head())
                send_as_far_as_it_goes(wire, b"1\r\nA\r\n" * 500_000)
                send_as_far_as_it_goes(wire, b"1\r\nA\r\n" * 100_000 + b"0\r\n\r\n")
                assert status_of(wire) in (400, 413)

    assert serving.leaked_bytes(flood) < 2**19


def chunked_head() -> bytes:
    header = "Inference-Header-Content-Length: 0\r\nTransfer-Encoding: chunked\r\nConnection: close"
    return f"POST {SIMPLE} HTTP/1.1\r\nHost: localhost\r\n{header}\r\n\r\n".encode()


def send_as_far_as_it_goes(wire: socket.socket, data: bytes) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # a server need not read what it refuses
        wire.sendall(data)


@contextmanager
def connected(serving: Serving) -> Iterator[socket.socket]:
    host, port = serving.address.split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as wire:
        yield wire


def status_of(wire: socket.socket) -> int:
    """The status line's number; a connection that ends without one is the test's failure."""
    head = b""
    while b"\r\n" not in head:
        piece = wire.recv(4096)
        assert piece, "the connection ended without an answer"
        head += piece
    return int(head.split()[1])


GOOD = json.dumps({"inputs": [COUNTING, ONES]}).encode()
HEAD = f"POST {SIMPLE} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(GOOD)}\r\n\r\n".encode()
# The bytes that are sent before nothing more comes.
UNFINISHED = {
    "no byte at all": b"",
    "half a request line": b"POST /v2/mod",
    "half a header": HEAD[:60],
    "no body": HEAD,
    "half a body": HEAD + GOOD[:40],
    "a chunk that does not end": HEAD.replace(b"Content-Length", b"Transfer-Encoding: chunked\r\nX")
    + b"20\r\nabc",
}


def test_fifty_slow_callers_of_every_kind_hold_up_nobody(serving: Serving) -> None:
    with ExitStack() as open_wires, serving.client() as client:
        for _ in range(50):
            for begun in UNFINISHED.values():
                open_wires.enter_context(connected(serving)).sendall(begun)
        began = time.monotonic()
        for _ in range(20):
            answers_right(client)
        assert time.monotonic() - began < 20 * BODY_SECONDS  # each answer would wait for an unfinished body


def test_callers_who_hang_up_in_the_middle_leave_nothing_behind(serving: Serving) -> None:
    def descriptors() -> int:
        return len(list(Path(f"/proc/{serving.process.pid}/fd").iterdir()))

    with serving.client() as client:
        answers_right(client)
        before = descriptors()
        for begun in [*UNFINISHED.values(), HEAD + GOOD] * 20:
            with connected(serving) as wire:
                wire.sendall(begun)
        # Connections are taken in order: whoever hung up was taken before this one.
        with serving.client() as late:
            answers_right(late)
        until(lambda: descriptors() <= before)
