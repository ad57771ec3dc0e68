"""Triton's `qa/L0_data_compression`: every coding in with every coding out, and compressed mischief."""

import gzip
import zlib

import httpx
import numpy as np
import pytest
import tritonclient.http as triton

from tests.conformance.conftest import LIMIT, SIMPLE, Serving, error_of

CODINGS = ("deflate", "gzip", None)
PACK = {"deflate": zlib.compress, "gzip": gzip.compress}


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
def test_a_compression_bomb_costs_nothing(http: httpx.Client, serving: Serving, coding: str) -> None:
    bomb = PACK[coding](bytes(128 * LIMIT))
    assert len(bomb) < LIMIT, "small enough to be let in"
    before = serving.resident_bytes
    answer = http.post(SIMPLE, content=bomb, headers={"content-encoding": coding})
    assert answer.status_code == 413
    assert "exceeds the maximum allowed input size" in error_of(answer)
    assert serving.resident_bytes - before < 64 * LIMIT
