"""One request of a command to a server, which is sent once more where the request or its answer was lost on the way.

Only for requests that may be sent twice: predictions, and what is read. A node that dies takes the connections of its
proxy with it, and a proxy whose replica dies answers for it; in both cases another one can answer.
"""

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus

from ...models.errors import BadInput, CannotServe, NotReady, Overloaded
from ..access.client_key import key_advice, key_headers
from ..access.direct_requests import opened
from ..access.refusal_words import READ_BYTES, words_of

_PAUSE_S = 0.5  # before the second time: those who remain notice the death first


@dataclass(frozen=True, slots=True)
class Answer:
    """``headers``: by names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def of_a_proxy(self) -> bool:
        """Whether a proxy gave this answer because it lost its connection to the server. The server's own errors are
        JSON; a proxy that refuses by itself, because too much waits, sends ``Retry-After``."""
        is_json = "json" in self.headers.get("content-type", "")
        return self.status >= 500 and not is_json and "retry-after" not in self.headers

    @property
    def did_not_arrive(self) -> bool:
        """Whether the answer has the status 408: the server did not get the request's body in time. The client may then
        send the request again (RFC 9110 §15.5.9). It was seen once in 77,000 requests through Ray's proxy, after a
        replica was killed."""
        return self.status == HTTPStatus.REQUEST_TIMEOUT


def ask(
    url: str,
    body: bytes | None,
    kind: str = "",
    accept: str = "*/*",
    timeout_s: float = 60.0,
    headers: Mapping[str, str] | None = None,
) -> tuple[Mapping[str, str], bytes]:
    """The headers and body of the answer to a POST, or to a GET where there is no body.

    Raises BadInput with the server's own words where it refuses, Overloaded where it says when to come again, NotReady
    where no server answers, twice.
    """
    if not url.startswith(("http://", "https://")):
        raise BadInput(f"--url: expected http://… or https://…, got {url[:80]!r}")
    sent = {"content-type": kind, "accept": accept, **key_headers(), **(headers or {})}
    try:
        answer = _sent(url, body, sent, timeout_s)
    except TimeoutError as error:
        raise _no_answer(url, error) from None
    except (OSError, http.client.HTTPException):
        answer = None
    except ValueError as error:  # urllib cannot take it apart, or it is not ASCII
        raise BadInput(f"--url: expected http://HOST:PORT, got {url[:80]!r} ({error})") from None
    if answer is None or answer.of_a_proxy or answer.did_not_arrive:
        time.sleep(_PAUSE_S)
        try:
            answer = _sent(url, body, sent, timeout_s)
        except (OSError, http.client.HTTPException) as error:
            raise _no_answer(url, error) from None
    if answer.status >= 300:
        raise _refusal(answer)
    return answer.headers, answer.body


def _sent(url: str, body: bytes | None, headers: Mapping[str, str], timeout_s: float) -> Answer:
    request = urllib.request.Request(url, body, dict(headers))
    try:
        with opened(request, timeout_s) as answer:
            return Answer(answer.status, _lower(answer.headers.items()), answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, _lower(error.headers.items()), error.read(READ_BYTES))
    except urllib.error.URLError as error:
        raise error.reason if isinstance(error.reason, OSError) else error from None


def _lower(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers}


def _no_answer(url: str, error: Exception) -> NotReady:
    what = f"{type(error).__name__}: {error}".rstrip(": ")
    return NotReady(f"no server answers at {url}: {what}; is `halfeven serve` running there?")


def _refusal(answer: Answer) -> BadInput | CannotServe:
    if answer.status < 400:
        place = answer.headers.get("location", "another address")
        return BadInput(
            f"the server sends on to {place[:200]}, where no key is sent: give that as --url if it is yours"
        )
    words = words_of(answer.body) + key_advice(answer.status)
    sentence = f"the server refused with {answer.status}: {words}"
    if answer.of_a_proxy:
        return NotReady(sentence)
    after = answer.headers.get("retry-after", "")
    return Overloaded(sentence, float(after)) if after.isdecimal() else BadInput(sentence)
