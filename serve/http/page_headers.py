"""Headers of every answer that tell a browser: run no script, load nothing, show it in no frame.

Uploaded files and stored reports are answered with the same headers, whatever they contain. A page that the server
writes itself (`own_page`) may run the server's own script and send forms to the server, and nothing else. There are no
CORS headers: no page of another origin may read an answer.

Source: W3C Content Security Policy Level 3; Fetch standard, "nosniff" and Cross-Origin-Resource-Policy.
"""

from collections.abc import Mapping, MutableMapping
from typing import Any

from starlette.responses import HTMLResponse
from starlette.types import ASGIApp, Receive, Scope, Send

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
OWN_PAGE = POLICY.replace("form-action 'none'", "form-action 'self'; script-src 'self'; connect-src 'self'")
_POLICY_NAME = b"content-security-policy"
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),  # for browsers that do not know frame-ancestors
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
_NAMES = frozenset((_POLICY_NAME, *(name for name, _ in _HEADERS)))


def own_page(text: str, status: int = 200, headers: Mapping[str, str] | None = None) -> HTMLResponse:
    """The answer with a page of the server's own. Kept nowhere: its figures move, and it may be for one key only."""
    more = {"content-security-policy": OWN_PAGE, "cache-control": "no-store", **(headers or {})}
    return HTMLResponse(text, status, more)


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
                came = list(message.get("headers", ()))
                policy = OWN_PAGE.encode() if (_POLICY_NAME, OWN_PAGE.encode()) in came else POLICY.encode()
                kept = [item for item in came if item[0].lower() not in _NAMES]
                message["headers"] = [*kept, (_POLICY_NAME, policy), *_HEADERS]
            await send(message)

        await self._app(scope, receive, with_headers)
