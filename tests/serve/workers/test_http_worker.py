"""A worker's port: what happens to the connections that were accepted when it is closed."""

import asyncio
import socket
import ssl
from typing import Any, cast

import pytest
import uvicorn
from halfeven.serve.http.connection import polite_server
from halfeven.serve.workers.control import Control
from halfeven.serve.workers.engine_link import EngineLink
from halfeven.serve.workers.http_worker import _WorkerServer

from tests.patience import PATIENCE_S

SECONDS = PATIENCE_S


def test_a_caller_that_never_goes_on_with_its_handshake_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(polite_server, "_HANDSHAKES_S", 0.0)

    async def closes() -> None:
        config = uvicorn.Config(cast(Any, None), lifespan="off")
        config.load()
        config.ssl = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs, socket.create_server(("127.0.0.1", 0)) as listener:
            worker = _WorkerServer(config, listener, EngineLink(lambda: None), Control(theirs))
            worker.lifespan = config.lifespan_class(config)  # as uvicorn does before `startup`
            await worker.startup()
            with socket.create_connection(listener.getsockname()):
                (listening,) = worker.servers
                while not listening._setting_up:
                    await asyncio.sleep(0)
                await worker._close_port(None)
                assert listening._setting_up
            await asyncio.wait(listening._setting_up)

    async def in_time() -> None:
        async with asyncio.timeout(SECONDS):
            await closes()

    asyncio.run(in_time())
