"""Names in URLs: however they are written, they are looked up in a dictionary or not at all.

Sent over a bare socket, because clients tidy such paths up before they send them.
"""

import pytest

from ...conftest import GOOD
from ..raw_requests import answer_on, connected, message

ODD = [
    "/v2/models//infer",
    "/v2/models/../infer",
    "/v2/models/%2e%2e/infer",
    "/v2/models/..%2f..%2fetc%2fpasswd/infer",
    "/v2/models/double%2f..%2fdouble/infer",
    "/v2/models/double%5c/infer",
    "/v2/models/double%00/infer",
    "/v2/models/double%0d%0ax:%20y/infer",
    "/v2/models/double/versions//infer",
    "/v2/models/double/versions/../infer",
    "/v2/models/double/versions/3%2f/infer",
    "/v2/models/double/versions/-3/infer",
    "/v2/models/double/versions/03/infer",
    "/v2/models/double/versions/%33%33/infer",
    "/v2/models/double/infer/",
    "/v2/models/double//infer",
    "//v2/models/double/infer",
    "/v2/./models/double/infer",
    "/V2/models/double/infer",
    "/v2/Models/double/infer",
    "/v2/models/Double/infer",
    "/v2/models/double/INFER",
    "/v2/models/%64ouble%20/infer",
    "/v2/models/%c3%28/infer",
    "/v2/models/" + "a" * 5000 + "/infer",
    "/v2/models/*/infer",
    "/v2/models/double;x=1/infer",
    "/v2//models/double/infer",
    "/v2/models/x/../double/infer",
    "/v2/models/double%252e/infer",
    "/v2/models/double\\infer",
    "/v2/models/%5c..%5c/infer",
    "/v2/models/%2fetc%2fpasswd/infer",
    "/v2/models/double/versions/0/infer",
    "/v2/models/double/versions/1.0/infer",
    "/v2/models/double/versions/latest/infer",
    "/v2/models/double/versions/99999999999999999999999/infer",
]
ENCODED = [
    "/v2/models/double/infer",
    "/v2/models/%64%6f%75ble/infer",
    "/v2/models/double/versions/3/infer",
    "/v2/models/double/versions/%33/infer?test_1=1&test_2=2",
    "/v2%2fmodels/double%2Fversions%2f3/infer",  # an encoded slash is a slash before anybody looks
]


def status_of(server: str, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    with connected(server) as connection:
        connection.sendall(message(body, path, method, connection="close"))
        status, _, answer = answer_on(connection)
    return status, answer


@pytest.mark.parametrize("path", ODD)
def test_an_odd_name_is_nobody_s(path: str, server: str) -> None:
    status, body = status_of(server, "POST", path, GOOD)
    assert status in (404, 405, 400), body
    for asked in (
        path.replace("/infer", ""),
        path.replace("/infer", "/config"),
        path.replace("/infer", "/ready"),
        path.replace("/infer", "/stats"),
    ):
        status, body = status_of(server, "GET", asked)
        assert status in (404, 405, 400), (asked, body)
        assert b"passwd" not in body or b"is not found" in body


@pytest.mark.parametrize("path", ENCODED)
def test_a_good_name_may_be_percent_encoded(path: str, server: str) -> None:
    assert status_of(server, "POST", path, GOOD)[0] == 200
