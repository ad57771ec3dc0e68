"""Bytes of a connection into the whole server of HTTP, without a socket."""

import asyncio
import re
from collections.abc import Callable

import numpy as np
from halfeven.serve.http.limits.bounds import ServerBounds
from halfeven.serve.http.routes.app import build_app
from halfeven.serve.http.routes.infer import InferFront

from tests.serve.conftest import HISTORY, make_roster
from tests.serve.http.wire import Wire

MAY_ANSWER_5XX = (501, 503)  # not offered, not now: both with words


class HttpWire:
    """One server; each input is a connection of its own, whose client leaves after its last byte."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        roster = make_roster()
        for served in roster.models.values():
            served.compute = _quietly(served.compute)
        app = build_app(roster, lambda: b"", HISTORY, body_timeout_s=10.0)
        self._front = InferFront(app, roster, bounds=ServerBounds(10.0))

    def read(self, data: bytes) -> None:
        """Send the bytes. Raises ValueError with the answer to a refused input, AssertionError for a server's fault."""
        written = self._runner.run(self._answered(data))
        statuses = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3})", written)]
        for status in statuses:
            assert status < 500 or status in MAY_ANSWER_5XX, written
        assert b"Traceback" not in written
        if not statuses or max(statuses) >= 400:
            raise ValueError(f"refused: {written!r}")

    async def _answered(self, data: bytes) -> bytes:
        wire = Wire(self._front)
        try:
            half = len(data) // 2
            return await wire.send(data[:half], data[half:])
        finally:
            wire.protocol.connection_lost(None)
            await wire.settled()

    def close(self) -> None:
        self._runner.close()


def _quietly(compute: Callable[..., list[np.ndarray]]) -> Callable[..., list[np.ndarray]]:
    """The function without numpy's warnings of large numbers: the models of these tests are numpy functions."""

    def run(*arrays: np.ndarray) -> list[np.ndarray]:
        with np.errstate(all="ignore"):
            return compute(*arrays)

    return run
