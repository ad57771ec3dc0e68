"""Forms that came whole: the parts as they were sent, and bounds on what may be sent."""

import httpx
import pytest
from halfeven.models.errors import BadRequest, TooLarge
from halfeven.serve.http.codecs.multipart import is_multipart, read_parts

TYPE = "multipart/form-data; boundary=xx"


def form(*parts: tuple[str, bytes], end: bytes = b"--xx--\r\n") -> bytes:
    return b"".join(b"--xx\r\n%s\r\n\r\n%s\r\n" % (head.encode(), data) for head, data in parts) + end


def named(name: str) -> str:
    return f'Content-Disposition: form-data; name="{name}"'


def test_the_parts_of_a_form_that_a_client_wrote_come_in_their_order() -> None:
    files = [
        ("a", ("ä b.png", b"\x00\r\n--x\r\n\xff", "image/png")),
        ("a", ("2", b"")),
        ("b", (None, b"text")),
    ]
    request = httpx.Request("POST", "http://it", files=files)
    parts = read_parts(request.headers["content-type"], request.read(), 3)
    assert [(part.name, part.data) for part in parts] == [("a", files[0][1][1]), ("a", b""), ("b", b"text")]
    assert parts[1].filename == "2" and parts[2].filename == ""
    assert parts[2].shown == "of field 'b'"


def test_a_form_is_told_by_its_content_type() -> None:
    assert is_multipart("Multipart/Form-Data; boundary=x") and is_multipart("multipart/form-data")
    assert not is_multipart("application/x-www-form-urlencoded") and not is_multipart("")


def test_more_parts_than_rows_are_refused() -> None:
    assert len(read_parts(TYPE, form(*[(named("f"), b"x")] * 4), 4)) == 4
    with pytest.raises(TooLarge, match="more than 3 parts"):
        read_parts(TYPE, form(*[(named("f"), b"x")] * 4), 3)


BAD = {
    "no boundary": ("multipart/form-data", b"", "a boundary of 1 to 70"),
    "an endless boundary": (f"multipart/form-data; boundary={'x' * 71}", b"", "a boundary of 1 to 70"),
    "no form": (TYPE, b"hello", "not the multipart form"),
    "cut off": (TYPE, form((named("f"), b"x"), end=b""), "breaks off"),
    "nothing": (TYPE, b"", "breaks off"),
    "many headers": (
        TYPE,
        form(("\r\n".join(f"a{i}: b" for i in range(100)), b"")),
        "not the multipart form",
    ),
    "long headers": (TYPE, form(("a: " + "b" * 100_000, b"")), "not the multipart form"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_form_is_refused(case: str) -> None:
    content_type, body, fault = BAD[case]
    with pytest.raises(BadRequest, match=fault):
        read_parts(content_type, body, 4)
