"""A web page of another origin commands nothing and reads nothing: every route of the whole server, on the wire."""

import contextlib
import http.client
import re
import socket
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from halfeven.models.errors import BadSetting
from halfeven.models.store.store import Store
from halfeven.serve.http.error_mapping import ForeignHost, ForeignPage
from halfeven.serve.http.page_headers import OWN_PAGE, POLICY
from halfeven.serve.http.routes.infer import InferFront
from halfeven.serve.http.web_guard import SAFE_METHODS, WebGuard, read_names
from halfeven.serve.settings import read_settings

from tests.patience import PATIENCE_S
from tests.serve.conftest import GOOD, running
from tests.serve.http.raw_requests import answer_on, connected
from tests.serve.http.route_table import asked, filled, routes, whole_server

# The headers of browsers for a page on another site, another port, a sandboxed frame, and in place of Origin.
HOSTILE = [
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"origin": "http://localhost:3000"},
    {"origin": "http://{address}.evil.example"},
    {"origin": "http://evil.example", "sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"origin": "http://{address}", "sec-fetch-site": "cross-site"},
]
METHODS = {"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"}
Dial = Callable[[str], http.client.HTTPConnection]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[InferFront, str]]:
    """The server as it is built, over an empty store: what is refused is refused before anything is looked up."""
    app = whole_server(Store(tmp_path_factory.mktemp("empty") / "store"))
    with running(app) as address:
        yield app, address


@pytest.fixture
def dial() -> Iterator[Dial]:
    """Kept-alive connections, closed when the test ends."""
    with contextlib.ExitStack() as stack:
        yield lambda address: stack.enter_context(
            contextlib.closing(http.client.HTTPConnection(address, timeout=PATIENCE_S))
        )


@pytest.mark.slow
def test_a_method_that_a_path_does_not_take_is_told_all_that_it_takes(
    whole: tuple[InferFront, str], dial: Dial
) -> None:
    front, address = whole
    connection, takes = dial(address), defaultdict[str, set[str]](set)
    for method, path in routes(front):
        takes[path] |= {"GET", "HEAD"} if method == "GET" else {method}
    for path, methods in takes.items():
        if "POST" in methods and "GET" in takes.get(path.replace("validate", "{id}"), ()):
            methods = methods | {"GET", "HEAD"}  # the name of a job is any word
        methods = {"POST"} if path.endswith((":predict", ":endpoint")) else methods
        for method in METHODS - methods:
            status, headers, _ = asked(connection, method, filled(path), {})
            if status != 501:
                allowed = set((headers["allow"] or "").split(", "))
                assert (status, allowed) == (405, methods), (method, path)


@pytest.mark.parametrize("hostile", HOSTILE, ids=str)
def test_every_route_that_changes_something_refuses_a_foreign_page(
    whole: tuple[InferFront, str], hostile: dict[str, str], dial: Dial
) -> None:
    front, address = whole
    connection = dial(address)
    headers = {name: value.format(address=address) for name, value in hostile.items()}
    obeyed = []
    for method, path in routes(front):
        if method in SAFE_METHODS:
            continue
        status, _, said = asked(connection, method, filled(path), headers, "{}")
        code = said.get(
            "code", "foreign_origin" if path.startswith("/v2") and list(said) == ["error"] else None
        )
        if (status, code) != (403, "foreign_origin"):
            obeyed.append((method, path, status))
    assert obeyed == []


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example:8000", "127.0.0.1.evil.example", "0.0.0.0"]
)
def test_every_route_refuses_a_name_that_is_not_the_server_s(
    whole: tuple[InferFront, str], host: str, dial: Dial
) -> None:
    front, address = whole
    connection = dial(address)
    served = []
    for method, path in routes(front):
        status, _, said = asked(connection, method, filled(path), {"host": host})
        if status != 421 or (method != "HEAD" and host not in str(said)):
            served.append((method, path, status))
    assert served == []


def test_the_server_s_own_pages_and_programs_are_let_in(server: str, roster: Any, dial: Dial) -> None:
    """The orders that a foreign page may not give are taken from a program, and from a page of the server itself."""
    own = {"origin": f"http://{server}", "sec-fetch-site": "same-origin"}
    connection = dial(server)
    for headers in ({}, own, {"sec-fetch-site": "none"}):
        assert asked(connection, "POST", "/v2/repository/models/double/unload", headers)[0] == 200
        assert asked(connection, "POST", "/v2/repository/models/double/load", headers)[0] == 200
        assert asked(connection, "POST", "/v1/models/double/rollback", headers)[0] == 200
        assert asked(connection, "POST", "/v2/models/double/infer", headers, GOOD)[0] == 200


def test_a_refused_order_is_not_carried_out(server: str, roster: Any, dial: Dial) -> None:
    connection = dial(server)
    page = {"origin": "https://evil.example"}
    assert asked(connection, "POST", "/v2/repository/models/double/unload", page)[0] == 403
    assert asked(connection, "POST", "/v2/models/double/infer", page, GOOD)[0] == 403
    assert asked(connection, "GET", "/v2/models/double/ready", page)[0] == 200
    assert roster.models["double"].rows == []


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ("Host: localhost", 200),
        ("Host: evil.example", 421),
        ("Host: localhost\r\nHost: evil.example", 400),
        ("Host: localhost\r\nOrigin: https://evil.example", 403),
        ("Host: localhost\r\nSec-Fetch-Site: cross-site", 403),
        ("HOST: LOCALHOST:1\r\nORIGIN: http://localhost:1", 200),
    ],
)
@pytest.mark.parametrize("after", [0, 2], ids=["first", "after known heads"])
def test_the_short_way_lets_in_whom_the_long_way_does(
    server: str, roster: Any, hot_requests: list[Any], more: str, status: int, after: int
) -> None:
    """Straight from the parser, and where the head before it is remembered."""
    with connected(server) as connection:
        for fields, wanted in (*[("Host: localhost", 200)] * after, (more, status)):
            connection.sendall(
                f"POST /v2/models/double/infer HTTP/1.1\r\n{fields}\r\n"
                f"Content-Length: {len(GOOD)}\r\n\r\n".encode()
                + GOOD
            )
            assert answer_on(connection)[0] == wanted
    assert len(hot_requests) == after + (status == 200 and "ORIGIN" not in more)


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_no_upgrade_to_a_websocket_is_offered(whole: tuple[InferFront, str], method: str, dial: Dial) -> None:
    connection = dial(whole[1])
    upgrade = {
        "connection": "upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "x" * 22 + "==",
        "origin": "https://evil.example",
    }
    assert asked(connection, method, "/v1/models", upgrade)[0] in (200, 403)


ORDERS = [
    ("/v2/repository/models/double/load", "{}"),
    ("/v2/repository/models/double/unload", "{}"),
    ("/v2/repository/index", '{"ready": true}'),
    ("/v1/models/double/promote", '{"version": 1}'),
    ("/v1/models/double/canary", '{"version": 1, "percent": 1}'),
    ("/v1/models/double/shadow", "{}"),
    ("/v1/fine_tuning/jobs", "{}"),
]
FORMS = [
    "text/plain",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    "text/plain;application/json",
]


@pytest.mark.parametrize("path, body", ORDERS)
def test_an_order_that_is_a_form_is_no_order(
    whole: tuple[InferFront, str], path: str, body: str, dial: Dial
) -> None:
    connection = dial(whole[1])
    for kind in FORMS:
        status, _, said = asked(connection, "POST", path, {"content-type": kind}, body)
        assert status == 415 and "application/json" in str(said)
    for kind in ("application/json", "application/json; charset=utf-8", "Application/Merge-Patch+JSON"):
        assert asked(connection, "POST", path, {"content-type": kind}, body)[0] not in (415, 403, 421)
    without = asked(connection, "POST", path, {}, body)[0]
    assert (without == 415) is path.startswith("/v1"), "V2 clients send no content type"


def test_an_infer_request_is_taken_whatever_its_content_type_says(
    server: str, roster: Any, dial: Dial
) -> None:
    connection = dial(server)
    kind = {"content-type": "application/x-www-form-urlencoded"}  # curl -d
    assert asked(connection, "POST", "/v2/models/double/infer", kind, GOOD)[0] == 200
    asks = '{"instances": [[1, 2, 3, 4]]}'
    assert asked(connection, "POST", "/v1/models/double:predict", kind, asks)[0] == 200


PAGES = {"/", "/models/{m}", "/events", "/jobs", "/docs", "/v1/fine_tuning/jobs/{id}/page"}


def test_every_readable_answer_says_to_run_nothing_and_load_nothing(
    whole: tuple[InferFront, str], dial: Dial
) -> None:
    front, address = whole
    connection = dial(address)
    bare = []
    for method, path in routes(front):
        if method != "GET":
            continue
        status, headers, _ = asked(connection, method, filled(path), {"origin": "https://evil.example"})
        reply = (
            headers["content-security-policy"],
            headers["x-content-type-options"],
            headers["x-frame-options"],
        )
        policy = OWN_PAGE if path in PAGES and status == 200 else POLICY
        if reply != (policy, "nosniff", "DENY") or not headers["referrer-policy"]:
            bare.append((path, status, reply))
        assert not [name for name in headers if name.lower().startswith("access-control-")]
    assert bare == []
    assert (
        "frame-ancestors 'none'" in POLICY and "script-src" not in POLICY and "default-src 'none'" in POLICY
    )


def test_no_page_has_a_script_but_the_server_s_own() -> None:
    root = Path(__file__).resolve().parents[3]
    templates = [*(root / "serve").rglob("*.html"), *(root / "exporters").rglob("*.html")]
    assert len(templates) >= 3
    for template in templates:
        text = template.read_text().replace('<script src="{{ root }}page.js" defer></script>', "")
        assert "<script" not in text and not re.search(r"<[^>]*\son\w+\s*=", text), template
        assert not re.search(r"(?:src|href|action)\s*=\s*[\"']?(?:https?:)?//", text), template


# The names of a server.

LOCAL = [
    "localhost",
    "LOCALHOST:8000",
    "localhost.",
    "127.0.0.1",
    "127.8.9.10:1",
    "[::1]",
    "[::1]:8000",
    "[::ffff:127.0.0.1]",
]
ADDRESSES = ["10.1.2.3:8000", "[fd00::1]:8000", "0.0.0.0"]
PRIVATE = [
    "halfeven:8000",
    "halfeven.models.svc",
    "halfeven.models.svc.cluster.local",
    "box.local",
    "gpu.internal",
]
PUBLIC = [
    "evil.example",
    "localhost.evil.example",
    "127.0.0.1.nip.io",
    "halfeven.dev",
    "cluster.local.evil.example",
]
NONSENSE = [
    "",
    " ",
    "localhost:8000@evil.example",
    "localhost, evil.example",
    "localhost/x",
    "[::1",
    "127.0.0.1:x",
    "löcal",
]


def knows(guard: WebGuard, names: list[str]) -> list[str]:
    return [name for name in names if guard.knows(name.encode())]


@pytest.mark.parametrize(
    ("guard", "known"),
    [
        (WebGuard(), LOCAL),
        (WebGuard("127.0.0.1", ["models.example.com"]), LOCAL),
        (WebGuard("0.0.0.0"), [*LOCAL, *ADDRESSES, *PRIVATE]),
        (WebGuard("::"), [*LOCAL, *ADDRESSES, *PRIVATE]),
        (WebGuard("127.0.0.1", ["*"]), [*LOCAL, *ADDRESSES, *PRIVATE, *PUBLIC]),
        (
            WebGuard("127.0.0.1", ["*.example"]),
            [*LOCAL, *(name for name in PUBLIC if name.endswith(".example"))],
        ),
        (WebGuard("halfeven.dev"), [*LOCAL, *ADDRESSES, *PRIVATE, "halfeven.dev"]),
    ],
    ids=[
        "loopback",
        "one name",
        "everywhere",
        "everywhere by IPv6",
        "every name",
        "a domain",
        "a name of its own",
    ],
)
def test_whose_names_a_server_knows(guard: WebGuard, known: list[str]) -> None:
    for _ in range(2):  # the second time from memory
        assert knows(guard, [*LOCAL, *ADDRESSES, *PRIVATE, *PUBLIC, *NONSENSE]) == [
            name for name in [*LOCAL, *ADDRESSES, *PRIVATE, *PUBLIC] if name in known
        ]


def test_a_server_that_listens_beyond_the_machine_knows_the_machine_s_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "GPU1.example.com")
    assert knows(WebGuard("0.0.0.0"), ["gpu1.example.com:8000", "gpu2.example.com"]) == [
        "gpu1.example.com:8000"
    ]
    assert knows(WebGuard("127.0.0.1"), ["gpu1.example.com"]) == []


def test_a_listed_name_is_known_with_any_port_and_nothing_below_it_is() -> None:
    guard = WebGuard("127.0.0.1", read_names("Models.Example.com, 10.0.0.5"))
    assert knows(guard, ["models.example.com", "models.example.com:443", "10.0.0.5:8000"]) != []
    assert knows(guard, ["x.models.example.com", "example.com", "10.0.0.6"]) == []


def test_what_is_remembered_of_callers_names_has_a_bound(random: np.random.Generator) -> None:
    guard = WebGuard("0.0.0.0", ["*"])
    for number in random.permutation(5000):
        guard.knows(b"n%d:80" % number)
        guard.knows(b"x" * 5000 + b"%d" % number)
    assert len(guard._known) <= 256 and max(map(len, guard._known)) < 300


def test_a_name_that_every_host_may_have_does_not_open_the_door_to_other_origins() -> None:
    guard = WebGuard("127.0.0.1", ["*"])
    guard.check("POST", [(b"host", b"any.example"), (b"origin", b"https://any.example")])
    with pytest.raises(ForeignPage):
        guard.check("POST", [(b"host", b"any.example"), (b"origin", b"https://evil.example")])


@pytest.mark.parametrize(
    ("origin", "host", "same"),
    [
        ("http://localhost:8000", "localhost:8000", True),
        ("https://localhost", "localhost", True),  # TLS ends at a proxy
        ("https://localhost", "localhost:443", True),
        ("http://localhost", "localhost:443", False),
        ("http://localhost", "localhost:8000", False),
        ("http://localhost:8000", "127.0.0.1:8000", False),
        ("http://localhost:80000000", "localhost", False),
        ("http://evil.example@localhost", "localhost", False),
        ("chrome-extension://localhost", "localhost", False),
        ("", "localhost", False),
    ],
)
def test_an_origin_is_the_server_s_where_name_and_port_are(origin: str, host: str, same: bool) -> None:
    headers = [(b"host", host.encode()), (b"origin", origin.encode())]
    WebGuard().check("GET", headers)
    if same:
        WebGuard().check("POST", headers)
    else:
        with pytest.raises(ForeignPage, match="Origin"):
            WebGuard().check("POST", headers)


def test_a_request_without_host_cannot_have_an_origin_and_is_no_page_s() -> None:
    WebGuard().check("POST", [])  # HTTP/1.0
    with pytest.raises(ForeignPage):
        WebGuard().check("POST", [(b"origin", b"http://localhost")])
    with pytest.raises(ForeignHost):
        WebGuard().check("POST", [(b"host", b"")])


@pytest.mark.parametrize("text", ["http://a", "a b", "a/b", "*a", "**", "a:80"])
def test_a_setting_that_is_no_name_is_refused_by_name(text: str) -> None:
    with pytest.raises(BadSetting, match="--allowed-hosts"):
        read_settings(allowed_hosts=text)
