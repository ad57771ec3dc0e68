"""Bodies in JSON: of an order, which needs a JSON content type (a form that a web page posts is no order), and of an
answer."""

from collections.abc import Mapping

import orjson
from fastapi import Request, Response

from .caller import read_json_body
from .error_mapping import NotJson

_SMALL_BODY = 2**20


async def read_order(
    request: Request,
    limit: int = _SMALL_BODY,
    timeout_s: float = 30.0,
    needs_type: bool = True,
    more_room: str = "",
) -> bytes:
    """The whole body, at most ``limit`` bytes; an empty one needs no content type.

    ``more_room``: as of `read_body`. ``needs_type``: a body without a content type is refused too (V2 clients send
    none). Raises NotJson, and what `read_json_body` does.
    """
    body = await read_json_body(request.scope, request.receive, limit, timeout_s, more_room)
    kinds = request.headers.getlist("content-type")
    if body.strip() and ((needs_type and not kinds) or not all(map(_is_json, kinds))):
        came = repr(", ".join(kinds)[:80]) if kinds else "none"
        raise NotJson(
            f"expected the content type application/json, got {came}; send the header "
            "Content-Type: application/json (curl: --json)"
        )
    return body


def _is_json(kind: str) -> bool:
    name = kind.partition(";")[0].strip().lower()
    return name == "application/json" or (name.startswith("application/") and name.endswith("+json"))


def json_answer(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status, headers, "application/json")
