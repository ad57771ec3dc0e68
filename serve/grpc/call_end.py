"""How a call of gRPC ends with an error: its status, words and trailing metadata."""

from typing import Any, NoReturn

import grpc

from ..http.error_mapping import grpc_status_of, message_of, retry_after_of

_LONGEST_WORDS = 1000  # characters of a status message: it is a header, and clients take 8 KiB of them


async def abort(context: Any, error: Exception) -> NoReturn:
    """End the call with the status of the error. Raises what grpcio ends a call with; ``retry-after`` (seconds) joins
    the trailing metadata where the error has one."""
    seconds = retry_after_of(error)
    more = tuple(context.trailing_metadata() or ())
    if seconds is not None:
        more = (*more, ("retry-after", str(seconds)))
    await context.abort(grpc.StatusCode[grpc_status_of(error)], words_of(error), more)
    raise error  # for the type checker: abort has raised


def words_of(error: Exception) -> str:
    """The error's message, short enough for a header."""
    words = message_of(error)[:_LONGEST_WORDS]
    # In a header an ASCII character takes up to three bytes, any other one up to twelve.
    return words if words.isascii() else words[: _LONGEST_WORDS // 2]
