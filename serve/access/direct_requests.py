"""HTTP requests of the client commands. They go to the address on the command line and nowhere else: a redirect is an
answer like any other, because the key would go along with the next request. A server on this machine is asked without
the proxy that the environment names.
"""

import urllib.parse
import urllib.request
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from typing import Any, cast

from ..http.web_guard import is_loopback


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any) -> None:
        """Another address than the operator named is not asked: the redirect is the answer, an error."""


class _ReadsEarlyAnswers(HTTPConnection):
    """A server that refuses a body by its length answers before it has read it, and closes: that answer is read."""

    def send(self, data: Any) -> None:
        try:
            super().send(data)
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


def opened(request: urllib.request.Request, timeout_s: float) -> HTTPResponse:
    """The answer to the request, to be closed. Raises as ``urllib.request.urlopen``, and HTTPError for a redirect."""
    host = urllib.parse.urlsplit(request.full_url).hostname or ""
    no_proxy = [urllib.request.ProxyHandler({})] if is_loopback(host) else []
    opener = urllib.request.build_opener(_NoRedirect, _Http, _Https, *no_proxy)
    return cast(HTTPResponse, opener.open(request, timeout=timeout_s))
