"""One request of the short way, and what it holds until it is answered."""

import asyncio
from dataclasses import dataclass
from typing import Any

from ...access.access_control import Permit
from ...batching.interface import Served
from ..limits.memory_budget import Lease


class _Silent:
    """The event that uvicorn sets when more of a body came or the caller left; nothing waits for it here."""

    def set(self) -> None:
        return


_SILENT = _Silent()


@dataclass(slots=True, eq=False)
class HotCycle:
    """One infer request and its answer, with the fields that uvicorn's protocol looks at."""

    served: Served
    header_length: str | None
    keep_alive: bool
    lease: Lease
    permit: Permit
    authorization: str | None
    body: bytes | bytearray = b""
    response_complete: bool = False
    disconnected: bool = False
    message_event: _Silent = _SILENT
    future: asyncio.Future[Any] | None = None  # the answer, or then the writing of a large one

    def close(self) -> None:
        """The request has ended: give back what it holds. It may be called again."""
        self.lease.close()
        self.permit.close()
