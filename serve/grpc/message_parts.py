"""The parts of a message are counted in its bytes, before protobuf makes an object of each.

A part is a field of the message or of its tensors and their contents. Two bytes can be an empty tensor, which takes
protobuf 30 bytes of memory for each byte and a second of the event loop for every 16 MiB. Source:
protobuf.dev/programming-guides/encoding.
"""

from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from ...models.errors import BadRequest
from ..http.limits.request_limits import DEFAULTS

FEW_BYTES = 64 * 1024  # so short a message is read at once: its parts take 2 MiB and 4 ms at most
_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5
_FIXED = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}


def check_parts(data: bytes, kind: Descriptor, most: int = DEFAULTS.body_pieces) -> None:
    """Raises BadRequest where the message has more than ``most`` parts, or a shape of more bytes; DecodeError where its
    bytes are no message."""
    if len(data) <= FEW_BYTES:
        return
    pieces = [(memoryview(data), kind)]
    parts = 0
    while pieces:
        piece, kind = pieces.pop()
        inside, shape = _tensors(kind), kind.fields_by_name.get("shape")
        for number, content in _fields(piece):
            parts += 1
            size = len(content) if content is not None and shape is not None and number == shape.number else 0
            if parts > most or size > most:
                raise BadRequest(
                    f"the message has more than {most} tensors, sizes, parameters and other fields; send fewer in one "
                    "request"
                )
            if content is not None and number in inside:
                pieces.append((content, inside[number]))


def _tensors(kind: Descriptor) -> dict[int, Descriptor]:
    """The messages inside a message that have lists, by the numbers of their fields: tensors and their contents."""
    return {
        field.number: inside
        for field in kind.fields
        if (inside := field.message_type) is not None and any(inner.is_repeated for inner in inside.fields)
    }


def _fields(piece: memoryview) -> Iterator[tuple[int, Any]]:
    """(number, the bytes of a field that has a length, else None) of each field."""
    at, end = 0, len(piece)
    while at < end:
        tag, at = _varint(piece, at)
        kind, content = tag & 7, None
        if kind == _VARINT:
            _, at = _varint(piece, at)
        elif kind == _LENGTH:
            length, at = _varint(piece, at)
            content = piece[at : at + length]
            at += length
        elif kind in _FIXED:
            at += _FIXED[kind]
        else:
            raise DecodeError("a group, which no message of this protocol has")
        if at > end:
            raise DecodeError("a field ends beyond its message")
        yield tag >> 3, content


def _varint(piece: memoryview, at: int) -> tuple[int, int]:
    """(the number, where the next one begins)"""
    number = 0
    for shift in range(0, 70, 7):
        if at >= len(piece):
            break
        byte = piece[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
    raise DecodeError("a number without an end")
