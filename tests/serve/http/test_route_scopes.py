"""Every route of the whole server, on the wire: refused without a key and with the wrong one, open to the right one."""

import http.client
import socket
from collections.abc import Iterator
from contextlib import closing
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from halfeven.models.errors import Unauthenticated, UnknownName
from halfeven.models.store.store import Store
from halfeven.serve.access.access_control import LOOK_EVERY_S, AccessControl
from halfeven.serve.access.keys import EVERY_MODEL, SCOPES, KeyFile
from halfeven.serve.http.route_scopes import need_of, rule_of

from tests.patience import PATIENCE_S
from tests.serve.conftest import GOOD, FakeRoster, front_of, make_roster, running
from tests.serve.http.raw_requests import answer_on, connected
from tests.serve.http.route_table import asked, filled, routes, whole_server

OPEN = {"/healthz", "/v2/health/live", "/v2/health/ready"}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")


class Whole:
    """The server as it is built, over an empty store, with one key for each set of scopes."""

    def __init__(self, store: Store) -> None:
        file = KeyFile(store.root / "keys.json")
        self.keys: dict[frozenset[str], str] = {}
        for size in (1, len(SCOPES) - 1, len(SCOPES)):
            for scopes in combinations(SCOPES, size):
                self.keys[frozenset(scopes)], _ = file.add("-".join(scopes), scopes)
        self.limited, _ = file.add("limited", SCOPES, ["other"])
        self.front = whole_server(store)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Whole, http.client.HTTPConnection]]:
    served = Whole(Store(tmp_path_factory.mktemp("empty") / "store"))
    with (
        running(served.front) as address,
        closing(http.client.HTTPConnection(address, timeout=PATIENCE_S)) as connection,
    ):
        yield served, connection


def ask(
    connection: http.client.HTTPConnection, method: str, path: str, key: str | None, body: str | bytes = ""
) -> tuple[int, Any, Any]:
    """(status, headers, JSON or bytes), asked as a page of the server's own does."""
    own = f"http://{connection.host}:{connection.port}"
    sent = {"content-type": "application/json", "origin": own}
    return asked(connection, method, path, sent | ({"authorization": f"Bearer {key}"} if key else {}), body)


def test_every_route_of_the_application_has_its_own_rule(whole: tuple[Whole, Any]) -> None:
    """A route without a rule would need `manage`, which may be too much, and nothing would have been decided."""
    assert [
        (method, path) for method, path in routes(whole[0].front) if not rule_of(method, filled(path))
    ] == []


@pytest.mark.slow
def test_no_route_but_the_probes_answers_without_a_key_of_this_server(
    whole: tuple[Whole, http.client.HTTPConnection],
) -> None:
    front, connection = whole[0].front, whole[1]
    answered = []
    for path in {filled(path) for _, path in routes(front)} | {
        "/nothing",
        "/v2/models//infer",
        "/%2e/healthz",
    }:
        for method in METHODS:
            for key in (None, "hek_000000000000_x"):
                status, headers, _ = ask(connection, method, path, key)
                if status != 401 or "Bearer" not in headers["www-authenticate"]:
                    answered.append((method, path, key is None))
    assert {(method, path) for method, path, _ in answered} == {
        (method, path) for path in OPEN for method in ("GET", "HEAD")
    }


ALIASES = (
    "{}/", "/{}", "{}?key=x", "{}%20", "{}%0A", "{};x", "{}#x", "//localhost{}", "/.{}", "/x/..{}", "{}%00", "{}/.",
    "{}%2F", "{}.json",
)  # fmt: skip


@pytest.mark.slow
def test_no_other_spelling_of_a_route_answers_without_a_key(
    whole: tuple[Whole, http.client.HTTPConnection],
) -> None:
    front, connection = whole[0].front, whole[1]
    answered = []
    for method, route in routes(front):
        path = filled(route)
        if path in OPEN:
            continue
        spellings = {alias.format(path) for alias in ALIASES} | {path.upper(), path.swapcase()}
        spellings |= {path.replace("/", "%2F"), path.replace("/", "//"), path.replace("o", "%6F")}
        for spelling in sorted(spellings - OPEN):
            if (status := ask(connection, method, spelling, None)[0]) not in (400, 401):
                answered.append((method, spelling, status))
    assert answered == []


@pytest.mark.slow
def test_a_route_needs_one_of_its_scopes_and_no_other_helps(
    whole: tuple[Whole, http.client.HTTPConnection],
) -> None:
    served, connection = whole
    wrong = []
    for method, route in routes(served.front):
        path = filled(route)
        scopes, model = need_of(method, path)
        for held, key in served.keys.items():
            status = ask(connection, method, path, key, "{}")[0]
            if (status in (401, 403)) is not (bool(scopes) and held.isdisjoint(scopes)):
                wrong.append((method, path, sorted(held), status))
        # A key for another model: whatever concerns this one, or all of them, is refused.
        status = ask(connection, method, path, served.limited, "{}")[0]
        if (status == 403) is not (model is not None):
            wrong.append((method, path, "limited", status))
    assert wrong == []


def test_what_is_refused_has_the_code_of_the_error_table(
    whole: tuple[Whole, http.client.HTTPConnection],
) -> None:
    served, connection = whole
    infers = served.keys[frozenset(("infer",))]
    assert ask(connection, "GET", "/v1/models/x", None)[2]["code"] == "unauthenticated"
    assert ask(connection, "GET", "/v1/models/x", infers)[2]["code"] == "forbidden"
    assert list(ask(connection, "POST", "/v2/models/x/infer", None)[2]) == ["error"]


def test_the_table_says_who_may_do_what() -> None:
    """The decisions themselves: a change of one is seen here."""
    decided = {
        ("POST", "/v2/models/m/infer"): ({"infer"}, "m"),
        ("POST", "/v2/models/m/versions/1/infer"): ({"infer"}, "m"),
        ("POST", "/v1/models/m:predict"): ({"infer"}, "m"),
        ("POST", "/v1/models/m/versions/1:predict"): ({"infer"}, "m"),
        ("GET", "/metrics"): ({"metrics"}, EVERY_MODEL),
        ("POST", "/v2/repository/models/m/load"): ({"manage"}, "m"),
        ("POST", "/v2/repository/models/m/unload"): ({"manage"}, "m"),
        ("POST", "/v1/models/m/promote"): ({"manage"}, "m"),
        ("POST", "/v1/models/m/rollback"): ({"manage"}, "m"),
        ("GET", "/"): ({"infer", "train", "manage"}, None),
        ("GET", "/models/m"): ({"infer", "train", "manage"}, "m"),
        ("POST", "/models/m/try"): ({"infer"}, "m"),
        ("POST", "/models/m/promote"): ({"manage"}, "m"),
        ("POST", "/models/m/canary"): ({"manage"}, "m"),
        ("GET", "/events"): ({"train", "manage"}, None),
        ("GET", "/jobs"): ({"train"}, None),
        ("GET", "/v1/models/m/versions/1/report"): ({"manage", "train"}, "m"),
        ("POST", "/v1/files"): ({"train"}, None),
        ("GET", "/v1/files"): ({"train"}, None),
        ("GET", "/v1/fine_tuning/jobs"): ({"train"}, None),
        ("DELETE", "/v1/files/1"): ({"train"}, None),
        ("POST", "/v1/fine_tuning/jobs"): ({"train"}, None),
        ("GET", "/v2/models/stats"): ({"infer", "manage", "metrics"}, EVERY_MODEL),
        ("GET", "/unknown"): ({"manage"}, EVERY_MODEL),
        ("GET", "/healthz\n"): ({"manage"}, EVERY_MODEL),
        ("POST", "/healthz"): ({"manage"}, EVERY_MODEL),
    }
    assert {asked: need_of(*asked) for asked in decided} == decided


# The infer route, which is answered in three ways: from the parser, from a head that is known, and by ASGI.


class Serving:
    def __init__(self, folder: Path) -> None:
        self.file = KeyFile(folder / "keys.json")
        self.key, _ = self.file.add("ci", ["infer"], ["double"])
        self.now_s = 0.0
        self.roster: FakeRoster = make_roster()
        self.access = AccessControl(self.file, clock=lambda: self.now_s)
        self.front = front_of(self.roster, max_body_bytes=4096, access=self.access)


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[tuple[Serving, socket.socket]]:
    served = Serving(tmp_path)
    with running(served.front) as address, connected(address) as connection:
        yield served, connection


def infer(line: tuple[Serving, socket.socket], *keys: str, model: str = "double", **more: str) -> int:
    """The status of one infer request on the connection, with an Authorization header for each key."""
    _, connection = line
    fields = {"Host": "localhost", "Content-Length": str(len(GOOD)), **more}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    head += "".join(f"Authorization: Bearer {key}\r\n" for key in keys)
    connection.sendall(f"POST /v2/models/{model}/infer HTTP/1.1\r\n{head}\r\n".encode() + GOOD)
    return answer_on(connection)[0]


ASGI = {"X-Request-Id": "7"}


def test_the_short_way_asks_for_the_key_as_the_long_way_does(
    serving: tuple[Serving, socket.socket], hot_requests: list[Any]
) -> None:
    key = serving[0].key
    for more in ({}, ASGI):
        assert infer(serving, **more) == 401
        assert infer(serving, key + "x", **more) == 401
        assert infer(serving, key, key, **more) == 401
        assert infer(serving, key, model="scores", **more) == 403
        assert [infer(serving, key, **more) for _ in range(3)] == [200] * 3
    assert len(hot_requests) == 3
    assert serving[0].roster.models["scores"].rows == []


@pytest.mark.parametrize("more", [{}, ASGI], ids=["short", "asgi"])
def test_a_revocation_ends_a_connection_s_requests_without_a_restart(
    serving: tuple[Serving, socket.socket], more: dict[str, str]
) -> None:
    served = serving[0]
    assert [infer(serving, served.key, **more) for _ in range(3)] == [200] * 3
    served.file.revoke("ci")
    served.now_s += LOOK_EVERY_S
    assert [infer(serving, served.key, **more) for _ in range(2)] == [401] * 2
    with pytest.raises(Unauthenticated, match="revoked"):
        served.access.admit(f"Bearer {served.key}", frozenset(("infer",)), "double")


@pytest.mark.parametrize("more", [{}, ASGI], ids=["short", "asgi"])
def test_a_key_s_requests_at_once_are_limited_and_given_back(
    serving: tuple[Serving, socket.socket], more: dict[str, str]
) -> None:
    served = serving[0]
    key, _ = served.file.add("two", ["infer"], concurrency=1)
    served.now_s += LOOK_EVERY_S
    assert [infer(serving, key, **more) for _ in range(5)] == [200] * 5
    assert infer(serving, served.key, **more) == 200  # the server has ended the fifth request by now
    held = served.access.admit(f"Bearer {key}", frozenset(("infer",)), "double")
    assert infer(serving, key, **more) == 429
    assert infer(serving, served.key, **more) == 200
    held.close()
    assert infer(serving, key, **more) == 200


def test_a_key_s_rate_is_refused_with_the_time_to_wait(serving: tuple[Serving, socket.socket]) -> None:
    served, connection = serving
    key, _ = served.file.add("slow", ["infer"], rate=0.125)
    served.now_s += LOOK_EVERY_S
    assert infer(serving, key) == 200
    host, port = connection.getpeername()
    with closing(http.client.HTTPConnection(host, port, timeout=PATIENCE_S)) as other:
        status, headers, _ = ask(other, "POST", "/v2/models/double/infer", key, GOOD)
        assert (status, headers["retry-after"]) == (429, "8")
    served.now_s += 8
    assert infer(serving, key) == 200


def test_a_load_names_no_model_that_the_key_does_not_reach(
    serving: tuple[Serving, socket.socket],
) -> None:
    served, connection = serving
    key, _ = served.file.add("keeper", ["manage"], ["ghost", "mine"])
    served.now_s += LOOK_EVERY_S
    served.roster.load_fault = UnknownName.of_model("ghost", ["mine", "secret"], "no model '{}' here")
    host, port = connection.getpeername()
    with closing(http.client.HTTPConnection(host, port, timeout=PATIENCE_S)) as other:
        status, _, content = ask(other, "POST", "/v2/repository/models/ghost/load", key)
    assert (status, content["error"]) == (
        404,
        "failed to load 'ghost', no model 'ghost' here: it has ['mine']",
    )


@pytest.mark.slow
def test_readiness_tells_its_reasons_only_to_callers_with_a_key(
    serving: tuple[Serving, socket.socket],
) -> None:
    served, connection = serving
    served.roster.reasons = ["model 'secret-name' failed"]
    host, port = connection.getpeername()
    with closing(http.client.HTTPConnection(host, port, timeout=PATIENCE_S)) as other:
        status, _, content = ask(other, "GET", "/v2/health/ready", None)
        assert status == 503 and "secret-name" not in str(content)
        status, _, content = ask(other, "GET", "/v2/health/ready", served.key)
        assert status == 503 and "secret-name" in str(content)
