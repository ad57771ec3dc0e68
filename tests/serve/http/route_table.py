"""The routes of the whole application, read from its own tables."""

import re
from collections.abc import Iterator
from typing import Any

from halfeven.serve.http.routes.infer import InferFront

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
