"""Pages of other origins that the operator allows to ask this server (CORS); by default there are none.

A browser asks first whether it may send a request (a preflight, without the key), and hands an answer to the page only
where the answer names the page's origin. A key is sent in ``Authorization`` by the page itself; cookies and what the
browser remembers are not asked for (no ``Access-Control-Allow-Credentials``).

Source: Fetch standard, "HTTP CORS protocol"; W3C Private Network Access for pages that ask a private address.
"""

import re
from collections.abc import Iterable, MutableMapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.types import Send

_ORIGIN = re.compile(
    r"(?:https?://(?:\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(?::\d{1,5})?|null|[a-z][a-z0-9+.-]*://[a-z0-9_.-]*)"
)
_EVERY = "*"
_METHODS = b"GET, HEAD, POST, DELETE, OPTIONS"
# The headers of an answer that a page may read besides those that every page may.
_EXPOSED = (
    b"halfeven-version, halfeven-digest, halfeven-precision, server-timing, inference-header-content-length, "
    b"content-encoding, retry-after, www-authenticate, x-request-id, traceparent, endpoint-load-metrics"
)
_SECONDS = b"600"  # that a browser may remember the answer to a preflight
_LONGEST = 1000  # characters of the list of headers that a page wants to send
Headers = Iterable[tuple[bytes, bytes]]


class CrossOrigin:
    """``origins``: as `read_origins` gives them."""

    def __init__(self, origins: Iterable[str] = ()) -> None:
        self._allowed = frozenset(one.encode() for one in origins)
        self._every = _EVERY.encode() in self._allowed

    def allows(self, origin: bytes) -> bool:
        return self._every or origin.lower() in self._allowed

    def page(self, headers: Headers) -> bytes | None:
        """The origin of the page that asks, where it is an allowed one."""
        if not self._allowed:
            return None
        origins = [value for name, value in headers if name == b"origin"]
        return origins[0] if len(origins) == 1 and self.allows(origins[0]) else None

    def answering(self, page: bytes, send: "Send") -> "Send":
        """Sends answers that the page may read."""
        more = (*self._of(page), (b"access-control-expose-headers", _EXPOSED))

        async def with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *more]}
            await send(message)

        return with_headers

    def _of(self, page: bytes) -> tuple[tuple[bytes, bytes], ...]:
        named = b"*" if self._every else page
        return (b"access-control-allow-origin", named), (b"vary", b"Origin")

    async def answer_preflight(self, page: bytes, headers: Headers, send: "Send") -> None:
        wanted = b", ".join(value for name, value in headers if name == b"access-control-request-headers")
        more = [*self._of(page), (b"access-control-allow-methods", _METHODS)]
        if wanted and len(wanted) <= _LONGEST:
            more.append((b"access-control-allow-headers", wanted))
        if any(name == b"access-control-request-private-network" for name, _ in headers):
            more.append((b"access-control-allow-private-network", b"true"))
        more.append((b"access-control-max-age", _SECONDS))
        await send({"type": "http.response.start", "status": 204, "headers": more})
        await send({"type": "http.response.body", "body": b""})


def is_preflight(method: str, headers: Headers) -> bool:
    return method == "OPTIONS" and any(name == b"access-control-request-method" for name, _ in headers)


def read_origins(text: str) -> tuple[str, ...]:
    """Origins separated by commas, in lower case. Raises ValueError naming an entry that is not an origin."""
    origins = [one.strip().lower().removesuffix("/") for one in text.split(",") if one.strip()]
    for origin in origins:
        if origin != _EVERY and not _ORIGIN.fullmatch(origin):
            raise ValueError(
                f"{origin[:80]!r} is no origin: expected one like https://app.example.com, http://localhost:3000, or *"
            )
    return tuple(origins)
