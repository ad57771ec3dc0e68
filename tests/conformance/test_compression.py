"""Triton's `qa/L0_data_compression`: every coding in with every coding out, and compressed mischief."""

import gzip
import json
import zlib

import httpx
import numpy as np
import pytest
import tritonclient.http as triton

from tests.conformance.conftest import COUNTING, LIMIT, ONES, SIMPLE, Serving, error_of

CODINGS = ("deflate", "gzip", None)
PACK = {"deflate": zlib.compress, "gzip": gzip.compress}
TEXT = json.dumps({"inputs": [COUNTING, ONES]}).encode()


@pytest.mark.parametrize("response", CODINGS)
@pytest.mark.parametrize("request_", CODINGS)
@pytest.mark.parametrize("binary", [True, False])
def test_every_coding_in_and_out(serving: Serving, binary: bool, request_, response) -> None:
    first, second = np.arange(16, dtype=np.int32)[None], np.ones((1, 16), np.int32)
    inputs = [
        triton.InferInput(name, [1, 16], "INT32").set_data_from_numpy(array, binary_data=binary)
        for name, array in (("INPUT0", first), ("INPUT1", second))
    ]
    outputs = [triton.InferRequestedOutput(f"OUTPUT{i}", binary_data=binary) for i in range(2)]
    with triton.InferenceServerClient(serving.address) as client:
        result = client.infer(
            "simple",
            inputs,
            outputs=outputs,
            request_compression_algorithm=request_,
            response_compression_algorithm=response,
        )
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), first + second)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), first - second)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_the_answer_is_compressed_where_the_caller_accepts_it(serving: Serving, coding: str) -> None:
    with httpx.Client(base_url=f"http://{serving.address}") as client:
        request = client.build_request("POST", SIMPLE, content=TEXT, headers={"accept-encoding": coding})
        answer = client.send(request, stream=True)
        body = b"".join(answer.iter_raw())
    assert answer.headers["content-encoding"] == coding
    assert json.loads(zlib.decompress(body, wbits=47))["outputs"][0]["data"] == list(range(1, 17))


@pytest.mark.parametrize("accepted", ["identity", "gzip;q=0", "br", "*;q=0", "nonsense;;q=q"])
def test_the_answer_is_plain_where_the_caller_does_not_accept_it(http: httpx.Client, accepted: str) -> None:
    answer = http.post(SIMPLE, content=TEXT, headers={"accept-encoding": accepted})
    assert answer.status_code == 200 and "content-encoding" not in answer.headers


@pytest.mark.parametrize("coding", ["br", "zstd", "compress", "gzip, gzip", "x"])
def test_another_coding_is_refused_with_those_that_are_taken(http: httpx.Client, coding: str) -> None:
    answer = http.post(SIMPLE, content=TEXT, headers={"content-encoding": coding})
    assert answer.status_code in (415, 501)
    assert "Unsupported compression type" in error_of(answer)
    assert answer.headers["accept-encoding"] == "gzip, deflate"


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@pytest.mark.parametrize(
    ("mangle", "what"),
    [
        (lambda packed: packed[:-9], "cut off"),
        (lambda packed: TEXT, "not compressed at all"),
        (lambda packed: b"", "empty"),
        (lambda packed: packed + b"more", "with a tail"),
        (lambda packed: packed[:12] + bytes(20) + packed[32:], "broken inside"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_body_that_is_not_what_its_coding_says_is_refused(http: httpx.Client, coding, mangle, what) -> None:
    answer = http.post(SIMPLE, content=mangle(PACK[coding](TEXT)), headers={"content-encoding": coding})
    assert answer.status_code == 400, what
    assert error_of(answer)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_a_compression_bomb_costs_nothing(http: httpx.Client, serving: Serving, coding: str) -> None:
    bomb = PACK[coding](bytes(128 * LIMIT))
    assert len(bomb) < LIMIT, "small enough to be let in"
    before = serving.resident_bytes
    answer = http.post(SIMPLE, content=bomb, headers={"content-encoding": coding})
    assert answer.status_code == 413
    assert "exceeds the maximum allowed input size" in error_of(answer)
    assert serving.resident_bytes - before < 64 * LIMIT
