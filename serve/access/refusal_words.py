"""The sentence of a refusal, read from the body of a server's answer."""

import json

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
