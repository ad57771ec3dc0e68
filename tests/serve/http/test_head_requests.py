"""HEAD is GET without the body, on every route that answers GET."""

import asyncio
import re

import pytest
from halfeven.serve.http.routes.app import build_app
from halfeven.serve.http.routes.infer import InferFront

from ..conftest import HISTORY, make_roster
from .raw_requests import message
from .wire import Wire


def answered(method: str, path: str) -> tuple[list[bytes], bytes]:
    """The lines of the head, dates left out, and the body."""

    async def run() -> bytes:
        roster = make_roster()
        wire = Wire(InferFront(build_app(roster, lambda: b"up 1", HISTORY), roster))
        await wire.send(message(b"", path, method, connection="close"))
        while wire.protocol.tasks:
            await asyncio.sleep(0.001)
        return wire.written

    head, _, body = asyncio.run(run()).partition(b"\r\n\r\n")
    return sorted(line for line in head.split(b"\r\n") if not line.startswith(b"date:")), body


@pytest.mark.parametrize(
    "path",
    [
        "/v2",
        "/v2/health/live",
        "/v2/models/double",
        "/v1/models",
        "/metrics",
        "/docs",
        "/",
        "/healthz",
        "/v2/nothing",
    ],
)
def test_head_has_the_head_of_get_and_no_body(path: str) -> None:
    head, body = answered("GET", path)
    assert body and answered("HEAD", path) == (head, b"")


@pytest.mark.parametrize(
    "path", ["/v2/models/double/infer", "/v1/models/double:predict", "/v2/repository/index"]
)
def test_head_is_refused_where_get_is(path: str) -> None:
    head, body = answered("HEAD", path)
    assert any(re.match(rb"HTTP/1.1 (405|501) ", line) for line in head) and body == b""
