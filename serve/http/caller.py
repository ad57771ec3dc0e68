"""The caller of one request through ASGI: its body while it arrives, and whether it is still connected. The body of an
order is JSON and says so: a form that a web page posts is no order."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, TypeVar

import orjson
from fastapi import Request, Response

from ...models.errors import BadRequest, TooLarge
from ..batching.interface import Answer
from .error_mapping import NotJson, SlowBody
from .inference import taken_away
from .limits.memory_budget import Lease, MemoryBudget, json_bytes, unlimited
from .limits.request_limits import DEFAULTS, MORE_ROOM

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
T = TypeVar("T")

MAX_CHUNKS = DEFAULTS.body_pieces
_LEASE = "halfeven.lease"  # in the scope of a request
_SMALL_BODY = 2**20


class CallerLeft(Exception):
    """The connection is gone: an answer would have no reader."""


def lend(scope: MutableMapping[str, Any], budget: MemoryBudget) -> Lease:
    """Give the request a lease of the budget; to be closed when it is answered."""
    lease = scope[_LEASE] = budget.lease()
    return lease


def lease_of(scope: MutableMapping[str, Any]) -> Lease:
    """The lease that `lend` gave the request; where it gave none, a lease without a limit."""
    return scope.get(_LEASE) or unlimited()


async def read_body(
    scope: MutableMapping[str, Any],
    receive: Receive,
    limit: int,
    timeout_s: float = 30.0,
    more_room: str = MORE_ROOM,
) -> bytes:
    """The whole request body, at most ``limit`` bytes; a body that came in one piece is not copied.

    It counts in the request's lease. ``more_room`` ends the message of TooLarge: how a larger one is admitted.
    Raises TooLarge, Overloaded, SlowBody after ``timeout_s`` seconds, CallerLeft.
    """
    _check_declared_length(scope["headers"], limit, more_room)
    lease = lease_of(scope)
    try:
        async with asyncio.timeout(timeout_s):
            return await _gather(receive, limit, lease, more_room)
    except TimeoutError:
        raise SlowBody(f"the request's body did not arrive within {timeout_s:g} s; send it faster") from None


def _check_declared_length(headers: Iterable[tuple[bytes, bytes]], limit: int, more_room: str) -> None:
    for name, value in headers:
        if name == b"content-length":
            if not value.isdigit():
                raise BadRequest(f"Content-Length must be a number of bytes, got {value[:40]!r}")
            if len(value) > 18 or int(value) > limit:
                raise TooLarge(_too_large(value.decode("ascii")[:20], limit, more_room))


def _too_large(size: str, limit: int, more_room: str) -> str:
    return f"request size of {size} bytes exceeds the maximum allowed input size of {limit} bytes" + (
        f"; {more_room}" if more_room else ""
    )


async def _gather(receive: Receive, limit: int, lease: Lease, more_room: str) -> bytes:
    chunks: list[bytes] = []
    size = 0
    message = await receive()
    while message["type"] == "http.request":
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            whole = not chunks and not message.get("more_body", False)
            raise TooLarge(_too_large(str(size) if whole else f"more than {limit}", limit, more_room))
        lease.add(len(chunk))
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)
        if len(chunks) >= MAX_CHUNKS:
            raise TooLarge(f"the request's body came in more than {MAX_CHUNKS} pieces; send larger ones")
        message = await receive()
    raise CallerLeft


async def answer_or_leave(future: asyncio.Future[Answer], receive: Receive | None = None) -> Answer:
    """Wait for the answer. A caller that disconnects meanwhile, as ``receive`` tells, cancels it, so that no batch
    computes it.

    Raises CallerLeft, NotReady where the version was taken away, and the future's own error.
    """
    try:
        if receive is None or future.done():
            return await future
        return await done_or_leave(future, receive)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # the caller left, or the server gives up
            raise
        raise taken_away() from None


async def done_or_leave(work: Awaitable[T], receive: Receive) -> T:
    """Do the work. A caller that disconnects meanwhile cancels it.

    Raises CallerLeft, and the work's own error.
    """
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    leaving.add_done_callback(lambda _: doing.cancel())
    try:
        return await doing
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if not leaving.done() or (task is not None and task.cancelling()):
            raise
        raise CallerLeft from None
    finally:
        leaving.cancel()


async def _disconnect(receive: Receive) -> None:
    """Return when the connection ends."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_order(
    request: Request,
    limit: int = _SMALL_BODY,
    timeout_s: float = 30.0,
    needs_type: bool = True,
    more_room: str = "",
) -> bytes:
    """The whole body, at most ``limit`` bytes; an empty one needs no content type. The objects that its JSON becomes
    count in the request's lease, too.

    ``more_room``: as of `read_body`. ``needs_type``: a body without a content type is refused too (V2 clients send
    none). Raises NotJson, and what `read_body` does.
    """
    body = await read_body(request.scope, request.receive, limit, timeout_s, more_room)
    small = len(body) <= _SMALL_BODY
    lease_of(request.scope).add(json_bytes(body) if small else await asyncio.to_thread(json_bytes, body))
    kinds = request.headers.getlist("content-type")
    if body.strip() and ((needs_type and not kinds) or not all(map(is_json, kinds))):
        came = repr(", ".join(kinds)[:80]) if kinds else "none"
        raise NotJson(
            f"expected the content type application/json, got {came}; send the header "
            "Content-Type: application/json (curl: --json)"
        )
    return body


def is_json(kind: str) -> bool:
    """True if a content type is JSON, or a kind of it (``application/problem+json``)."""
    name = kind.partition(";")[0].strip().lower()
    return name == "application/json" or (name.startswith("application/") and name.endswith("+json"))


def json_answer(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status, headers, "application/json")
