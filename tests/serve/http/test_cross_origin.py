"""A page of an origin that the operator allows may ask and read; any other page may not, as before."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from halfeven.models.errors import BadSetting
from halfeven.serve.access.access_control import AccessControl
from halfeven.serve.access.keys import KeyFile
from halfeven.serve.http.web_guard import WebGuard
from halfeven.serve.settings import read_settings

from tests.serve.conftest import GOOD, front_of, make_roster, running
from tests.serve.http.raw_requests import answer_on, connected

APP, OTHER = "https://app.example.com", "https://evil.example"
INFER = "/v2/models/double/infer"
PREDICT = json.dumps({"instances": [[1, 2, 3, 4]]})
ALLOWED, NAMED = "access-control-allow-origin", "origin"


def serving(*origins: str, access: AccessControl | None = None) -> Any:
    roster, guard = make_roster(), WebGuard(origins=origins)
    return running(front_of(roster, guard=guard, access=access))


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with serving(APP, "http://localhost:3000") as host, httpx.Client(base_url=f"http://{host}") as client:
        yield client


ASKED = [
    ("POST", INFER, GOOD), ("POST", "/v1/models/double:predict", PREDICT), ("GET", "/v1/models", ""),
    ("GET", "/v2", ""), ("GET", "/v2/models/nobody", ""), ("POST", INFER, "{"), ("GET", INFER, ""), ("HEAD", "/v2", ""),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path", "body"), ASKED)
@pytest.mark.parametrize("origin", [APP, "http://localhost:3000"])
def test_an_allowed_page_reads_answers_and_errors(
    http: httpx.Client, method: str, path: str, body: str | bytes, origin: str
) -> None:
    answer = http.request(method, path, content=body, headers={NAMED: origin, "sec-fetch-site": "cross-site"})
    assert answer.status_code != 403 and answer.headers[ALLOWED] == origin
    assert "halfeven-precision" in answer.headers["access-control-expose-headers"]
    assert "origin" in answer.headers["vary"].lower()
    assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize(
    "path", [INFER, "/v1/models/double:predict", "/v1/models/double/promote", "/no/route"]
)
def test_an_allowed_page_may_ask_first(http: httpx.Client, path: str) -> None:
    wanted = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    answer = http.options(
        path, headers={NAMED: APP, **wanted, "access-control-request-private-network": "true"}
    )
    assert (answer.status_code, answer.content, answer.headers[ALLOWED]) == (204, b"", APP)
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
    assert answer.headers["access-control-allow-private-network"] == "true"


CHROME = (
    "Host: {}\r\nConnection: keep-alive\r\n{}Accept: */*\r\nOrigin: {}\r\nUser-Agent: Mozilla/5.0 Chrome/142.0\r\n"
    "Sec-Fetch-Mode: cors\r\nSec-Fetch-Site: cross-site\r\nSec-Fetch-Dest: empty\r\nReferer: {}/\r\n"
    "Accept-Encoding: gzip, deflate, br, zstd\r\nAccept-Language: en-US,en;q=0.9\r\n\r\n"
)


def test_the_bytes_of_a_browser_ask_first_and_then_send_on_one_connection(http: httpx.Client) -> None:
    """Chrome writes the bytes so: names in capitals, no body of a preflight, both requests on a kept connection."""
    host = http.base_url.netloc.decode()
    asks = "Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: authorization,content-type\r\n"
    sends = (
        f"Content-Length: {len(GOOD)}\r\nAuthorization: Bearer hek_x\r\nContent-Type: application/json\r\n"
    )
    with connected(host) as connection:
        connection.sendall(f"OPTIONS {INFER} HTTP/1.1\r\n{CHROME.format(host, asks, APP, APP)}".encode())
        status, first, content = answer_on(connection)
        assert (status, content, first[ALLOWED]) == (204, b"", APP)
        assert first["access-control-allow-headers"] == "authorization,content-type"
        # RFC 9110 8.6 and RFC 9112 6.1: neither is allowed in a 204.
        assert "content-length" not in first and "transfer-encoding" not in first
        connection.sendall(f"POST {INFER} HTTP/1.1\r\n{CHROME.format(host, sends, APP, APP)}".encode() + GOOD)
        status, answer, content = answer_on(connection)
        assert (status, answer[ALLOWED]) == (200, APP)
        assert json.loads(content)["outputs"][0]["data"] == [2, 4, 6, 8]


@pytest.mark.parametrize(
    "origin", [OTHER, "null", f"{APP}.evil.example", APP.replace("https", "http"), f"{APP}:444"]
)
def test_any_other_page_is_refused_and_reads_nothing(http: httpx.Client, origin: str) -> None:
    asked = http.post(INFER, content=GOOD, headers={NAMED: origin})
    first = http.options(INFER, headers={NAMED: origin, "access-control-request-method": "POST"})
    read = http.get("/v2", headers={NAMED: origin})
    assert asked.status_code == 403 and first.status_code != 204
    assert all(ALLOWED not in one.headers for one in (asked, first, read))


def test_two_origins_are_no_origin(http: httpx.Client) -> None:
    answer = http.post(INFER, content=GOOD, headers=[(NAMED, APP), (NAMED, OTHER)])
    assert answer.status_code == 403 and ALLOWED not in answer.headers


def test_without_the_setting_no_page_may_ask() -> None:
    with serving() as host:
        answer = httpx.post(f"http://{host}{INFER}", content=GOOD, headers={NAMED: APP})
        assert answer.status_code == 403 and ALLOWED not in answer.headers


def test_every_page_may_ask_where_the_operator_says_so() -> None:
    with serving("*") as host:
        answer = httpx.post(f"http://{host}{INFER}", content=GOOD, headers={NAMED: OTHER})
        assert (answer.status_code, answer.headers[ALLOWED]) == (200, "*")


def test_an_allowed_page_needs_a_key_where_there_are_keys(tmp_path: Any) -> None:
    with serving(APP, access=AccessControl(KeyFile(tmp_path / "keys.json"), True)) as host:
        first = httpx.options(
            f"http://{host}{INFER}", headers={NAMED: APP, "access-control-request-method": "POST"}
        )
        answer = httpx.post(f"http://{host}{INFER}", content=GOOD, headers={NAMED: APP})
        assert (first.status_code, answer.status_code, answer.headers[ALLOWED]) == (204, 401, APP)


@pytest.mark.parametrize(
    "text", ["app.example.com", "https://", "https://a/b", "https://*.example.com", "a b"]
)
def test_what_is_no_origin_is_refused_at_the_start(text: str) -> None:
    with pytest.raises(BadSetting, match="cors-origins"):
        read_settings(cors_origins=text)
