"""One request of the short way, and what it holds until it is answered."""

import asyncio
from typing import Any

from ...access.access_control import Permit
from ...batching.interface import Served
from ..limits.memory_budget import Lease


class _Silent:
    """The event that uvicorn sets when more of a body came or the caller left; nothing waits for it here."""

    def set(self) -> None:
        return


_SILENT = _Silent()


class HotCycle:
    """One infer request and its answer, with the fields that uvicorn's protocol looks at."""

    __slots__ = ("authorization", "body", "disconnected", "future", "header_length", "keep_alive", "lease",
                 "message_event", "permit", "response_complete", "served")  # fmt: skip

    def __init__(
        self,
        served: Served,
        header_length: str | None,
        keep_alive: bool,
        lease: Lease,
        permit: Permit,
        authorization: str | None,
    ) -> None:
        self.served = served
        self.header_length = header_length
        self.keep_alive = keep_alive
        self.lease, self.permit = lease, permit
        self.authorization = authorization
        self.body: bytes | bytearray = b""
        self.response_complete = False
        self.disconnected = False
        self.message_event = _SILENT
        self.future: asyncio.Future[Any] | None = None  # the answer, or then the writing of a large one

    def close(self) -> None:
        """The request has ended: give back what it holds. It may be called again."""
        self.lease.close()
        self.permit.close()
