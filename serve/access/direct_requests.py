"""HTTP requests of the client commands. They go to the address on the command line and nowhere else: a redirect is an
answer like any other, because the key would go along with the next request. A server on this machine is asked without
the proxy that the environment names.
"""

import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from typing import Any, cast

from ..http.web_guard import is_loopback
from .refusal_words import READ_BYTES


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """``headers``: by names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def of_a_proxy(self) -> bool:
        """True if a proxy gave this answer because it lost its connection to the server. The server's own errors
        are JSON; a proxy that refuses by itself, because too much waits, sends ``Retry-After``."""
        is_json = "json" in self.headers.get("content-type", "")
        return self.status >= 500 and not is_json and "retry-after" not in self.headers

    @property
    def did_not_arrive(self) -> bool:
        """True if the answer has the status 408: the server did not get the request's body in time. The client may
        then send the request again (RFC 9110 §15.5.9). It was seen once in 77,000 requests through Ray's proxy, after a
        replica was killed."""
        return self.status == HTTPStatus.REQUEST_TIMEOUT


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any) -> None:
        """Another address than the operator named is not asked: the redirect is the answer, an error."""


class _ReadsEarlyAnswers(HTTPConnection):
    """A server that refuses a body by its length answers before it has read it, and closes: that answer is read."""

    def request(self, *given: Any, **more: Any) -> None:
        try:
            super().request(*given, **more)
        except (BrokenPipeError, ConnectionResetError):
            if self.sock is None:  # no connection was made
                raise


class _ReadsEarlyAnswersOverTls(_ReadsEarlyAnswers, HTTPSConnection):
    pass


class _Http(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> HTTPResponse:
        return cast(HTTPResponse, self.do_open(_ReadsEarlyAnswers, req))


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> HTTPResponse:
        return cast(HTTPResponse, self.do_open(_ReadsEarlyAnswersOverTls, req))


def answer_to(
    url: str,
    body: bytes | Iterable[bytes] | None,
    headers: Mapping[str, str],
    timeout_s: float,
    read: Callable[[HTTPResponse], bytes] = HTTPResponse.read,
    method: str | None = None,
) -> ServerAnswer:
    """The answer, whatever its status; of a refusal the first bytes. ``method``: by default POST, or GET where there is
    no body. A body in pieces needs the header ``content-length``.

    Raises OSError and http.client.HTTPException where none comes, ValueError where the URL cannot be taken apart.
    """
    try:
        with _opened(urllib.request.Request(url, body, dict(headers), method=method), timeout_s) as answer:
            return ServerAnswer(answer.status, _lower(answer.headers.items()), read(answer))
    except urllib.error.HTTPError as error:
        with error:
            return ServerAnswer(error.code, _lower(error.headers.items()), error.read(READ_BYTES))
    except urllib.error.URLError as error:
        raise error.reason if isinstance(error.reason, OSError) else error from None


def _lower(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers}


def _opened(request: urllib.request.Request, timeout_s: float) -> HTTPResponse:
    host = urllib.parse.urlsplit(request.full_url).hostname or ""
    no_proxy = [urllib.request.ProxyHandler({})] if is_loopback(host) else []
    opener = urllib.request.build_opener(_NoRedirect, _Http, _Https, *no_proxy)
    return cast(HTTPResponse, opener.open(request, timeout=timeout_s))
