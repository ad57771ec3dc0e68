"""Streams of requests that readers of HTTP may read differently, and what two readers make of them: h11, and ours.

A stream has one to four requests. Each is put together from parts that are mostly right; some parts are those by which
requests were smuggled past proxies. Source: RFC 9112 (2.2, 3, 5.1, 5.2, 6, 7, 11.2), RFC 9110 7.8 and 10.1.1, and the
reports on request smuggling since 2005 (Watchfire; Kettle, "HTTP Desync Attacks").
"""

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import h11
import numpy as np

Read = tuple[bytes, bytes, bytes]  # method, path with its query, body
_LINE_END = ((b"\r\n", 96), (b"\n", 2), (b"\r", 1), (b"\r\r\n", 1))
_METHODS = ((b"POST", 50), (b"GET", 20), (b"HEAD", 3), (b"PUT", 3), (b"DELETE", 3), (b"OPTIONS", 3), (b"CONNECT", 2),
            (b"PATCH", 1), (b"get", 1), (b"PRI", 1), (b"TRACE", 1), (b"SOURCE", 1), (b"G\x00T", 1))  # fmt: skip
_TARGETS = ((b"/v2/models/double/infer", 50), (b"/v2/health/live", 10), (b"/v1/models?x=1", 5), (b"/%2e%2e/a%2fb", 3),
            (b"http://localhost/v2/health/live?a=b", 5), (b"*", 2), (b"localhost:80", 2), (b"/a#b", 2), (b"/a b", 1),
            (b"/\xc3\xa9", 1), (b"", 1), (b"//v2//x", 1), (b"https://other/a", 1), (b"/a\tb", 1),
            (b"?a", 1))  # fmt: skip
_VERSIONS = ((b"HTTP/1.1", 88), (b"HTTP/1.0", 5), (b"HTTP/2.0", 1), (b"HTTP/0.9", 1), (b"HTTP/1.2", 1), (b"", 1),
             (b"http/1.1", 1), (b"RTSP/1.0", 1), (b"HTTP/1.1 ", 1))  # fmt: skip
_GAPS = ((b" ", 97), (b"  ", 1), (b"\t", 1), (b"\x0b", 1))
_COLONS = (
    (b": ", 80),
    (b":", 12),
    (b":\t", 3),
    (b" : ", 1),
    (b"\t:", 1),
    (b":\x0b", 1),
    (b"\x00: ", 1),
    (b"", 1),
)
_NAMES = (
    (b"X-Any", 60),
    (b"x_any", 10),
    (b"X\x00", 1),
    (b" X", 2),
    (b"X Y", 1),
    (b"", 1),
    (b"\x7f", 1),
    (b"X\xe9", 1),
)
_VALUES = ((b"a", 60), (b"", 10), (b"a\r\n b", 3), (b"a\r\n\tb", 2), (b"a\x00", 1), (b"a\xff", 5), (b" a ", 5),
           (b"a\rContent-Length: 9", 1), (b"a\nContent-Length: 9", 1))  # fmt: skip
_CONNECTIONS = ((b"keep-alive", 30), (b"close", 10), (b"Upgrade", 30), (b"keep-alive, Upgrade", 10),
                (b"upgrade,close", 5), (b"Upgrade, HTTP2-Settings", 20), (b"TE", 5))  # fmt: skip
_UPGRADES = ((b"h2c", 50), (b"websocket", 30), (b"h2c, foo/2", 10), (b"", 5), (b"TLS/1.0", 5))
_CODINGS = ((b"chunked", 60), (b"Chunked", 5), (b"gzip, chunked", 5), (b"chunked, gzip", 3), (b"identity", 5),
            (b"chunked, chunked", 2), (b" chunked", 5), (b"chunked ", 3), (b"\x0bchunked", 2), (b"xchunked", 2),
            (b"", 2), (b"chunked;q=1", 2), (b",chunked", 2), (b"chun ked", 1), (b'"chunked"', 1))  # fmt: skip
_EXPECTS = ((b"100-continue", 80), (b"100-Continue", 10), (b"x", 10))
_EXTENSIONS = ((b"", 80), (b";a=b", 8), (b";a", 3), (b" ;a=b", 1), (b';a="b"', 2), (b';a="\r\n"', 1), (b" ", 2),
               (b"\t", 1), (b";\n", 1), (b"\x00", 1))  # fmt: skip
_BEFORE = ((b"", 96), (b"\r\n", 2), (b"\n", 1), (b"\r\n\r\n", 1))
_BODIES = (
    b"",
    b"abc",
    b"GET /v2/health/live HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"0\r\n\r\n",
    b"\r\n",
    b"3\r\nabc\r\n0\r\n\r\n",
)


class Streams:
    """Streams drawn from ``random``, one after another."""

    def __init__(self, random: np.random.Generator) -> None:
        self._random = random

    def draw(self) -> bytes:
        """A part is the first of its kind but for a share of the times, which differs from stream to stream."""
        self._odd = self._random.choice((0.0, 0.03, 0.1, 0.4))
        return b"".join(self._request() for _ in range(self._random.integers(1, 5)))

    def pieces(self, stream: bytes) -> list[bytes]:
        """The stream as it may arrive: in up to four pieces."""
        cuts = sorted(self._random.integers(0, len(stream) + 1, self._random.integers(0, 4)).tolist())
        return [stream[one:two] for one, two in zip([0, *cuts], [*cuts, len(stream)], strict=True)]

    def _of(self, weighted: Sequence[tuple[bytes, int]]) -> bytes:
        if not self._chance(self._odd):
            return weighted[0][0]
        at = self._random.integers(sum(weight for _, weight in weighted))
        for value, weight in weighted:
            at -= weight
            if at < 0:
                return value
        raise AssertionError

    def _chance(self, of: float) -> bool:
        return bool(self._random.random() < of)

    def _request(self) -> bytes:
        target = self._of(_TARGETS)
        line = self._of(_METHODS) + self._of(_GAPS) + target + self._of(_GAPS) + self._of(_VERSIONS)
        fields, body = self._framed(_BODIES[self._random.integers(len(_BODIES))])
        fields += [(b"Host", b"localhost")] * (
            int(self._random.integers(3)) if self._chance(self._odd / 8) else 1
        )
        if self._chance(0.4):
            fields.append((self._of(_NAMES), self._of(_VALUES)))
        if self._chance(0.3):
            fields.append((b"Connection", self._of(_CONNECTIONS)))
        if self._chance(0.25):
            fields.append((b"Upgrade", self._of(_UPGRADES)))
        if self._chance(0.1):
            fields.append((b"Expect", self._of(_EXPECTS)))
        self._random.shuffle(fields)
        lines = [line, *(name + self._of(_COLONS) + value for name, value in map(self._written, fields)), b""]
        return self._of(_BEFORE) + b"".join(one + self._of(_LINE_END) for one in lines) + body

    def _written(self, field: Sequence[bytes]) -> tuple[bytes, bytes]:
        name, value = bytes(field[0]), bytes(field[1])
        return (name.lower() if self._chance(0.5) else name), value

    def _framed(self, body: bytes) -> tuple[list[tuple[bytes, bytes]], bytes]:
        """The fields that say how long the body is, right mostly, and the body as it is sent."""
        kind = self._random.random()
        length, chunks = (b"Content-Length", self._length(len(body))), self._chunks(body)
        coding = (b"Transfer-Encoding", self._of(_CODINGS))
        if kind < 0.45:
            return [length], body
        if kind < 0.75:
            return [coding], chunks
        if kind > 1 - self._odd / 2:
            return [length, coding], chunks if self._chance(0.5) else body
        if kind > 1 - self._odd:
            return [length, (b"Content-Length", self._length(len(body)))], body
        if kind > 1 - 1.2 * self._odd:
            return [coding, (b"Transfer-Encoding", self._of(_CODINGS))], chunks
        return [], body if self._chance(self._odd / 2) else b""

    def _length(self, size: int) -> bytes:
        odd = (
            b"+%d",
            b"%d, %d",
            b"0x%x",
            b"-%d",
            b"%d ",
            b"00%d",
            b"%d\t",
            b" %d",
            b"%d_0",
            b"1844674407370955161%d",
            b"",
        )
        if not self._chance(self._odd):
            return b"%d" % size
        if self._chance(0.3):
            return b"%d" % max(size + int(self._random.integers(-2, 3)), 0)
        form = odd[self._random.integers(len(odd))]
        return form % ((size,) * form.count(b"%"))

    def _chunks(self, body: bytes) -> bytes:
        cut = int(self._random.integers(0, len(body) + 1))
        parts = [part for part in (body[:cut], body[cut:]) if part]
        sizes = (
            (b"%x", 90),
            (b"%X", 3),
            (b"0%x", 3),
            (b"0x%x", 1),
            (b"+%x", 1),
            (b"-%x", 1),
            (b"fffffffffffffffff%x", 1),
        )
        written = [
            self._of(sizes) % len(part)
            + self._of(_EXTENSIONS)
            + self._of(_LINE_END)
            + part
            + self._of(_LINE_END)
            for part in parts
        ]
        trailer = (
            b"" if self._chance(0.9) else self._of(_NAMES) + self._of(_COLONS) + self._of(_VALUES) + b"\r\n"
        )
        if self._chance(0.02):
            trailer = b"Content-Length: 5\r\n"
        return (
            b"".join(written)
            + b"0"
            + self._of(_EXTENSIONS)
            + self._of(_LINE_END)
            + trailer
            + self._of(_LINE_END)
        )


@dataclass(frozen=True)
class Theirs:
    """``read``: the requests that h11 reads whole. ``fault``: why it reads no further, where it refuses something."""

    read: list[Read]
    fault: str


def theirs(stream: bytes) -> Theirs:
    """The requests that h11 reads. Each request is answered with 404, so that no upgrade and no tunnel is agreed to."""
    reader, read = h11.Connection(h11.SERVER, max_incomplete_event_size=2**20), list[Read]()
    reader.receive_data(stream)
    request, body = None, bytearray()
    try:
        while True:
            event = reader.next_event()
            if event is h11.NEED_DATA or isinstance(event, h11.ConnectionClosed):
                return Theirs(read, "")
            if isinstance(event, h11.Request):
                request, body = event, bytearray()
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                assert request is not None
                read.append((request.method, path_of(request.target), bytes(body)))
                reader.send(h11.Response(status_code=404, headers=[("content-length", "0")]))
                reader.send(h11.EndOfMessage())
                if reader.our_state is h11.MUST_CLOSE or reader.their_state is h11.MUST_CLOSE:
                    return Theirs(read, "")
                reader.start_next_cycle()
    except h11.RemoteProtocolError as error:
        return Theirs(read, str(error))


def path_of(target: bytes) -> bytes:
    """The path and query of a request target; of the absolute form too (RFC 9112, 3.2.2)."""
    if target.startswith(b"/"):
        return target
    found = urlsplit(target)
    query = b"?" + found.query if found.query else b""
    return (found.path or b"/") + query if found.scheme and found.netloc else target
