"""Bad input over a real wire: refused with words, the server lives, and the next caller is answered right.

What a request itself can say wrongly is in tests/serve/test_bad_requests.py; here is what only the whole server can get
wrong.
"""

import json

import pytest

from tests.conformance.conftest import COUNTING, ONES, SIMPLE, Serving, answers_right
from tests.conformance.raw_exchange import exchange

GOOD = {"inputs": [COUNTING, ONES]}


# Header lines as they go over the wire; what may come back.
HEADER_GAMES = {
    "two lengths of the JSON": (
        ["Inference-Header-Content-Length: 5", "Inference-Header-Content-Length: 7"],
        {400},
    ),
    "two content lengths": (["Content-Length: 5", "Content-Length: 7"], {400}),
    "a negative content length": (["Content-Length: -5"], {400}),
    "a content length in words": (["Content-Length: five"], {400}),
    "a content length of two numbers": (["Content-Length: 5, 5"], {400}),
    "length and chunks": (["Content-Length: 5", "Transfer-Encoding: chunked"], {400}),
    "an unknown transfer coding": (["Transfer-Encoding: gzip"], {400, 501}),
    "an empty JSON length": (["Inference-Header-Content-Length: ", "Content-Length: 2"], {400}),
    "a JSON length with a plus": (["Inference-Header-Content-Length: +2", "Content-Length: 2"], {400}),
    "a header without a name": ([": x", "Content-Length: 2"], {400}),
    "a header with a null byte": (["X-A: a\0b", "Content-Length: 2"], {400}),
    "a header of 1 MB": (["X-A: " + "a" * 2**20, "Content-Length: 2"], {400, 413, 431}),
    "100,000 headers": ([f"X-{i}: 1" for i in range(100_000)] + ["Content-Length: 2"], {400, 413, 431}),
    "a name folded over two lines": (["X-A: a", " b", "Content-Length: 2"], {400}),
}


@pytest.mark.parametrize("game", HEADER_GAMES)
def test_games_with_headers_end_with_a_refusal(serving: Serving, game: str) -> None:
    lines, allowed = HEADER_GAMES[game]
    head = "\r\n".join([f"POST {SIMPLE} HTTP/1.1", "Host: localhost", *lines, "Connection: close", "", "{}"])
    answer = exchange(serving, head.encode())
    assert answer and int(answer.split()[1]) in allowed, answer[:200]


ALIASES = [
    "/v2/models/simple/infer/",
    "/v2/models/Simple/infer",
    "/v2/models/simple/INFER",
    "/V2/models/simple/infer",
    "/v2//models/simple/infer",
    "//v2/models/simple/infer",
    "/v2/models/./simple/infer",
    "/v2/models/x/../simple/infer",
    "/v2/models/%2e%2e/simple/infer",
    "/v2/models/..%2fsimple/infer",
    "/v2/models/simple%2f/infer",
    "/v2/models/simple%00/infer",
    "/v2/models/simple%20/infer",
    "/v2/models/simple%252e/infer",
    "/v2/models/simple;v=1/infer",
    "/v2/models/simple\\infer",
    "/v2/models//infer",
    "/v2/models/%2fetc%2fpasswd/infer",
    "/v2/models/..%2f..%2f..%2fetc%2fpasswd/infer",
    "/v2/models/%ff%fe/infer",
    "/v2/models/" + "a" * 60_000 + "/infer",
    "/v2/models/simple/versions/0/infer",
    "/v2/models/simple/versions/-1/infer",
    "/v2/models/simple/versions/01/infer",
    "/v2/models/simple/versions/1.0/infer",
    "/v2/models/simple/versions/latest/infer",
    "/v2/models/simple/versions/..%2f1/infer",
    "/v2/models/simple/versions/99999999999999999999999/infer",
    "/v2/models/simple/versions//infer",
]


@pytest.mark.parametrize("path", ALIASES, ids=lambda path: path[:60])
def test_no_trick_with_a_name_reaches_a_model(serving: Serving, path: str) -> None:
    body = json.dumps(GOOD).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    answer = exchange(serving, head.encode() + body)
    assert answer and int(answer.split()[1]) in (400, 404, 405, 414), answer[:300]
    assert b"/tmp" not in answer and b"halfeven-store" not in answer and b"Traceback" not in answer


@pytest.mark.parametrize("tail", ["", "/ready", "/config", "/stats", "/versions/1/ready"])
@pytest.mark.parametrize(
    "name", ["..", "%2e%2e%2f%2e%2e", "..%2f..%2fetc%2fpasswd", "a%00b", "SIMPLE", "%5c..%5c"]
)
def test_no_trick_with_a_name_reaches_what_is_said_of_a_model(serving: Serving, name: str, tail: str) -> None:
    head = f"GET /v2/models/{name}{tail} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answer = exchange(serving, head.encode())
    assert answer and int(answer.split()[1]) in (400, 404, 405), answer[:300]
    assert b"/tmp" not in answer and b"Traceback" not in answer


def test_a_bystander_is_answered_right_between_bad_requests(serving: Serving) -> None:
    bad_bodies = (
        json.dumps(GOOD)[:-3],
        '{"inputs":' + "[" * 250_000 + "]" * 250_000 + "}",
        json.dumps({"inputs": [{**COUNTING, "shape": [2**32, 2**32]}, ONES]}),
        json.dumps({**GOOD, "outputs": [{"name": "OUTPUT0"}] * 40_000}),
    )
    with serving.client() as bad, serving.client() as good:
        for body in bad_bodies:
            assert bad.post(SIMPLE, content=body).status_code == 400
            answers_right(good)
