"""The end of a call of gRPC: the status and words of an error, and the server's load in the trailing metadata.

A call with ``endpoint-load-metrics-format: TEXT`` or ``JSON`` in its metadata gets ``endpoint-load-metrics``, as over
HTTP; one with ``BIN`` gets ``endpoint-load-metrics-bin``, which gRPC's own load balancing reads: an ``OrcaLoadReport``.
Source: gRPC proposal A51, xds/data/orca/v3/orca_load_report.proto.
"""

import struct
from collections.abc import Sequence
from typing import Any, NoReturn

import grpc

from ..http.error_mapping import grpc_status_of, message_of, retry_after_of
from ..http.server_load import ServerLoad

_LONGEST_WORDS = 1000  # characters of a status message: it is a header, and clients take 8 KiB of them
FORMAT = "endpoint-load-metrics-format"
# Field number and wire type of protobuf: application_utilization (9) is a double, named_metrics (8) a map of them.
_UTILISATION, _NAMED = 9 << 3 | 1, 8 << 3 | 2
_KEY, _VALUE = 1 << 3 | 2, 2 << 3 | 1


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
    # An ASCII character takes up to three bytes in a header, any other one up to twelve.
    return words if words.isascii() else words[: _LONGEST_WORDS // 2]


def load_format(metadata: Sequence[tuple[str, Any]] | None) -> str | None:
    """The format of the load report that a call's metadata asks for; None where it asks for none."""
    return next((str(value) for key, value in metadata or () if key == FORMAT), None)


def add_load(context: Any, load: ServerLoad | None, form: str | None, model: str) -> None:
    """Add the load to the call's trailing metadata where it is asked for in a format that is known."""
    if form is None or load is None:
        return
    if form.upper() == "BIN":
        entry = ("endpoint-load-metrics-bin", orca_report(*load.report(model)))
    elif (text := load.header(form, model)) is not None:
        entry = ("endpoint-load-metrics", text.decode())
    else:
        return
    context.set_trailing_metadata((*(context.trailing_metadata() or ()), entry))


def orca_report(utilisation: float, named: dict[str, float]) -> bytes:
    """An ``OrcaLoadReport``. Names are shorter than 64 bytes, so that every length is one byte."""
    parts = [struct.pack("<Bd", _UTILISATION, utilisation)]
    for name, value in named.items():
        entry = bytes([_KEY, len(name)]) + name.encode() + struct.pack("<Bd", _VALUE, value)
        parts.append(bytes([_NAMED, len(entry)]) + entry)
    return b"".join(parts)
