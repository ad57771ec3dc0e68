"""The sentence of a server's refusal, read from its body, and the error of ours that its status stands for."""

import json

from ...models.errors import (
    BadInput,
    CannotServe,
    Conflict,
    Forbidden,
    HalfevenError,
    NotReady,
    Overloaded,
    TooLarge,
    Unauthenticated,
    UnknownName,
)
from .client_key import key_advice

_OF_STATUS: dict[int, type[BadInput]] = {
    401: Unauthenticated, 403: Forbidden, 404: UnknownName, 409: Conflict, 413: TooLarge
}  # fmt: skip
_BUSY = (429, 502, 503, 504)  # the server, or a proxy for it: asked again later it answers
READ_BYTES = 2**16  # of a refusal's body: our own sentences are there twice (detail, error)
_LONGEST, _LONGEST_UNKNOWN = 4000, 400


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
