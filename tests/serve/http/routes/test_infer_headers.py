"""The values that are read from the headers of an infer request."""

import pytest
from halfeven.models.errors import BadRequest
from halfeven.serve.http.routes.infer import NOTHING, HeaderFields, scan

LENGTH = b"inference-header-content-length"


def test_headers_that_nobody_asked_for_say_nothing() -> None:
    assert scan([(b"host", b"x"), (b"content-length", b"3")]) == (None, NOTHING)


def test_each_header_is_told_apart() -> None:
    length, fields = scan(
        [
            (b"content-encoding", b"gzip"),
            (LENGTH, b"12"),
            (b"accept-encoding", b"gzip"),
            (b"accept-encoding", b"deflate;q=0.5"),
            (b"x-request-id", b"a-1"),
        ]
    )
    assert (length, fields) == (
        "12",
        HeaderFields("gzip", "gzip, deflate;q=0.5", ((b"x-request-id", b"a-1"),)),
    )
    assert fields.request_id == "a-1" and NOTHING.request_id is None


def test_a_length_that_comes_twice_must_be_the_same() -> None:
    assert scan([(b"host", b"x"), (LENGTH, b"12")]) == ("12", NOTHING)
    assert scan([(LENGTH, b"12"), (LENGTH, b"12")])[0] == "12"
    with pytest.raises(BadRequest, match=r"came 2 times with different values: '12, 13'"):
        scan([(LENGTH, b"12"), (LENGTH, b"13")])


@pytest.mark.parametrize("value", [b"", b"a b", b"\xe4", b"a\r\nset-cookie: x", b"a" * 129, b"\x00"])
def test_an_id_that_cannot_be_said_back_is_nobody_s(value: bytes) -> None:
    assert scan([(b"x-request-id", value)])[1].ids == ()
    assert scan([(b"triton-request-id", b"~" * 128)])[1].request_id == "~" * 128
