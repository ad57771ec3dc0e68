"""The messages of the gRPC services, made from compiled files: `open_inference.proto`, and gRPC's own of health and
reflection.

They are in a pool of their own: a process may also import a client's modules, which define the same names. No generated
code is needed, so no version of the compiler has to fit the installed protobuf.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from ...models.errors import BadRequest
from ..http.error_mapping import SlowBody
from ..http.limits.request_limits import DEFAULTS

COMPILED = Path(__file__).with_name("open_inference.binpb")
# grpc/health/v1/health.proto, and grpc/reflection/v1/reflection.proto in both versions of its package.
_OF_GRPC = Path(__file__).with_name("health_and_reflection.binpb")
SERVICE = "inference.GRPCInferenceService"
FEW_BYTES = 64 * 1024  # so short a message is read at once: its parts take 2 MiB and 4 ms at most
_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5
_FIXED = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}


@cache
def files() -> list[descriptor_pb2.FileDescriptorProto]:
    read = descriptor_pb2.FileDescriptorSet.FromString
    return [file for path in (COMPILED, _OF_GRPC) for file in read(path.read_bytes()).file]


@cache
def pool() -> descriptor_pool.DescriptorPool:
    made = descriptor_pool.DescriptorPool()
    for file in files():
        made.Add(file)
    return made


@cache
def message(name: str, package: str = "inference") -> Any:
    """The class of a message by its name in the package."""
    return message_factory.GetMessageClass(pool().FindMessageTypeByName(f"{package}.{name}"))


def unreadable(name: str) -> BadRequest:
    """The error for bytes that protobuf cannot read as the call's message."""
    return BadRequest(
        f"the bytes of the call {name[:80]} are not its message: are the client's messages of this protocol?"
    )


async def only_message(messages: AsyncIterator[Any], seconds: float, call: str) -> Any:
    """The message of a unary call. Raises SlowBody where it does not arrive within ``seconds``, BadRequest where the
    call ends without a message or protobuf cannot read it."""
    try:
        async with asyncio.timeout(seconds):
            return await anext(aiter(messages))
    except TimeoutError:
        raise SlowBody(f"the call's message did not arrive within {seconds:g} s; send it faster") from None
    except DecodeError:
        raise unreadable(call) from None
    except StopAsyncIteration:
        raise BadRequest("the call ended without its message") from None


def check_parts(data: bytes, kind: Descriptor, most: int = DEFAULTS.body_pieces) -> None:
    """Count the parts of a message in its bytes, before protobuf makes an object of each. A part is a field of the
    message, or of its tensors and their contents. Two bytes can be an empty tensor, which takes protobuf 30 bytes of
    memory for each byte, and a second of the event loop for every 16 MiB.

    Raises BadRequest where the message has more than ``most`` parts, or a shape of more bytes; DecodeError where its
    bytes are no message. Source: protobuf.dev/programming-guides/encoding.
    """
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
