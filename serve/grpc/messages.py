"""The messages of the gRPC service, made from the compiled `open_inference.proto`.

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
SERVICE = "inference.GRPCInferenceService"


@cache
def pool() -> descriptor_pool.DescriptorPool:
    files = descriptor_pb2.FileDescriptorSet.FromString(COMPILED.read_bytes())
    made = descriptor_pool.DescriptorPool()
    for file in files.file:
        made.Add(file)
    return made


@cache
def message(name: str) -> Any:
    """The class of a message by its name in the protocol's package."""
    return message_factory.GetMessageClass(pool().FindMessageTypeByName(f"inference.{name}"))


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
