"""The messages of the gRPC services, made from compiled files: `open_inference.proto`, and gRPC's own of health and
reflection.

They are in a pool of their own: a process may also import a client's modules, which define the same names. No generated
code is needed, so no version of the compiler has to fit the installed protobuf.
"""

import asyncio
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from ...models.errors import BadRequest
from ..http.error_mapping import SlowBody

COMPILED = Path(__file__).with_name("open_inference.binpb")
# grpc/health/v1/health.proto, and grpc/reflection/v1/reflection.proto in both versions of its package.
_OF_GRPC = Path(__file__).with_name("health_and_reflection.binpb")
SERVICE = "inference.GRPCInferenceService"


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
