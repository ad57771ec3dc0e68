"""Bad input over a real wire: refused with words, the server lives, and the next caller is answered right.

What a request itself can say wrongly is in tests/serve/test_bad_requests.py; here is what only the whole server can get
wrong.
"""

import json

import httpx
import pytest

from tests.conformance.conftest import COUNTING, ONES, SIMPLE, Serving, answers_right, error_of
from tests.conformance.raw_exchange import exchange

GOOD = {"inputs": [COUNTING, ONES]}


BINARY = {
    "inputs": [
        {"name": f"INPUT{i}", "shape": [1, 16], "datatype": "INT32", "parameters": {"binary_data_size": 64}}
        for i in range(2)
    ]
}
TEXT = json.dumps(BINARY).encode()
BAD_BINARY: dict[str, tuple[dict[str, str], bytes, str]] = {
    "a byte too few": ({}, bytes(127), "expecting 1 additional bytes"),
    "a byte too many": ({}, bytes(129), "unexpected additional input data"),
    "no bytes": ({}, b"", "expecting 64 additional bytes"),
    "a header beyond the body": (
        {"Inference-Header-Content-Length": "9999"},
        bytes(128),
        "should be in range",
    ),
    "a header that cuts the JSON": ({"Inference-Header-Content-Length": "20"}, bytes(128), "JSON"),
    "a header that takes in a tensor": (
        {"Inference-Header-Content-Length": str(len(TEXT) + 64)},
        b"\1" * 128,
        "JSON",
    ),
}


@pytest.mark.parametrize("case", BAD_BINARY)
def test_a_bad_binary_body_is_refused_with_words(http: httpx.Client, case: str) -> None:
    headers, tail, words = BAD_BINARY[case]
    headers = {"Inference-Header-Content-Length": str(len(TEXT)), **headers}
    answer = http.post(SIMPLE, content=TEXT + tail, headers=headers)
    assert answer.status_code == 400
    assert words in error_of(answer)


@pytest.mark.parametrize("size", [63, 65, 0, 2**63])
def test_a_binary_size_that_is_not_the_tensors_is_refused(http: httpx.Client, size: object) -> None:
    lying = {**BINARY["inputs"][0], "parameters": {"binary_data_size": size}}
    text = json.dumps({"inputs": [lying, BINARY["inputs"][1]]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(text))}
    answer = http.post(SIMPLE, content=text + bytes(128), headers=headers)
    assert answer.status_code == 400
    assert "INPUT0" in error_of(answer) or "binary_data_size" in error_of(answer)


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
