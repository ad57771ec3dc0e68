"""Routes are found behind a proxy that shows the server below a path, and links lead back there."""

import asyncio

import pytest
from halfeven.models.errors import BadSetting
from halfeven.serve.http.connection.framing import without_root_path
from halfeven.serve.http.routes.app import build_app
from halfeven.serve.http.routes.infer import InferFront
from halfeven.serve.settings import read_settings

from tests.serve.conftest import GOOD, HISTORY, make_roster
from tests.serve.http.raw_requests import message
from tests.serve.http.wire import Wire

BELOW = "/team/models"


def answers(*asked: tuple[str, str]) -> list[bytes]:
    async def run() -> list[bytes]:
        roster = make_roster()
        app = build_app(roster, lambda: b"", HISTORY, root_path=BELOW)
        wire, found = Wire(InferFront(app, roster), BELOW), []
        for method, path in asked:
            wire.written = b""
            found.append(await wire.send(message(GOOD if method == "POST" else b"", path, method)))
        return found

    return asyncio.run(run())


@pytest.mark.parametrize("below", ["", BELOW])
def test_a_route_is_found_with_the_path_and_without_it(below: str) -> None:
    asked = [
        ("POST", "/v2/models/double/infer"),
        ("POST", "/v2/models/double/infer"),
        ("GET", "/v2"),
        ("GET", "/healthz"),
    ]
    for answer in answers(*((method, below + path) for method, path in asked)):
        assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("path", ["/team/modelsx/v2", "/team", f"/a{BELOW}/v2"])
def test_another_path_is_none_of_the_server_s(path: str) -> None:
    assert answers(("GET", path))[0].startswith(b"HTTP/1.1 404")


def test_targets() -> None:
    for given, expected in (
        (b"/a", b"/"),
        (b"/a/", b"/"),
        (b"/a?b", b"/?b"),
        (b"/ab", b"/ab"),
        (b"/a/b?c", b"/b?c"),
    ):
        assert without_root_path(given, b"/a", b"GET") == expected


@pytest.mark.parametrize("below", ["/models", "/models/v2", "/v1", "/v2", "/team/models"])
def test_every_route_is_found_below_a_path_that_begins_as_a_route_does(below: str) -> None:
    asked = [
        ("POST", "/models/digits/try"),
        ("GET", "/events?model=digits"),
        ("GET", "/docs"),
        ("GET", "/healthz"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/digits"),
        ("POST", "/v1/models/digits:predict"),
        ("POST", "/v1/models/digits/promote"),
        ("POST", "/v1/fine_tuning/jobs"),
        ("GET", "/v2"),
        ("GET", "/v2/models/digits"),
        ("GET", "/v2/models/dig%20its/ready?x=/v2"),
        ("POST", "/v2/models/digits/infer"),
        ("POST", "/v2/repository/models/digits/load"),
    ]
    for method, path in asked:
        for target in (path, below + path):
            assert without_root_path(target.encode(), below.encode(), method.encode()).decode() == path, (
                target
            )


def test_below_models_a_page_is_found_with_the_path_and_without_it() -> None:
    for target in (b"/models/digits", b"/models/models/digits"):
        assert without_root_path(target, b"/models", b"GET") == b"/models/digits"


def test_what_may_be_a_page_below_the_api_s_path_is_the_api_s() -> None:
    for below in (b"/v1", b"/v2"):
        assert without_root_path(below + b"/models/digits", below, b"GET") == below + b"/models/digits"


def test_the_document_of_the_routes_names_the_path() -> None:
    assert f'"servers":[{{"url":"{BELOW}"}}]'.encode() in answers(("GET", "/openapi.json"))[0]


@pytest.mark.parametrize("path", ["models", "http://a/b", "/a//b", "/a b", "/a?b"])
def test_what_is_no_path_is_refused_at_the_start(path: str) -> None:
    with pytest.raises(BadSetting, match="root-path"):
        read_settings(root_path=path)


def test_a_slash_at_the_end_changes_nothing() -> None:
    assert (
        read_settings(root_path=f"{BELOW}/").root_path == BELOW
        and read_settings(root_path="/").root_path == ""
    )
