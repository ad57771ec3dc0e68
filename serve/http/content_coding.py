"""Compressed bodies: gzip and deflate (in its zlib wrapper), read in bounded memory, written where they are asked for.

Small bodies are handled at once; larger ones in a thread, where zlib releases Python's lock.

Source: RFC 9110 §8.4 and §12.5.3 (Content-Encoding, Accept-Encoding); Triton takes and gives the same two.
"""

import asyncio
import re
import zlib
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import Any

from ...models.errors import BadRequest, TooLarge
from .error_mapping import UnknownCoding
from .limits.memory_budget import Lease
from .limits.request_limits import MORE_ROOM

InThread = Callable[..., Awaitable[Any]]  # calls a function with arguments elsewhere
_WINDOW = {"gzip": 31, "deflate": 15}  # zlib's words for the two wrappers
_AT_ONCE = 64 * 1024  # bytes that are (de)compressed on the event loop: under a millisecond
_STEP = 2**20  # bytes that a body grows by before they are counted
_LONGEST = 1000  # characters of an Accept-Encoding; longer ones are not read
_QVALUE = re.compile(r"[01](\.[0-9]{0,3})?")
# A caller is waiting: the fastest level is four times as fast as the usual one, and a tenth larger.
_LEVEL = 1


async def decoded(
    body: bytes, coding: str, limit: int, lease: Lease, in_thread: InThread = asyncio.to_thread
) -> bytes:
    """The decoded body, at most ``limit`` bytes; ``coding`` is the Content-Encoding as it came.

    It counts in the lease while it grows. Raises UnknownCoding, TooLarge, Overloaded, BadRequest where the body is not
    a complete stream of that coding.
    """
    name = _plain(coding.strip().lower())
    if name in ("", "identity"):
        return body
    if name not in _WINDOW:
        raise UnknownCoding(
            f"Unsupported compression type '{coding[:40]}': send the body in gzip, in deflate or as it is"
        )
    stream = zlib.decompressobj(_WINDOW[name])
    if len(body) > _AT_ONCE:
        return await in_thread(_inflate, stream, body, b"", limit, name, lease)
    start = _step(stream, body, min(_AT_ONCE, limit + 1), name, lease)
    if stream.eof:
        return _whole(stream, start, limit, name)
    return await in_thread(_inflate, stream, stream.unconsumed_tail, start, limit, name, lease)


def _inflate(
    stream: "zlib._Decompress", data: bytes, start: bytes, limit: int, name: str, lease: Lease
) -> bytes:
    """The rest, `_STEP` by `_STEP`; at most one byte more than the limit, however much the data would expand to."""
    pieces, size = [start], len(start)
    while size <= limit and not stream.eof:
        try:
            piece = _step(stream, data, min(_STEP, limit + 1 - size), name, lease)
        except Exception:
            pieces.clear()  # the traceback may live longer than the lease
            raise
        data = stream.unconsumed_tail
        if not piece and not data:
            break
        pieces.append(piece)
        size += len(piece)
    if size > limit:
        return _whole(stream, b"", limit, name, size)
    with lease.meanwhile(size):
        return _whole(stream, b"".join(pieces), limit, name)


def _step(stream: "zlib._Decompress", data: bytes, most: int, name: str, lease: Lease) -> bytes:
    try:
        piece = stream.decompress(data, max(most, 1))
    except zlib.error as error:
        raise BadRequest(f"the request's body is not {name}, as its Content-Encoding says: {error}") from None
    lease.add(len(piece))
    return piece


def _whole(stream: "zlib._Decompress", body: bytes, limit: int, name: str, size: int = 0) -> bytes:
    if max(size, len(body)) > limit:
        raise TooLarge(
            f"request size of more than {limit} bytes once decompressed exceeds the maximum allowed input size of "
            f"{limit} bytes; {MORE_ROOM}"
        )
    if not stream.eof:
        raise BadRequest(f"the request's body is cut off: its {name} stream does not end")
    if stream.unused_data:
        raise BadRequest(
            f"{len(stream.unused_data)} bytes follow the request's {name} stream; send one stream, and nothing after it"
        )
    return body


async def encoded(body: bytes, coding: str, in_thread: InThread = asyncio.to_thread) -> bytes:
    """The body in ``gzip`` or ``deflate``."""
    if len(body) <= _AT_ONCE:
        return zlib.compress(body, _LEVEL, _WINDOW[coding])
    return await in_thread(zlib.compress, body, _LEVEL, _WINDOW[coding])


def chosen_coding(accepted: str, lists_too: bool = False) -> str | None:
    """The coding that an Accept-Encoding asks an answer to be in: ``gzip``, ``deflate`` or None (as it is).

    The heaviest wins, and ``identity`` among equals. ``gzip, deflate`` with equal weights is what HTTP libraries
    send by default: the codings that they can read. Unless ``lists_too``, such an answer is left as it is.
    """
    return None if len(accepted) > _LONGEST else _chosen(accepted, lists_too)


@lru_cache(maxsize=256)
def _chosen(accepted: str, lists_too: bool) -> str | None:
    weights = _weights(accepted)
    others = weights.get("*", 0.0)
    order = [name for name in weights if name in _WINDOW] + [name for name in _WINDOW if name not in weights]
    best = max(weights.get(name, others) for name in order)
    if best <= 0 or weights.get("identity", 0.0) >= best:
        return None
    named = [name for name in order if weights.get(name, others) == best]
    as_it_is_will_do = weights.get("identity", weights.get("*", 1.0)) > 0
    return None if len(named) > 1 and as_it_is_will_do and not lists_too else named[0]


def _weights(accepted: str) -> dict[str, float]:
    """Each named coding's weight; one that is not a number from 0 to 1 counts as 0."""
    weights: dict[str, float] = {}
    for item in accepted.split(","):
        name, *more = (part.strip().lower() for part in item.split(";"))
        if name:
            weights[_plain(name)] = _weight(more)
    return weights


def _plain(name: str) -> str:
    """``x-gzip`` is gzip (RFC 9110, 8.4.1.3)."""
    return "gzip" if name == "x-gzip" else name


def _weight(parameters: list[str]) -> float:
    for parameter in parameters:
        key, _, value = parameter.partition("=")
        if key.strip() == "q":
            return min(float(value), 1.0) if _QVALUE.fullmatch(value.strip()) else 0.0
    return 1.0
