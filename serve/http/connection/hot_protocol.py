"""The infer route straight from the HTTP parser: no ASGI scope, no task, one write per answer.

A uvicorn protocol that answers plain infer requests itself and leaves everything else (other routes, chunked or
compressed bodies, pipelined requests, callers that do not read) to uvicorn and the ASGI application, which answers
infer requests in the same way. Measured on one core with a small model: uvicorn's own way through ASGI costs 20 µs a
request before any work of ours is done, and it writes head and body apart, which wakes the caller twice.

Source: uvicorn.protocols.http.httptools_impl.HttpToolsProtocol, whose callbacks are used as they are.
"""

import asyncio
from contextlib import suppress
from time import perf_counter_ns
from typing import Any, cast

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from ....models.errors import HalfevenError
from ...batching.interface import Answer
from ..codecs.infer import InferRequest
from ..content_coding import chosen_coding
from ..inference import Asked, Begun, taken_away
from ..route_scopes import TO_INFER
from ..routes.infer import SMALL_JSON, Headers, InferFront, asked_of, is_small_json
from ..web_guard import WebGuard
from .framing import without_root_path
from .guarded_protocol import GuardedProtocol
from .header_cache import KnownHead
from .hot_cycle import HotCycle
from .polite_protocol import kept_header, no_time_left

# Requests with one of these headers go through ASGI.
_ELSEWHERE = frozenset(
    (b"transfer-encoding", b"content-encoding", b"expect", b"upgrade", b"x-request-id", b"triton-request-id",
     b"origin", b"sec-fetch-site", b"endpoint-load-metrics-format")
)  # fmt: skip
_ONE_PIECE = 1 << 16  # a body up to this is joined to its head: cheaper than a second buffer
_URLS, _LONGEST_URL = 1024, 512  # how many paths of models are remembered, and how long they may be


class HotProtocol(GuardedProtocol):
    """Give it to uvicorn as ``http``; the application must be an `InferFront` (any other is served as ever)."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        root_path: str = "",
    ) -> None:
        self._below = root_path.encode()  # a proxy shows this server below it, and may hand it on
        front = config.app if isinstance(config.app, InferFront) else None
        super().__init__(config, server_state, app_state, _loop, None if front is None else front.bounds)
        self._front = front if front is not None and front.hot else None
        self._hot: HotCycle | None = None  # the one under way
        self._kept = b"%b: %b\r\n" % kept_header(self.timeout_keep_alive)
        self._piece: bytes | None = None  # what came last, where a message began with it
        self._known: KnownHead | None = None  # of the last request, where that was one of ours
        self._asked: dict[bytes, Asked] = {} if front is None else front.urls

    # The methods that the parser calls.

    def on_message_begin(self) -> None:
        self.url = b""
        self.expect_100_continue = False
        self.headers = []
        self.begin_message()

    def on_headers_complete(self) -> None:
        if self.reads_again():
            return
        self.check_head()
        if self._below:
            self.url = without_root_path(self.url, self._below, self.parser.get_method())
        hot = self._hot_cycle()
        if hot is None:
            self._known = None
            self._begin_for_asgi()
            super().on_headers_complete()
        else:
            self.cycle = cast(Any, hot)
            self._hot = hot

    def on_body(self, body: bytes) -> None:
        hot = self._hot
        if hot is None or self.cycle is not hot:
            super().on_body(body)
            return
        try:
            hot.lease.add(len(body))
        except Exception as error:
            self._respond(hot, *self._refusal(hot, error))
            return
        if not hot.body:
            hot.body = body
        elif isinstance(hot.body, bytearray):
            hot.body += body
        else:
            hot.body = bytearray(hot.body + body)

    def on_message_complete(self) -> None:
        if self.reads_again():
            return
        hot = self._hot
        if hot is None or self.cycle is not hot:
            super().on_message_complete()
            return
        self._in_message = False
        self._close_at = None
        self._learn(hot)
        self._find_again(hot)
        self._submit(hot)

    # The methods that the transport calls.

    def data_received(self, data: bytes) -> None:
        if self._known is not None and not self._refused and self._is_asked_again(self._known, data):
            return
        self._piece = None if self._in_message else data
        super().data_received(data)
        self._piece = None
        hot = self._hot
        if hot is not None and hot.future is None and self._close_at is None:
            self._close_in(self._bounds.seconds)  # the time for the rest of the body

    def connection_lost(self, exc: Exception | None) -> None:
        hot = self._hot
        if hot is not None:
            hot.disconnected = True
            if hot.future is not None:
                hot.future.cancel()  # so that no batch computes it
            hot.close()
        super().connection_lost(exc)

    def _time_is_up(self) -> None:
        hot = self._hot
        if hot is not None and hot.future is None:
            assert self._front is not None
            hot.keep_alive = False  # the rest of the body belongs to no request
            self._respond(hot, *self._refusal(hot, self._front.slow_body()))
        else:
            super()._time_is_up()

    def under_way(self) -> Any:
        hot = self._hot
        return hot if hot is not None and not hot.response_complete else super().under_way()

    # While the server leaves.

    @property
    def busy(self) -> bool:
        return self._in_head or super().busy

    @property
    def quiet_since_s(self) -> float:
        return self._idle_since

    def give_up(self) -> None:
        if (hot := self._hot) is not None and not hot.response_complete:
            hot.keep_alive = False
            self._respond(hot, *self._refusal(hot, no_time_left()))
            hot.disconnected = True  # an answer that comes now is not sent
            if hot.future is not None:
                hot.future.cancel()
        else:
            super().give_up()

    # One request.

    def _hot_cycle(self) -> HotCycle | None:
        """A cycle of ours where the request is a plain one to the infer route of a model that is there."""
        front = self._front
        parser = self.parser
        if front is None or parser is None or self.flow.write_paused or parser.get_method() != b"POST":
            return None
        if self.cycle is not None and not self.cycle.response_complete:
            return None
        asked = self._asked_of(self.url)
        plain = None if asked is None else _plain(self.headers, front.compress_lists, front.guard)
        if asked is None or plain is None or plain[0] > front.max_body_bytes:
            return None
        if parser.get_http_version() != "1.1":
            return None
        try:
            served = front.inference.find(asked)
            permit = front.access.admit(plain[2], TO_INFER, asked[0])
        except Exception:  # the ASGI application answers with the error: that of the key, where it has none
            return None
        if len(self._asked) >= _URLS:
            self._asked.clear()
        if len(self.url) <= _LONGEST_URL:
            self._asked[self.url] = asked
        lease = front.bounds.budget.lease()
        return HotCycle(served, plain[1], parser.should_keep_alive(), lease, permit, plain[2])

    def _learn(self, hot: HotCycle) -> None:
        """Remember the head of a request that came in one piece."""
        asked = self._asked_of(self.url)
        if self._piece is not None and asked is not None:
            self._known = KnownHead.of(
                self._piece, len(hot.body), asked, hot.header_length, hot.keep_alive, hot.authorization
            )

    def _is_asked_again(self, known: KnownHead, data: bytes) -> bool:
        """Submit a request with the head of the last one. False where the parser is to read it."""
        if self._in_message or self._hot is not None or self.flow.write_paused:
            return False
        if (body := known.body_of(data)) is None:
            return False
        assert self._front is not None
        lease = self._front.bounds.budget.lease()
        try:
            served = self._front.inference.find(known.asked)
            lease.add(len(body))
            permit = self._front.access.admit(known.authorization, TO_INFER, known.asked[0])
        except Exception:  # the ASGI application answers with the error
            lease.close()
            return False
        self._close_at = None
        hot = HotCycle(served, known.header_length, known.keep_alive, lease, permit, known.authorization)
        hot.body = body
        self.cycle = cast(Any, hot)
        self._hot = hot
        self._submit(hot)
        return True

    def _asked_of(self, url: bytes) -> Asked | None:
        if (asked := self._asked.get(url)) is not None:
            return asked
        plain = b"?" not in url and b"%" not in url and not self.root_path
        return asked_of(url.decode("latin-1")) if plain else None

    def _begin_for_asgi(self) -> None:
        """Do what uvicorn does at the begin of a message, now that it is known to be for the ASGI application."""
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        HttpToolsProtocol.on_message_begin(self)
        self.url, self.headers, self.scope["headers"] = url, headers, headers
        self.expect_100_continue = expects and self.parser.get_http_version() == "1.1"  # RFC 9110 10.1.1

    def _find_again(self, hot: HotCycle) -> None:
        """Find the version again: another one may have become active while the body came."""
        assert self._front is not None
        if (asked := self._asked_of(self.url)) is not None:
            with suppress(HalfevenError):  # the model is gone: the version found before refuses the request
                hot.served = self._front.inference.find(asked)

    def _submit(self, hot: HotCycle) -> None:
        assert self._front is not None
        body = hot.body if isinstance(hot.body, bytes) else bytes(hot.body)
        try:
            begun = self._front.inference.begin(hot.served, hot.header_length, body)
        except Exception as error:
            refusal = self._refusal(hot, error)
            if self.leaving:  # read first what came with this request: it may not be the last one
                self.loop.call_soon(self._respond, hot, *refusal)
            else:
                self._respond(hot, *refusal)
            return
        hot.body = b""
        hot.future = begun.future

        def answered(future: asyncio.Future[Answer]) -> None:
            self._answered(hot, begun, future)

        # The batch was run at once: its answer need not wait for the next iteration of the loop.
        if begun.future.done() and not self.leaving:
            answered(begun.future)
        else:
            begun.future.add_done_callback(answered)

    def _answered(self, hot: HotCycle, begun: Begun[InferRequest], future: asyncio.Future[Answer]) -> None:
        assert self._front is not None
        if hot.disconnected:
            self._hot = None
            hot.close()
            return
        began_ns = perf_counter_ns()
        try:
            if future.cancelled():
                raise taken_away()
            answer = future.result()
            if not begun.codec.is_quick_to_write(begun.request, answer.outputs):
                self._write_aside(hot, begun, answer)
                return
            headers, body = self._front.finish(begun, answer)
            status = 200
        except Exception as error:
            status, headers, body = self._refusal(hot, error)
        self._respond(hot, status, headers, body)
        begun.written.add(perf_counter_ns() - began_ns)

    def _write_aside(self, hot: HotCycle, begun: Begun[InferRequest], answer: Answer) -> None:
        """Answer when a thread has written the body. Meanwhile ``hot.future`` is the writing."""
        assert self._front is not None
        began_ns = perf_counter_ns()
        run = self._front.inference.worker_threads.run

        def written(done: asyncio.Task[tuple[Headers, bytes]]) -> None:
            if hot.disconnected or done.cancelled():
                self._hot = None
                hot.close()
            elif isinstance(error := done.exception(), Exception):
                self._respond(hot, *self._refusal(hot, error))
            else:
                self._respond(hot, 200, *done.result())
            begun.written.add(perf_counter_ns() - began_ns)

        hot.future = task = self.loop.create_task(run(self._front.finish, begun, answer))
        task.add_done_callback(written)

    def _refusal(self, hot: HotCycle, error: Exception) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        assert self._front is not None
        return self._front.refusal(error, model=hot.served.name)

    def _respond(self, hot: HotCycle, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """Write head and body at once; nothing to a caller that has gone.

        All headers are made here, so uvicorn's check for bad ones is left out.
        """
        if hot.disconnected:
            self._hot = None
            return
        parts = [STATUS_LINE[status]]
        for name, value in self.server_state.default_headers:
            parts += (name, b": ", value, b"\r\n")
        for name, value in headers:
            if name != b"connection":  # added below
                parts += (name, b": ", value, b"\r\n")
        parts.append(b"content-length: %d\r\n\r\n" % len(body))
        if self.is_last:
            hot.keep_alive = False
        parts.insert(1, self._kept if hot.keep_alive else b"connection: close\r\n")
        if len(body) <= _ONE_PIECE:
            parts.append(body)
            self.transport.write(b"".join(parts))
        else:
            self.transport.writelines((b"".join(parts), body))
        hot.response_complete = True
        hot.close()
        self._hot = None
        if not hot.keep_alive:
            self.transport.close()
        self.on_response_complete()


def _plain(
    headers: list[tuple[bytes, bytes]], compress_lists: bool, guard: WebGuard
) -> tuple[int, str | None, str | None] | None:
    """Content length, Inference-Header-Content-Length and Authorization; None where a header needs the ASGI
    application."""
    length = -1
    header_length = authorization = None
    accepts = False
    for name, value in headers:
        if name == b"content-length":
            if not value.isdigit() or len(value) > 12:
                return None
            length = int(value)
        elif name == b"inference-header-content-length":
            if header_length is not None:
                return None
            header_length = value.decode("latin-1")
        elif name == b"authorization":
            if authorization is not None:
                return None
            authorization = value.decode("latin-1")
        elif name == b"host":
            if not guard.knows(value):
                return None
        elif name == b"accept-encoding":
            if accepts or chosen_coding(value.decode("latin-1"), compress_lists):
                return None  # the ASGI application joins several lines of one header
            accepts = True
        elif name in _ELSEWHERE:
            return None
    if length <= 0 or (length > SMALL_JSON and not is_small_json(header_length)):
        return None
    return length, header_length, authorization
