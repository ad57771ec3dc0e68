"""Compressed bodies: whole ones are read, bombs and halves are refused, and only who asks gets one."""

import asyncio
import gzip
import tracemalloc
import zlib
from collections.abc import Callable

import pytest
from halfeven.models.errors import BadRequest, TooLarge
from halfeven.serve.http import content_coding
from halfeven.serve.http.content_coding import chosen_coding, decoded, encoded
from halfeven.serve.http.error_mapping import UnknownCoding, headers_of
from halfeven.serve.http.limits.memory_budget import unlimited
from hypothesis import given
from hypothesis import strategies as st

CODERS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}
LIMIT = 2**20


def read(body: bytes, coding: str, limit: int = LIMIT) -> bytes:
    return asyncio.run(decoded(body, coding, limit, unlimited()))


@pytest.mark.slow
@pytest.mark.parametrize("coding", CODERS)
@given(body=st.binary(max_size=300), times=st.sampled_from([1, 500, 3000]))
def test_a_body_comes_back_as_it_went_in(coding: str, body: bytes, times: int) -> None:
    whole = body * times
    assert read(CODERS[coding](whole), coding, len(whole)) == whole
    back = asyncio.run(encoded(whole, coding))
    assert (gzip.decompress if coding == "gzip" else zlib.decompress)(back) == whole


@pytest.mark.parametrize("name", ["GZIP", " gzip ", "gzip", "x-gzip", "X-GZip"])
def test_names_of_codings_have_no_case(name: str) -> None:
    assert read(gzip.compress(b"x"), name) == b"x"


def test_identity_is_the_body_itself() -> None:
    body = b"x" * 9
    assert read(body, "identity") is body and read(body, "") is body


@pytest.mark.parametrize("coding", ["br", "zstd", "compress", "gzip, gzip", "gzip\x00"])
def test_another_coding_is_refused_with_those_that_are_read(coding: str) -> None:
    with pytest.raises(UnknownCoding, match="Unsupported compression type") as refused:
        read(b"x", coding)
    assert headers_of(refused.value) == {"accept-encoding": "gzip, deflate"}


@pytest.mark.slow
@pytest.mark.parametrize("coding", CODERS)
@pytest.mark.parametrize("times", [10, 80])  # small and large once compressed
def test_a_bomb_is_refused_in_the_memory_that_a_good_body_may_take(coding: str, times: int) -> None:
    bomb = CODERS[coding](bytes(times * LIMIT))
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge, match=f"more than {LIMIT} bytes once decompressed exceeds the maximum"):
            read(bomb, coding)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * LIMIT + len(bomb)


@pytest.mark.parametrize("coding", CODERS)
def test_the_limit_itself_is_allowed_and_one_byte_more_is_not(coding: str) -> None:
    for size in (0, 1, 100, 65536, 65537, 200_000):
        packed = CODERS[coding](bytes(size))
        assert len(read(packed, coding, size)) == size
        if size:
            with pytest.raises(TooLarge):
                read(packed, coding, size - 1)


@pytest.mark.parametrize("coding", CODERS)
@pytest.mark.parametrize("size", [10, 70_000, 300_000])
def test_a_body_that_is_cut_off_damaged_or_followed_is_refused(coding: str, size: int) -> None:
    packed = CODERS[coding](bytes(range(256)) * (size // 256 + 1))
    with pytest.raises(BadRequest, match="cut off"):
        read(packed[:-3], coding)
    with pytest.raises(BadRequest, match=f"is not {coding}, as its Content-Encoding says"):
        read(b"{" + packed, coding)
    with pytest.raises(BadRequest, match=f"5 bytes follow the request's {coding} stream"):
        read(packed + b"extra", coding)
    with pytest.raises(BadRequest, match="cut off"):
        read(b"", coding)
    with pytest.raises(BadRequest):
        read(packed[:12] + bytes(20) + packed[32:], coding)


def test_many_small_streams_in_a_row_are_refused_at_once() -> None:
    with pytest.raises(BadRequest, match="bytes follow"):
        read(gzip.compress(b"") * 30_000, "gzip")


@pytest.mark.parametrize(
    ("accepted", "coding", "with_lists"),
    [
        ("", None, None),
        ("gzip", "gzip", "gzip"),
        ("deflate", "deflate", "deflate"),
        ("GZip ; q=0.3", "gzip", "gzip"),
        ("x-gzip", "gzip", "gzip"),
        ("gzip, deflate", None, "gzip"),
        ("deflate, gzip, br, zstd", None, "deflate"),
        ("gzip, br", "gzip", "gzip"),
        ("gzip;q=0.5, deflate;q=0.8", "deflate", "deflate"),
        ("gzip;q=1.0, identity; q=0.5, *;q=0", "gzip", "gzip"),
        ("gzip;q=0.5, identity;q=0.5", None, None),
        ("identity;q=0.4, deflate;q=0.5", "deflate", "deflate"),
        ("gzip;q=0", None, None),
        ("*;q=0", None, None),
        ("gzip;q=2", None, None),
        ("gzip;q=nan", None, None),
        ("identity", None, None),
        ("br", None, None),
        ("*", None, "gzip"),
        ("*, identity;q=0", "gzip", "gzip"),
        ("gzip, deflate, identity;q=0", "gzip", "gzip"),
        ("gzip;q=0, *;q=0.5", "deflate", "deflate"),
        (",;,q=;", None, None),
    ],
)
def test_the_answer_is_in_the_coding_that_is_asked_for(
    accepted: str, coding: str | None, with_lists: str | None
) -> None:
    assert (chosen_coding(accepted), chosen_coding(accepted, True)) == (coding, with_lists)


def test_an_accept_encoding_beyond_all_reason_is_not_read_and_not_remembered() -> None:
    long = "gzip, " + "x" * 1000
    before = content_coding._chosen.cache_info().currsize
    assert chosen_coding("gzip") == "gzip" and chosen_coding(long) is None
    assert content_coding._chosen.cache_info().currsize <= before + 1
