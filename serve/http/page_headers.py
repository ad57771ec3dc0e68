"""Headers of every answer that tell a browser: run no script, load nothing, show it in no frame.

The pages need nothing of that (styles inside, no script). Uploaded files are answered with the same headers, whatever
they contain. There are no CORS headers: no page of another origin may read an answer.

Source: W3C Content Security Policy Level 3; Fetch standard, "nosniff" and Cross-Origin-Resource-Policy.
"""

from collections.abc import MutableMapping
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),  # for browsers that do not know frame-ancestors
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
_NAMES = frozenset(name for name, _ in _HEADERS)


class PageHeaders:
    """An ASGI application around another one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                kept = [item for item in message.get("headers", ()) if item[0].lower() not in _NAMES]
                message["headers"] = [*kept, *_HEADERS]
            await send(message)

        await self._app(scope, receive, with_headers)
