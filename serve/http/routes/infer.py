"""The infer route, answered in front of FastAPI, whose routing would take longer than a small model.

POST /v2/models/{m}[/versions/{v}]/infer is answered here; every other request goes on to FastAPI unchanged.
"""

import logging
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from time import perf_counter_ns
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....models.errors import BadInput, BadRequest, HalfevenError
from ...access.access_control import AccessControl
from ...batching.interface import Answer, Roster
from ...logs import requests
from ..caller import CallerLeft, answer_or_leave, lease_of, lend, read_body
from ..codecs.infer import InferCodec, InferRequest
from ..content_coding import chosen_coding, decoded, encoded
from ..cross_origin import is_preflight
from ..error_mapping import Reaches, SlowBody, body_for, body_of, headers_of, message_of, no_model, status_of
from ..inference import Begun, Inference, parameters_of
from ..limits.bounds import ServerBounds
from ..limits.memory_budget import json_bytes
from ..limits.request_limits import DEFAULTS
from ..page_headers import PageHeaders
from ..route_scopes import admit, permit_of
from ..server_load import ServerLoad
from ..web_guard import WebGuard

_REQUEST_ID = re.compile(rb"[!-~]{1,128}")  # may be sent back and logged as it is
_KNOWN = frozenset(
    (
        b"inference-header-content-length",
        b"content-encoding",
        b"accept-encoding",
        b"x-request-id",
        b"triton-request-id",
        b"endpoint-load-metrics-format",
    )
)


class HeaderFields(NamedTuple):
    """The codings as they came (several joined by commas), None where they are absent.

    ``ids`` are the request ids that are sent back under the same names. ``load_format``: how the answer is to say the
    server's load (`server_load.py`).
    """

    coding: str | None = None
    accepted: str | None = None
    ids: tuple[tuple[bytes, bytes], ...] = ()
    load_format: str | None = None

    @property
    def request_id(self) -> str | None:
        """The first of the request's ids, for the log."""
        return self.ids[0][1].decode() if self.ids else None


NOTHING = HeaderFields()


def scan(headers: Sequence[tuple[bytes, bytes]]) -> tuple[str | None, HeaderFields]:
    """Inference-Header-Content-Length as it came, and the rarer fields: `NOTHING` where the request has none of them.

    Names are in lower case, as ASGI gives them. Raises BadRequest where two lengths of the JSON part disagree. An
    id that is too long or not printable ASCII is ignored: it is not sent back.
    """
    length = None
    for name, value in headers:
        if name in _KNOWN:
            if name != b"inference-header-content-length" or length is not None:
                return _scan_all(headers)
            length = value
    return (None if length is None else length.decode("latin-1")), NOTHING


def _scan_all(headers: Sequence[tuple[bytes, bytes]]) -> tuple[str | None, HeaderFields]:
    found = [item for item in headers if item[0] in _KNOWN]
    ids = tuple(item for item in found if item[0].endswith(b"request-id") and _REQUEST_ID.fullmatch(item[1]))
    fields = HeaderFields(
        ", ".join(_values(found, b"content-encoding")) or None,
        ", ".join(_values(found, b"accept-encoding")) or None,
        ids[:2],
        next(iter(_values(found, b"endpoint-load-metrics-format")), None),
    )
    return _length(_values(found, b"inference-header-content-length")), fields


def _values(found: list[tuple[bytes, bytes]], name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in found if key == name]


def _length(values: list[str]) -> str | None:
    if len(set(values)) > 1:
        raise BadRequest(
            f"Inference-Header-Content-Length came {len(values)} times with different values: "
            f"{', '.join(values)[:80]!r}; send it once"
        )
    return values[0] if values else None


MAX_BODY_BYTES = DEFAULTS.body_bytes
# Bytes; more JSON than this is read in a thread. JSON that is read in a millisecond is read on the event loop: a thread
# would hold Python's lock as long, and several threads that want the lock hold each other up.
SMALL_JSON = 512 * 1024
_PHASES = b"queue;dur=%.3f, assemble;dur=%.3f, compute;dur=%.3f"
_ALL_PHASES = _PHASES + b", total;dur=%.3f"
_LONGEST_ID = 128  # characters of a caller's text in a record of the log
_LOG = logging.getLogger(__name__)
_NO_SPAN: AbstractContextManager[object] = nullcontext()
Headers = list[tuple[bytes, bytes]]


class InferFront:
    """An ASGI application around another one. ``inference``: that of ``app``; by default one of its own.

    `Inference.begin` and `finish` do the work without awaiting anything, so that `connection/hot_protocol.py` can call
    them straight from the HTTP parser; ``__call__`` is the same for any ASGI server.
    """

    # `connection/hot_protocol.py` may answer; else every request goes through ``__call__``.
    hot = True

    def __init__(
        self,
        app: ASGIApp,
        roster: Roster,
        max_body_bytes: int = MAX_BODY_BYTES,
        body_timeout_s: float = DEFAULTS.arrival_seconds,
        inference: Inference | None = None,
        guard: WebGuard | None = None,
        bounds: ServerBounds | None = None,
        access: AccessControl | None = None,
        load: ServerLoad | None = None,
    ) -> None:
        self._app = app
        self.guard = guard or WebGuard()
        self.access = access or AccessControl()
        self.load = load
        self.inference = inference or Inference(roster)
        # HTTP libraries send "gzip, deflate" by default. Triton compresses then; here a caller has to name one coding.
        self.compress_lists = self.inference.as_triton
        self.max_body_bytes = max_body_bytes
        self.body_timeout_s = body_timeout_s
        self.bounds = bounds or ServerBounds(seconds=body_timeout_s)
        # `connection/hot_protocol.py` remembers paths here.
        self.urls: dict[bytes, tuple[str, str | None]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        page = self.guard.cross_origin.page(scope["headers"])
        if page is not None:
            if is_preflight(scope.get("method", ""), scope["headers"]):
                await self.guard.cross_origin.answer_preflight(page, scope["headers"], send)
                return
            send = self.guard.cross_origin.answering(page, send)
        try:
            # A WebSocket counts as a change.
            self.guard.check(scope.get("method", "CONNECT"), scope["headers"])
            permit = admit(self.access, scope)
        except HalfevenError as error:
            await self._turn_away(error, scope, receive, send)
            return
        lease = lend(scope, self.bounds.budget)
        try:
            await self._route(scope, receive, send)
        finally:
            lease.close()
            permit.close()

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = _asked(scope) if scope["type"] == "http" else None
        if asked is None and scope.get("method") == "HEAD":
            await answer_head(self._app, scope, receive, send)
        elif asked is None:
            await self._app(scope, receive, send)
        elif scope["method"] != "POST":
            body, kind = body_for("/v2", 405, "method_not_allowed", "Method Not Allowed: POST here")
            await _send(send, 405, [(b"allow", b"POST"), (b"content-type", kind.encode())], body)
        else:
            await self._answer(asked, scope, receive, send)

    async def _turn_away(self, error: HalfevenError, scope: Scope, receive: Receive, send: Send) -> None:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            accept = b", ".join(value for name, value in scope["headers"] if name == b"accept").decode(
                "latin-1"
            )
            body, kind = body_of(error, scope["path"], accept=accept)
            more = [(key.encode(), value.encode()) for key, value in headers_of(error).items()]
            await _send(send, status_of(error), [(b"content-type", kind.encode()), *more], body)

        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await PageHeaders(answer)(scope, receive, send)

    async def _answer(
        self, asked: tuple[str, str | None], scope: Scope, receive: Receive, send: Send
    ) -> None:
        fields = NOTHING
        try:
            header_length, fields = scan(scope["headers"])
            headers, body = await self._infer(asked, header_length, fields, scope, receive)
            status = 200
        except CallerLeft:
            return
        except Exception as error:
            status, headers, body = self.refusal(error, fields.request_id, asked[0], permit_of(scope).reaches)
        if fields is not NOTHING:
            headers.extend(fields.ids)
            headers.extend(self._load_headers(fields.load_format, asked[0]))
        await _send(send, status, headers, body)

    async def _infer(
        self,
        asked: tuple[str, str | None],
        header_length: str | None,
        fields: HeaderFields,
        scope: Scope,
        receive: Receive,
    ) -> tuple[Headers, bytes]:
        inference, lease = self.inference, lease_of(scope)
        inference.find(asked)  # an unknown model is refused before the body is read
        body = await read_body(scope, receive, self.max_body_bytes, self.body_timeout_s)
        if fields.coding is not None:
            body = await decoded(
                body, fields.coding, self.max_body_bytes, lease, inference.worker_threads.run
            )

        def read(codec: InferCodec) -> InferRequest:
            with lease.meanwhile(json_bytes(body)):
                return codec.read(body, header_length)

        if len(body) <= SMALL_JSON or is_small_json(header_length):
            begun = inference.begin(inference.find(asked), header_length, body)
        else:
            begun = await inference.ask(asked, read, aside=True)
        answer = await answer_or_leave(begun.future, receive)
        began_ns = perf_counter_ns()
        if begun.codec.is_quick_to_write(begun.request, answer.outputs):
            headers, body = self.finish(begun, answer, fields)
        else:
            headers, body = await inference.worker_threads.run(self.finish, begun, answer, fields)
        begun.written.add(perf_counter_ns() - began_ns)
        if fields.accepted is not None and (coding := chosen_coding(fields.accepted, self.compress_lists)):
            body = await encoded(body, coding, inference.worker_threads.run)
            headers.append((b"content-encoding", coding.encode()))
        return headers, body

    def finish(
        self, begun: Begun[InferRequest], answer: Answer, fields: HeaderFields = NOTHING
    ) -> tuple[Headers, bytes]:
        """The response's headers (content length left out) and body. ``fields`` has the id for the log."""
        response = begun.codec.write(
            begun.request, answer.outputs, answer.prepared.version, parameters_of(answer)
        )
        headers = answer_headers(answer, perf_counter_ns() - begun.since_ns)
        if response.header_length is None:
            headers.append((b"content-type", b"application/json"))
        else:
            headers.append((b"content-type", b"application/octet-stream"))
            headers.append((b"inference-header-content-length", b"%d" % response.header_length))
        if requests.isEnabledFor(logging.INFO):
            log_answer(begun, answer, fields.request_id)
        return headers, response.body

    def refusal(
        self, error: Exception, request_id: str | None = None, model: str = "", reaches: Reaches = no_model
    ) -> tuple[int, Headers, bytes]:
        """The answer to a request that ends with this error: status, headers, body. ``reaches``: as `message_of`."""
        status = status_of(error, self.inference.as_triton)
        named = {"request_id": request_id, "model": model[:_LONGEST_ID], "status": status}
        if requests.isEnabledFor(logging.INFO):
            requests.info("refused: %s", message_of(error), extra=named)
        if status == 500 and not isinstance(error, BadInput):
            _LOG.error("an infer request failed", exc_info=error, extra=named)
        body, kind = body_of(error, "/v2", reaches)
        headers = [(key.encode(), value.encode()) for key, value in headers_of(error).items()]
        return status, [(b"content-type", kind.encode()), *headers], body

    def call_span(self, name: str, context: Any) -> AbstractContextManager[object]:
        """The context of one gRPC call: empty here, a span where traces are written (`tracing/traced_front.py`)."""
        return _NO_SPAN

    def _load_headers(self, form: str | None, model: str) -> Headers:
        if form is None or self.load is None or (value := self.load.header(form, model)) is None:
            return []
        return [(b"endpoint-load-metrics", value)]

    def slow_body(self) -> SlowBody:
        """The error for a body that takes too long."""
        return SlowBody(f"the request's body did not arrive within {self.body_timeout_s:g} s; send it faster")


def _asked(scope: Scope) -> tuple[str, str | None] | None:
    """The model's name and perhaps version where the path is the infer route's (percent-decoded already)."""
    if not scope["path"].endswith("/infer"):
        return None
    return asked_of(scope["path"].removeprefix(scope.get("root_path", "")))


def asked_of(path: str) -> tuple[str, str | None] | None:
    """The model's name and perhaps version where the path is the infer route's."""
    match path.split("/"):
        case ["", "v2", "models", name, "infer"] if name:
            return name, None
        case ["", "v2", "models", name, "versions", version, "infer"] if name and version:
            return name, version
    return None


def is_small_json(header_length: str | None) -> bool:
    """True if the JSON part of a large body is small; True for a length that is no number, which is refused soon."""
    return header_length is not None and not (
        header_length.isdecimal() and int(header_length[:20]) > SMALL_JSON
    )


def log_answer(begun: Begun[InferRequest], answer: Answer, request_id: str | None) -> None:
    own_id = (begun.request.id or "")[:_LONGEST_ID] or None
    requests.info(
        "answered",
        extra={
            "request_id": request_id or own_id,
            "model": begun.codec.spec.name,
            "version": answer.prepared.version,
            "precision": answer.precision,
            "status": 200,
            "rows": begun.request.rows,
            "queue_ms": round(answer.queue_ns / 1e6, 3),
            "compute_ms": round(answer.compute_ns / 1e6, 3),
        },
    )


def answer_headers(answer: Answer, total_ns: int | None = None) -> Headers:
    """Headers with the version that answered and the times; every prediction has them, on every route.

    ``total_ns``: nanoseconds from the body's arrival until now (None: not given).
    """
    prepared = answer.prepared
    spent = (answer.queue_ns / 1e6, answer.assemble_ns / 1e6, answer.compute_ns / 1e6)
    timing = _PHASES % spent if total_ns is None else _ALL_PHASES % (*spent, total_ns / 1e6)
    return [*_answered_by(prepared.version, prepared.digest, answer.precision), (b"server-timing", timing)]


@lru_cache(maxsize=256)
def _answered_by(version: str, digest: str, precision: str) -> Headers:
    return [
        (b"halfeven-version", version.encode()),
        (b"halfeven-digest", digest.encode()),
        (b"halfeven-precision", precision.encode()),
    ]


async def _send(send: Send, status: int, headers: Headers, body: bytes) -> None:
    headers.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def answer_head(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Ask ``app`` for the same by GET, and send its answer without the body."""
    ended = False

    async def send_head(message: Message) -> None:
        nonlocal ended
        if message["type"] == "http.response.start":
            await send(message)
        elif not ended:  # the body is dropped
            ended = True
            await send({"type": "http.response.body", "body": b""})

    await app({**scope, "method": "GET"}, receive, send_head)
