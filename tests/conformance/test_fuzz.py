"""Triton's `qa/L0_http_fuzz` in small: every URL with every method and random bytes for a body, a request line
or a header. The server stays up and calls nothing its own fault. Seeded: the same mischief every time.
"""

import json
import random

import pytest

from tests.conformance.conftest import COUNTING, ONES, SIMPLE, Serving
from tests.conformance.raw_exchange import exchange
from tests.slow import slow_part_but

METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "CONNECT", "OPTIONS", "TRACE", "BREW"]
URLS = [
    "/v2",
    "/v2/models/simple",
    "/v2/models/simple/infer",
    "/v2/models/simple/versions/v1",
    "/v2/models/simple/versions/1/infer",
    "/v2/models/simple/config",
    "/v2/models/simple/stats",
    "/v2/models/simple/ready",
    "/v2/models/stats",
    "/v2/health/ready",
    "/v2/health/live",
    "/v2/repository/index",
    "/v2/repository/models/nobody/unload",
    "/v2/repository/models/nobody/load",
    "/v2/systemsharedmemory/status",
    "/v2/systemsharedmemory/region/xx/register",
    "/v2/cudasharedmemory/unregister",
    "/v2/cudasharedmemory/region/xx/status",
    "/v2/trace/setting",
    "/v2/logging",
    "/v1/models/simple:predict",
    "/v1/models/simple/versions",
    "/v1/fine_tuning/jobs",
    "/v1/files",
    "/metrics",
    "/docs",
    "/",
]
FIELDS = "Host: localhost\r\nConnection: close\r\n"
MAY_ANSWER_5XX = (501, 503)  # not offered, not now: both with words


def judged(answer: bytes, what: str) -> None:
    """No answer (a hang-up on what is no HTTP) or an answer that is not a server's fault."""
    if answer:
        status = int(answer.split()[1])
        assert status < 500 or status in MAY_ANSWER_5XX, f"{status} for {what}: {answer[-300:]!r}"
        assert b"Traceback" not in answer


@pytest.mark.parametrize("url", slow_part_but(2, URLS[::5], URLS))
def test_any_method_with_any_body(serving: Serving, url: str) -> None:
    chance = random.Random(url)
    for method in METHODS:
        for body in (b"", b"{}", b"[]", chance.randbytes(64), b'{"a":' * 200):
            head = f"{method} {url} HTTP/1.1\r\n{FIELDS}Content-Length: {len(body)}\r\n\r\n"
            judged(exchange(serving, head.encode() + body), f"{method} {url} {body[:30]!r}")


@pytest.mark.parametrize("seed", range(60))
def test_a_good_request_with_some_bytes_changed(serving: Serving, seed: int) -> None:
    chance = random.Random(seed)
    body = json.dumps({"inputs": [COUNTING, ONES]}).encode()
    head = f"POST {SIMPLE} HTTP/1.1\r\n{FIELDS}Content-Length: {len(body)}\r\n\r\n".encode()
    whole = bytearray(head + body)
    first = 0 if seed % 2 else len(head)  # half of them leave the headers alone, so that the body is read
    for _ in range(chance.randint(1, 12)):
        place = chance.randrange(first, len(whole))
        match chance.randrange(3):
            case 0:
                whole[place] = chance.randrange(256)
            case 1:
                whole[place:place] = chance.randbytes(chance.randint(1, 8))
            case _:
                del whole[place : place + chance.randint(1, 8)]
    if first:
        length = str(len(whole) - len(head)).encode()
        whole[: len(head)] = head.replace(str(len(body)).encode(), length, 1)
    else:
        whole += b"\r\n\r\n" + b" " * 600  # enough for any length that the headers may now declare
    judged(exchange(serving, bytes(whole)), f"seed {seed}")


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_for_a_request(serving: Serving, seed: int) -> None:
    chance = random.Random(1000 + seed)
    noise = chance.randbytes(chance.randint(1, 4000))
    judged(exchange(serving, noise + b"\r\n\r\n"), "noise")
    line = f"POST {chance.choice(URLS)}".encode() + chance.randbytes(30).replace(b"\n", b"") + b" HTTP/1.1"
    judged(exchange(serving, line + b"\r\nHost: localhost\r\nConnection: close\r\n\r\n"), "a noisy URL")
