"""A plain request of a running server."""

import json
import urllib.error
import urllib.request
from typing import Any

from tests.patience import PATIENCE_S


def get(address: str, path: str, body: bytes | None = None) -> tuple[int, Any, Any]:
    """(status, headers, JSON or text) of a plain request."""
    try:
        request = urllib.request.Request(
            f"http://{address}{path}", body, {"content-type": "application/json"}
        )
        answer = urllib.request.urlopen(request, timeout=PATIENCE_S)
    except urllib.error.HTTPError as error:
        answer = error
    content = answer.read()
    kind = answer.headers["content-type"] or ""
    return (
        int(answer.status or 0),
        answer.headers,
        json.loads(content) if "json" in kind else content.decode(),
    )
