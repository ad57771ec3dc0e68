"""The messages of the gRPC service, made from the compiled `open_inference.proto`.

They are in a pool of their own: a process may also import a client's modules, which define the same names. No generated
code is needed, so no version of the compiler has to fit the installed protobuf.
"""

from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

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
