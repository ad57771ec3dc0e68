"""The answer to a connection that is refused before there is a request that an application could answer."""

from collections.abc import Iterable

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from ....models.errors import HalfevenError
from ..error_mapping import body_of, headers_of, status_of


def refusal_of(
    error: HalfevenError, path: str = "", default_headers: Iterable[tuple[bytes, bytes]] = ()
) -> bytes:
    """Head and body. ``path``: of the request, as far as it is known; the body has that path's format."""
    body, kind = body_of(error, path)
    headers = {"content-type": kind, "content-length": str(len(body)), **headers_of(error)}
    lines = [STATUS_LINE[status_of(error)]]
    for name, value in default_headers:
        lines += (name, b": ", value, b"\r\n")
    lines += (f"{name}: {value}\r\n".encode() for name, value in headers.items())
    return b"".join((*lines, b"connection: close\r\n\r\n", body))
