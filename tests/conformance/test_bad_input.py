"""Bad input over a real wire: refused with words, the server lives, and the next caller is answered right.

The reader's own refusals are in tests/serve/http/codecs; here is what only the whole server can get wrong.
"""

import json
from typing import Any

import httpx
import pytest

from tests.conformance.conftest import COUNTING, ONES, SIMPLE, Serving, answers_right, error_of
from tests.conformance.raw_exchange import exchange
from tests.slow import slow_but_every

GOOD = {"inputs": [COUNTING, ONES]}


def with_first(**changed: Any) -> dict[str, Any]:
    return {"inputs": [{**COUNTING, **changed}, ONES]}


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


BAD_BODIES: dict[str, tuple[object, str]] = {
    "nothing": (b"", "JSON"),
    "not JSON": (b"\xff\xfe{", "JSON"),
    "half JSON": (json.dumps(GOOD)[:-3], "JSON"),
    "two objects": (json.dumps(GOOD) * 2, "JSON"),
    "a list": ([GOOD], "object"),
    "a number": (3, "object"),
    "null": (None, "object"),
    "nesting of 1,000": ('{"inputs":' + nested(1000) + "}", "inputs"),
    "nesting of 101 in the data": (
        json.dumps(with_first(data="?")).replace('"?"', "[" * 101 + "1" + "]" * 101),
        "depth",
    ),
    "a number of 500,000 digits": (
        json.dumps(with_first(data="?")).replace('"?"', "[" + "1" * 500_000 + "]"),
        "JSON",
    ),
    "NaN and a number of 500,000 digits": (
        json.dumps(with_first(data="?")).replace('"?"', "[NaN," + "1" * 500_000 + "]"),
        "JSON",
    ),
    "NaN and a nesting of 250,000": ('{"a":NaN,"inputs":' + nested(250_000) + "}", "depth"),
    "nesting of 250,000": ('{"inputs":' + nested(250_000) + "}", "depth"),
    "nesting of objects": ('{"a":' * 30_000 + "1" + "}" * 30_000, "depth"),
    "deep parameters": ('{"parameters":{"a":' + nested(200) + '},"inputs":[]}', "parameters"),
    "no inputs": ({}, "inputs"),
    "inputs of another kind": ({"inputs": "all"}, "inputs"),
    "an input that is no object": ({"inputs": [1]}, "inputs"),
    "a name that is no string": (with_first(name=7), "name"),
    "a name with a null byte": (with_first(name="INPUT0\0"), "INPUT0"),
    "one input of two": ({"inputs": [COUNTING]}, "INPUT1"),
    "one input twice": ({"inputs": [COUNTING, COUNTING, ONES]}, "INPUT0"),
    "100,000 inputs": ({"inputs": [{"name": "a"}] * 50_000}, "input"),
    "100,000 outputs": ({**GOOD, "outputs": [{"name": "OUTPUT0"}] * 40_000}, "already exists"),
    "an unknown output": ({**GOOD, "outputs": [{"name": "OUTPUT9"}]}, "OUTPUT9"),
    "another datatype": (with_first(datatype="FP32"), "INT32"),
    "no datatype": (with_first(datatype=None), "INT32"),
    "an unheard-of datatype": (with_first(datatype="X" * 100_000), "INT32"),
    "BYTES": (with_first(datatype="BYTES"), "BYTES"),
    "too many rows": (with_first(shape=[2**20, 16]), "batch"),
    "no rows": (with_first(shape=[0, 16], data=[]), "shape"),
    "a dimension too many": (with_first(shape=[1, 16, 1]), "shape"),
    "a scalar": (with_first(shape=[], data=[1]), "shape"),
    "a million dimensions": (with_first(shape=[1] * 200_000), "shape"),
    "a shape of floats": (with_first(shape=[1.0, 16.0]), "shape"),
    "a shape of strings": (with_first(shape=["1", "16"]), "shape"),
    "a shape of truths": (with_first(shape=[True, 16]), "shape"),
    "a shape beyond 64 bits": (with_first(shape=[2**70, 16]), "shape"),
    "a shape whose product wraps to 16": (with_first(shape=[2**32 + 1, 2**32 * 16]), "shape"),
    "a shape whose product wraps to 0": (with_first(shape=[2**32, 2**32]), "element count"),
    "a number too large": (with_first(data=[2**31] + [0] * 15), "INPUT0"),
    "a number beyond 64 bits": (with_first(data=[2**80] + [0] * 15), "INPUT0"),
    "floats for integers": (with_first(data=[0.5] * 16), "INPUT0"),
    "strings for integers": (with_first(data=["1"] * 16), "INPUT0"),
    "null for integers": (with_first(data=[None] * 16), "INPUT0"),
    "truths for integers": (with_first(data=[True] * 16), "INPUT0"),
    "an object for data": (with_first(data={"a": 1}), "INPUT0"),
    "ragged data": (with_first(data=[[1] * 15, [1]]), "data"),
    "data and its size": (with_first(parameters={"binary_data_size": 64}), "only one"),
    "shared memory": (
        {"inputs": [{**COUNTING, "data": None, "parameters": {"shared_memory_region": "a"}}, ONES]},
        "only one",
    ),
    "a reserved parameter": ({**GOOD, "parameters": {"triton_enable_x": True}}, "triton_"),
    "a sequence": ({**GOOD, "parameters": {"sequence_id": 1}}, "sequence"),
    "parameters of another kind": ({**GOOD, "parameters": [1]}, "parameters"),
    "binary_data_output of another kind": (
        {**GOOD, "parameters": {"binary_data_output": 1}},
        "binary_data_output",
    ),
    "an id of another kind": ({**GOOD, "id": {"a": 1}}, "id"),
    "a negative timeout": ({**GOOD, "parameters": {"timeout": -1}}, "timeout"),
    "a timeout in words": ({**GOOD, "parameters": {"timeout": "soon"}}, "timeout"),
    "a priority in words": ({**GOOD, "parameters": {"priority": "high"}}, "priority"),
    "a negative priority": ({**GOOD, "parameters": {"priority": -1}}, "priority"),
    "a classification of nothing": (
        {**GOOD, "outputs": [{"name": "OUTPUT0", "parameters": {"classification": -1}}]},
        "classification",
    ),
    "a classification in words": (
        {**GOOD, "outputs": [{"name": "OUTPUT0", "parameters": {"classification": "best"}}]},
        "classification",
    ),
}


@pytest.mark.parametrize("case", slow_but_every(4, BAD_BODIES))
def test_a_bad_body_is_refused_with_words(http: httpx.Client, case: str) -> None:
    body, words = BAD_BODIES[case]
    answer = http.post(SIMPLE, content=body if isinstance(body, str | bytes) else json.dumps(body))
    assert answer.status_code == 400, answer.text[:300]
    assert words in error_of(answer)
    assert len(error_of(answer)) < 5_000, "a refusal does not send everything back"


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


@pytest.mark.parametrize("size", [63, 65, 0, -64, 2**63, 2**70, 64.0, "64", True, None, [64]])
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
    with serving.client() as bad, serving.client() as good:
        for case in (
            "half JSON",
            "nesting of 250,000",
            "a shape whose product wraps to 0",
            "100,000 outputs",
        ):
            body = BAD_BODIES[case][0]
            assert (
                bad.post(SIMPLE, content=body if isinstance(body, str) else json.dumps(body)).status_code
                == 400
            )
            answers_right(good)
