"""The modules that others generated from the protocol: their names are made at run time, so no checker knows them."""

from typing import Any

import tritonclient.grpc
from tritonclient.grpc import service_pb2 as _messages
from tritonclient.grpc import service_pb2_grpc as _stubs

service_pb2: Any = _messages
service_pb2_grpc: Any = _stubs
triton: Any = tritonclient.grpc


def retry_after(error: Any) -> str:
    """The ``retry-after`` of a call that was refused, from the trailing metadata."""
    return dict(error.trailing_metadata())["retry-after"]
