"""Finds where a request ends in the bytes of a connection, and refuses requests about which readers of HTTP differ.

The length of a body is decided by the request's head alone, as any other reader decides it (RFC 9112, 6.3): an upgrade
is not offered, and changes nothing (RFC 9110, 7.8). The parser takes more than other readers do: several spaces in a
request line, other protocols and versions, codings that it does not decode.
"""

from collections.abc import Iterable, Sequence
from urllib.parse import unquote

from httptools import HttpParserInvalidURLError, parse_url

from ....models.errors import BadRequest
from ..error_mapping import NotOffered
from ..route_scopes import rule_of

Headers = Sequence[tuple[bytes, bytes]]
_LINE_ENDS = {"1.1": b" HTTP/1.1\r\n", "1.0": b" HTTP/1.0\r\n"}  # of request lines
_FOR_PROGRAMS = (b"/v1", b"/v2")  # the other routes are pages, documents and probes
_END = b"\r\n\r\n"  # of a head, and of a chunked body with its trailers


class Cuts:
    """Cuts what comes on a connection into slices in which no request begins but at the first byte (empty lines before
    it aside): the parser does not say where one began. ``body_left``: bytes of the body under way, where its head says
    how many it has; else 0."""

    def __init__(self) -> None:
        self.body_left = 0
        self._last = b""  # the last bytes before, where they may be a part of `_END`

    def end(self, data: bytes, at: int) -> int:
        """The end of the slice of ``data`` that begins at ``at``. The slice counts as read."""
        if self.body_left:
            end = min(at + self.body_left, len(data))
            self.body_left -= end - at
            return end
        across = (self._last + data[at : at + 3]).find(_END) if self._last else -1
        if across >= 0:
            end = at + across - len(self._last) + len(_END)
        else:
            end = data.find(_END, at) + len(_END)
            if end < len(_END):  # it is not there
                self._last = (self._last + data[max(at, len(data) - 3) :])[-3:]
                return len(data)
        self._last = b""
        return end


def check_request_line(read: Iterable[bytes], method: bytes, url: bytes, version: str) -> None:
    """``read``: the bytes of the head so far. Raises NotOffered, BadRequest."""
    if method == b"CONNECT":  # what follows would be a tunnel's
        raise NotOffered("CONNECT is not offered: this server is no proxy")
    end = _LINE_ENDS.get(version)
    head = b"".join(read)
    line = b"" if end is None else method + b" " + url + end
    if not line or not (head.startswith(line) or head.lstrip(b"\r\n").startswith(line)):
        raise BadRequest(
            "the request line is not 'METHOD TARGET HTTP/1.1' with one space between (RFC 9112, 3)"
        )
    if b"#" in url:
        raise BadRequest("the request's target has a '#': a fragment is not sent to servers")
    if not url.startswith(b"/") and not _has_path(url):
        raise BadRequest(
            "the request's target is neither a path nor a URL with a host and a path (RFC 9112, 3.2)"
        )


def _has_path(url: bytes) -> bool:
    """True if the path of an absolute target can be found: the parser of requests takes more targets than that."""
    try:
        return parse_url(url).path is not None
    except HttpParserInvalidURLError:
        return False


def body_length(headers: Headers, version: str) -> int | None:
    """Bytes of the body; None where it is chunked. Raises BadRequest, NotOffered.

    The parser has refused a length that is no number, several lengths, and a length beside a transfer coding.
    """
    hosts = length = 0
    chunked = False
    for name, value in headers:
        if name == b"host":
            hosts += 1
        elif name == b"content-length":
            length = int(value)
        elif name == b"transfer-encoding":
            chunked = True
            if version != "1.1" or value.lower() != b"chunked":
                raise NotOffered("the only transfer coding that is read is 'chunked', in HTTP/1.1")
    if hosts != 1 and (hosts or version == "1.1"):
        raise BadRequest(f"the request has {hosts} Host headers, expected one (RFC 9112, 3.2)")
    return None if chunked else length


def without_upgrade(method: bytes, url: bytes, version: str, headers: Headers) -> bytes:
    """The head of the same request without its wish for another protocol."""
    kept = (b"%b: %b" % header for header in headers if header[0] != b"upgrade")
    return b"\r\n".join((b"%b %b HTTP/%b" % (method, url, version.encode()), *kept, b"", b""))


def without_root_path(url: bytes, below: bytes, method: bytes) -> bytes:
    """The target without the path below which a proxy shows the server, where the proxy hands that on.

    A proxy may take it off too, and a path of the server's own may begin with the same words: ``/models/digits`` below
    ``/models``, ``/v2/models/digits`` below ``/v2``. It stays where nothing else can be meant, and where it is one for
    programs, which may ask past the proxy.
    """
    if not below or not url.startswith(below):
        return url
    rest = url[len(below) :]
    if rest[:1] in (b"", b"?"):
        rest = b"/" + rest
    elif not rest.startswith(b"/"):
        return url
    is_own = _is_route(method, url) and (url.startswith(_FOR_PROGRAMS) or not _is_route(method, rest))
    return url if is_own else rest


def _is_route(method: bytes, url: bytes) -> bool:
    path = unquote(url.partition(b"?")[0].decode("latin-1"))
    return rule_of(method.decode("latin-1"), path) is not None
