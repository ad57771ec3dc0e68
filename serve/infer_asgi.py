"""The infer route, answered in front of FastAPI: on this path its routing would cost more than the model.

POST /v2/models/{m}[/versions/{v}]/infer is answered here; everything else passes through untouched.
"""

import asyncio
import logging
from time import perf_counter_ns
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Receive, Scope, Send

from .batching.tally import Phase
from .border import NotOffered, SlowBody, body_for, body_of, retry_after_of, status_of
from .caller import CallerLeft, answer_or_leave, read_body
from .duty import Answer, OnDuty, Roster, Served
from .protocol.infer import InferCodec, InferRequest

MAX_BODY_BYTES = 64 * 2**20  # Triton's default
_LOG = logging.getLogger(__name__)
Headers = list[tuple[bytes, bytes]]


class Begun(NamedTuple):
    """A request on its way: who reads and writes it, what it asked, and its answer to come."""

    codec: InferCodec
    request: InferRequest
    future: asyncio.Future[Answer]
    written: Phase  # what its writing takes is added here


class InferFront:
    """An ASGI application around another one.

    `begin` and `finish` do the work without awaiting anything, so that `hot_protocol.py` can call them straight
    from the HTTP parser; ``__call__`` is the same for any ASGI server.
    """

    def __init__(
        self,
        app: ASGIApp,
        roster: Roster,
        max_body_bytes: int = MAX_BODY_BYTES,
        body_timeout_s: float = 30.0,
        written: dict[str, Phase] | None = None,
    ) -> None:
        self._app = app
        self._roster = roster
        self.max_body_bytes = max_body_bytes
        self.body_timeout_s = body_timeout_s
        self.urls: dict[bytes, tuple[str, str | None] | None] = {}  # `hot_protocol.py` remembers paths here
        self.written = {} if written is None else written  # by model, for as long as the server lives
        self._codecs: dict[str, InferCodec] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = _asked(scope)
        if asked is None:
            await self._app(scope, receive, send)
        elif scope["method"] != "POST":
            body, kind = body_for("/v2", 405, "method_not_allowed", "Method Not Allowed: POST here")
            await _send(send, 405, [(b"allow", b"POST"), (b"content-type", kind.encode())], body)
        else:
            await self._answer(asked, scope, receive, send)

    async def _answer(
        self, asked: tuple[str, str | None], scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            headers, body = await self._infer(asked, scope["headers"], receive)
            status = 200
        except CallerLeft:
            return
        except Exception as error:
            status, headers, body = refusal(error)
        await _send(send, status, headers, body)

    async def _infer(
        self, asked: tuple[str, str | None], headers: Headers, receive: Receive
    ) -> tuple[Headers, bytes]:
        served = self.find(asked)
        header_length = _header_length(headers)
        body = await read_body(headers, receive, self.max_body_bytes, self.body_timeout_s)
        begun = self.begin(served, header_length, body)
        answer = await answer_or_leave(begun.future, receive)
        began_ns = perf_counter_ns()
        response = self.finish(begun, answer)
        begun.written.add(perf_counter_ns() - began_ns)
        return response

    def find(self, asked: tuple[str, str | None]) -> Served:
        """The model that is to answer. Raises UnknownName, NotReady."""
        return self._roster.find(*asked)

    def begin(self, served: Served, header_length: str | None, body: bytes) -> "Begun":
        """Read a whole body and queue what it asks. Raises BadRequest, Overloaded, NotReady."""
        codec = self._codec(served)
        request = codec.read(body, header_length)
        return Begun(codec, request, served.submit(request.arrays, request.rows), self.written[served.name])

    def finish(self, begun: "Begun", answer: Answer) -> tuple[Headers, bytes]:
        """The response's headers (content length left out) and body."""
        duty = answer.duty
        response = begun.codec.write(begun.request, answer.outputs, duty.version, _parameters(duty))
        if response.header_length is None:
            return [(b"content-type", b"application/json"), *answer_headers(answer)], response.body
        return [
            (b"content-type", b"application/octet-stream"),
            (b"inference-header-content-length", b"%d" % response.header_length),
            *answer_headers(answer),
        ], response.body

    def slow_body(self) -> SlowBody:
        """What a body that takes too long is answered with."""
        return SlowBody(
            f"the request's body did not arrive within {self.body_timeout_s:g} s; send it faster"
        )

    def _codec(self, served: Served) -> InferCodec:
        """One per model, made again where a version came with a new signature."""
        codec = self._codecs.get(served.name)
        if codec is None or codec.spec is not served.spec:
            codec = self._codecs[served.name] = InferCodec(served.spec)
            self.written.setdefault(served.name, Phase())
        return codec


def _asked(scope: Scope) -> tuple[str, str | None] | None:
    """The model's name and perhaps version where the path is the infer route's (percent-decoded already)."""
    if scope["type"] != "http" or not scope["path"].endswith("/infer"):
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


def _header_length(headers: Headers) -> str | None:
    """Inference-Header-Content-Length as it came. Raises NotOffered where the body is compressed."""
    length = None
    for name, value in headers:
        if name == b"inference-header-content-length":
            length = value.decode("latin-1")
        elif name == b"content-encoding" and value.lower() not in (b"identity", b""):
            raise NotOffered(
                f"Unsupported compression type '{value.decode('latin-1')[:40]}': compressed request bodies "
                "are not offered; send the body as it is (no Content-Encoding)"
            )
    return length


def _parameters(duty: OnDuty) -> dict[str, Any]:
    return {"halfeven_precision": duty.precision, "halfeven_digest": duty.digest[:12]}


def answer_headers(answer: Answer) -> Headers:
    """Who answered and what it took; every prediction carries them, on whichever route."""
    duty = answer.duty
    return [
        (b"halfeven-version", duty.version.encode()),
        (b"halfeven-digest", duty.digest.encode()),
        (b"halfeven-precision", duty.precision.encode()),
        (
            b"server-timing",
            b"queue;dur=%.3f, compute;dur=%.3f" % (answer.queue_ns / 1e6, answer.compute_ns / 1e6),
        ),
    ]


def refusal(error: Exception) -> tuple[int, Headers, bytes]:
    status = status_of(error)
    if status == 500:
        _LOG.error("an infer request failed", exc_info=error)
    body, kind = body_of(error, "/v2")
    headers = [(b"content-type", kind.encode())]
    if (seconds := retry_after_of(error)) is not None:
        headers.append((b"retry-after", b"%d" % seconds))
    return status, headers, body


async def _send(send: Send, status: int, headers: Headers, body: bytes) -> None:
    headers.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
