"""One request of a command to a server, which is sent once more where the request or its answer was lost on the way.

Only for requests that may be sent twice: predictions, and what is read. A node that dies takes the connections of its
proxy with it, and a proxy whose replica dies answers for it; in both cases another one can answer.
"""

import http.client
import time
from collections.abc import Mapping

from ...models.errors import BadInput, HalfevenError, NotReady
from ..access.client_key import key_headers
from ..access.direct_requests import ServerAnswer, answer_to
from ..access.refusal_words import error_of_status, words_of

_PAUSE_S = 0.5  # before the second time: those who remain notice the death first


def ask(
    url: str,
    body: bytes | None,
    kind: str = "",
    accept: str = "*/*",
    timeout_s: float = 60.0,
    headers: Mapping[str, str] | None = None,
) -> tuple[Mapping[str, str], bytes]:
    """The headers and body of the answer to a POST, or to a GET where there is no body.

    Raises `error_of_status`, with the server's own words, where the server refuses; NotReady where no server answers,
    twice.
    """
    if not url.startswith(("http://", "https://")):
        raise BadInput(f"--url: expected http://… or https://…, got {url[:80]!r}")
    sent = {"content-type": kind, "accept": accept, **key_headers(), **(headers or {})}
    try:
        answer = answer_to(url, body, sent, timeout_s)
    except TimeoutError as error:
        raise _no_answer(url, error) from None
    except (OSError, http.client.HTTPException):
        answer = None
    except ValueError as error:  # urllib cannot take it apart, or it is not ASCII
        raise BadInput(f"--url: expected http://HOST:PORT, got {url[:80]!r} ({error})") from None
    if answer is None or answer.of_a_proxy or answer.did_not_arrive:
        time.sleep(_PAUSE_S)
        try:
            answer = answer_to(url, body, sent, timeout_s)
        except (OSError, http.client.HTTPException) as error:
            raise _no_answer(url, error) from None
    if answer.status >= 300:
        raise _refusal(answer)
    return answer.headers, answer.body


def _no_answer(url: str, error: Exception) -> NotReady:
    what = f"{type(error).__name__}: {error}".rstrip(": ")
    return NotReady(f"no server answers at {url}: {what}; is `halfeven serve` running there?")


def _refusal(answer: ServerAnswer) -> HalfevenError:
    if answer.status < 400:
        place = answer.headers.get("location", "another address")
        return BadInput(
            f"the server sends on to {place[:200]}, where no key is sent: give that as --url if it is yours"
        )
    if answer.of_a_proxy:
        return NotReady(f"the server refused with {answer.status}: {words_of(answer.body)}")
    return error_of_status(answer.status, answer.body, retry_after=answer.headers.get("retry-after", ""))
