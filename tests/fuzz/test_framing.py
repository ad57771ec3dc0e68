"""Two readers see the same requests in a stream, or the connection ends: nothing is smuggled past one of them.

The other reader is h11, which shares no code with ours. Each way that a request takes is tried: from the parser to the
infer route, and through ASGI. ``HALFEVEN_FUZZ=100000`` reads so many streams.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from halfeven.models.errors import BadRequest
from halfeven.serve.http.limits.bounds import ServerBounds
from halfeven.serve.http.routes.infer import InferFront

from tests.conftest import SEED
from tests.fuzz.framing import Read, Streams, Theirs, theirs
from tests.serve.conftest import make_roster
from tests.serve.http.wire import Wire
from tests.slow import FUZZED

INFER = b"/v2/models/double/infer"
# An empty line before a request line is skipped, as RFC 9112 2.2 advises; h11 does not.
ALLOWED = ("no request line received",)


class Recorder(InferFront):
    """A front that keeps what it is asked, whole requests only, and answers at once."""

    def __init__(self, hot: bool) -> None:
        super().__init__(self._app_is_not_reached, make_roster(), bounds=ServerBounds(10.0))
        self.read: list[Read] = []
        self.hot = hot
        self.inference.begin = self._record

    async def _app_is_not_reached(self, scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError

    def _record(self, served: Any, header_length: Any, body: bytes) -> Any:
        self.read.append((b"POST", INFER, body))
        raise BadRequest("it is recorded")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return
            body, more = body + message["body"], message["more_body"]
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        self.read.append((scope["method"].encode(), scope["raw_path"] + query, body))
        headers = [(b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b""})


async def ours(front: InferFront, recorder: Recorder, pieces: list[bytes]) -> tuple[list[Read], bool]:
    """The requests that our side read and carried out, and whether the connection ended by itself. The caller has sent
    its last byte then, and every request that is whole is answered."""
    recorder.read.clear()
    wire = Wire(front)
    await wire.send(*pieces)
    ended = wire.closed or wire.half_closed or wire.protocol._refused
    if not wire.closed and wire.protocol.eof_received():
        async with asyncio.timeout(20):
            while not wire.closed:
                await asyncio.sleep(0)
    wire.protocol.connection_lost(None)
    await wire.settled()
    return list(recorder.read), ended


def fault_of(other: Theirs, read: list[Read], ended: bool) -> str:
    """The point where the other reader of a stream and ours disagree; empty where they agree."""
    if read[: len(other.read)] != other.read[: len(read)]:
        return f"read as {read}, by h11 as {other.read}"
    if len(read) > len(other.read) and not other.fault.startswith(ALLOWED):
        return f"carried out {read[len(other.read) :]}, which h11 refuses: {other.fault}"
    if len(read) < len(other.read) and not ended:
        return f"not read: {other.read[len(read) :]}, and the connection goes on"
    return ""


def drawn(count: int) -> Iterator[tuple[bytes, list[bytes]]]:
    streams = Streams(np.random.default_rng([SEED, 36]))
    for _ in range(count):
        yield (stream := streams.draw()), streams.pieces(stream)


@pytest.mark.slow  # thousands of streams
def test_two_readers_see_the_same_requests_or_the_connection_ends() -> None:
    whole, agreed, faults = Counter[str](), Counter[str](), list[str]()

    async def run() -> None:
        ways = {"from the parser": Recorder(True), "through ASGI": Recorder(False)}
        for stream, pieces in drawn(FUZZED // 2):
            other = theirs(stream)
            for way, recorder in ways.items():
                read, ended = await ours(recorder, recorder, pieces)
                whole[way] += len(read)
                agreed[way] += not ended
                if fault := fault_of(other, read, ended):
                    faults.append(f"{way}: {stream!r}: {fault}")

    asyncio.run(run())
    print(f"{FUZZED // 2} streams, {len(faults)} faults; carried out: {whole}, read to their end: {agreed}")
    assert faults[:5] == []
    assert min(whole.values()) > FUZZED // 4 and min(agreed.values()) > FUZZED // 20


LOST = {  # one of each kind, so that each is told by its name; from reports about other servers
    "h2c": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n",
    "websocket": b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n",
    "two lines": b"Connection: keep-alive\r\nConnection: upgrade\r\nUpgrade: a\r\nUpgrade: b\r\n",
}


@pytest.mark.parametrize("kind", LOST)
@pytest.mark.parametrize(
    "framing", [b"Content-Length: 3\r\n\r\nabc", b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"]
)
@pytest.mark.parametrize("hot", [True, False])
def test_the_body_of_a_request_that_asks_for_an_upgrade_is_its_body(
    kind: str, framing: bytes, hot: bool
) -> None:
    stream = b"POST %b HTTP/1.1\r\nHost: localhost\r\n%b%b" % (INFER, LOST[kind], framing)
    recorder = Recorder(hot)
    for pieces in (
        [stream * 2],
        [stream[:60], stream[60:] + stream[:90], stream[90:]],
        [bytes([one]) for one in stream * 2],
    ):
        read, _ = asyncio.run(ours(recorder, recorder, pieces))
        assert read == [(b"POST", INFER, b"abc")] * 2
