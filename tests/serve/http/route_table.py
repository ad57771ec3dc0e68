"""The routes of the whole application, read from its own tables, and a request of one."""

import json
import re
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

from halfeven.models.store.store import Store
from halfeven.serve.http.routes.infer import InferFront
from halfeven.serve.server import build
from halfeven.serve.settings import read_settings

INFER = ("POST", "/v2/models/{m}/infer"), ("POST", "/v2/models/{m}/versions/{v}/infer")


def routes(front: InferFront) -> list[tuple[str, str]]:
    """Every (method, path) that the server has, from its own table, and the two that stand in front of it."""
    table: Any = front._app
    while not hasattr(table, "routes"):
        table = table._app
    found = list(_walked(table.routes))
    assert len(found) > 50
    return [*found, *INFER]


def _walked(table: Any) -> Iterator[tuple[str, str]]:
    for route in table:
        if (included := getattr(route, "original_router", None)) is not None:
            yield from _walked(included.routes)
        else:
            assert route.methods, f"{route}: another kind of route; let this test ask it"
            yield from ((method, route.path) for method in sorted(route.methods))


def filled(path: str, model: str = "1") -> str:
    """The path with a value in each place."""
    return re.sub(r"\{\w+(:path)?\}", "1", path.replace("{m}", model))


def whole_server(store: Store) -> InferFront:
    """The server as it is built."""
    app, _ = build(read_settings(store=store.root, device="cpu"), store)
    assert isinstance(app, InferFront)
    return app


def asked(
    connection: HTTPConnection, method: str, path: str, headers: dict[str, str], body: str | bytes = ""
) -> tuple[int, Any, Any]:
    """(status, headers, JSON or bytes)"""
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    content = answer.read()
    is_json = content and "json" in (answer.headers["content-type"] or "")
    return answer.status, answer.headers, json.loads(content) if is_json else content
