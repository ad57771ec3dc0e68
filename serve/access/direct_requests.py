"""HTTP requests of the client commands. They go to the address on the command line and nowhere else: a redirect is an
answer like any other, because the key would go along with the next request. A server on this machine is asked without
the proxy that the environment names.
"""

import http.client
import json
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from typing import Any, cast

from ...models.errors import (
    BadInput,
    CannotServe,
    Conflict,
    EngineFailed,
    Forbidden,
    HalfevenError,
    NotReady,
    Overloaded,
    TooLarge,
    Unauthenticated,
    UnknownName,
)
from ..http.web_guard import is_loopback
from .client_key import key_advice, key_headers

_OF_STATUS: dict[int, type[BadInput]] = {
    401: Unauthenticated, 403: Forbidden, 404: UnknownName, 409: Conflict, 413: TooLarge
}  # fmt: skip
_BUSY = (429, 502, 503, 504)  # the server, or a proxy for it: asked again later it answers
READ_BYTES = 2**16  # of a refusal's body: our own sentences are there twice (detail, error)
_LONGEST, _LONGEST_UNKNOWN = 4000, 400
_ROUTE = re.compile("/v[12]")  # where the address of a server ends, and that of a route begins
_PAUSE_S = 0.5  # before the second time: those who remain notice the death first


def words_of(body: bytes) -> str:
    """The sentence of an RFC 9457 problem, of OpenAI's error object or of V2's; else the body's beginning."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        answer = None
    if isinstance(answer, dict):
        error = answer.get("error")
        sentence = answer.get("detail") or (error.get("message") if isinstance(error, dict) else error)
        if isinstance(sentence, str):
            return sentence[:_LONGEST]
    return body[:_LONGEST_UNKNOWN].decode(errors="replace")


def error_of_status(
    status: int, body: bytes, who: str = "the server refused with", retry_after: str = ""
) -> HalfevenError:
    """The error for a caller whose request was answered with this status: BadInput (or the kind of it that the status
    names) where the request is at fault, else CannotServe (Overloaded where the server says when to come again)."""
    sentence = f"{who} {status}: {words_of(body)}{key_advice(status)}"
    if retry_after.isdecimal():
        return Overloaded(sentence, float(retry_after))
    if status in _BUSY:
        return NotReady(sentence)
    return CannotServe(sentence) if status >= 500 else _OF_STATUS.get(status, BadInput)(sentence)


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


def is_server_url(url: str) -> bool:
    """True if a request can be sent there: the scheme is HTTP's, the port a number, the host a name or an address."""
    try:
        parts = urllib.parse.urlsplit(url)
        host = parts.hostname or ""
        _ = parts.port, host.encode("idna")  # each raises: ``http://net:port``, ``http://a..b``
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(host)


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


def ask(
    url: str,
    body: bytes | None,
    kind: str = "",
    accept: str = "*/*",
    timeout_s: float = 60.0,
    headers: Mapping[str, str] | None = None,
) -> tuple[Mapping[str, str], bytes]:
    """The headers and body of the answer to a POST, or to a GET where there is no body. It is sent once more where the
    request or its answer was lost on the way: only for what may be sent twice, predictions and what is read. A node
    that dies takes the connections of its proxy with it, and a proxy whose replica dies answers for it; in both cases
    another one can answer.

    Raises `error_of_status`, with the server's own words, where the server refuses; NotReady where no server answers,
    twice.
    """
    if not is_server_url(url):
        given = _ROUTE.split(url)[0]
        raise BadInput(f"--url: expected http://HOST:PORT or https://HOST:PORT, got {given[:80]!r}")
    sent = {"content-type": kind, "accept": accept, **key_headers(), **(headers or {})}
    try:
        answer = answer_to(url, body, sent, timeout_s)
    except TimeoutError as error:
        raise no_answer(url, error, timeout_s) from None
    except (OSError, http.client.HTTPException):
        answer = None
    except ValueError as error:  # urllib cannot take it apart, or it is not ASCII
        raise BadInput(f"--url: expected http://HOST:PORT, got {url[:80]!r} ({error})") from None
    if answer is None or answer.of_a_proxy or answer.did_not_arrive:
        time.sleep(_PAUSE_S)
        try:
            answer = answer_to(url, body, sent, timeout_s)
        except (OSError, http.client.HTTPException) as error:
            raise no_answer(url, error, timeout_s) from None
    if answer.status >= 300:
        raise _refusal(answer)
    return answer.headers, answer.body


def model_path(name: str, api: str = "v2") -> str:
    """The path of a model's routes. ``name``: NAME, or NAME@VERSION."""
    model, _, version = name.partition("@")
    path = f"/{api}/models/{urllib.parse.quote(model, safe='')}"
    return f"{path}/versions/{urllib.parse.quote(version, safe='')}" if version else path


def json_of(url: str, answer: bytes) -> Any:
    """The JSON of an answer. Raises EngineFailed where it is none."""
    try:
        return json.loads(answer)
    except (ValueError, RecursionError):
        raise EngineFailed(
            f"{url} does not answer with JSON: is it an inference server? {answer[:80]!r}"
        ) from None


def no_answer(url: str, error: Exception, timeout_s: float, may_be: str = "") -> NotReady:
    """The error for a caller whose request got no answer. ``may_be``: the state of a request that was waited for."""
    if isinstance(error, TimeoutError):
        may_be = may_be or "the server is busy, or cannot be reached"
        return NotReady(f"no answer from {url} within {timeout_s:g} s; {may_be}")
    what = f"{type(error).__name__}: {error}".rstrip(": ")
    return NotReady(f"no server answers at {url}: {what}; is `halfeven serve` running there?")


def sent_on(answer: ServerAnswer) -> BadInput:
    """The error for a caller whose request was answered with a redirect."""
    place = answer.headers.get("location", "another address")
    return BadInput(
        f"the server sends on to {place[:200]}, where no key is sent: give that as --url if it is yours"
    )


def _refusal(answer: ServerAnswer) -> HalfevenError:
    if answer.status < 400:
        return sent_on(answer)
    if answer.of_a_proxy:
        return NotReady(f"the server refused with {answer.status}: {words_of(answer.body)}")
    return error_of_status(answer.status, answer.body, retry_after=answer.headers.get("retry-after", ""))
