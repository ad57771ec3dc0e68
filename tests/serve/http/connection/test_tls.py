"""TLS on a connection, without a socket. What real callers see is in `test_half_closed.py`."""

import asyncio
import ssl
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from halfeven.serve.access.certificates import Certificates
from halfeven.serve.http.connection.tls import Secured

from tests.serve.access.authority import Pair
from tests.serve.http.wire import Transport


class Above(asyncio.Protocol):
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def data_received(self, data: bytes) -> None:
        self.heard.append(data)

    def eof_received(self) -> bool:
        self.heard.append("end")
        return True  # a request is under way


def test_what_comes_behind_the_alert_is_neither_kept_nor_heard(tmp_path: Path) -> None:
    asyncio.run(behind_the_alert(tmp_path))


async def behind_the_alert(tmp_path: Path) -> None:
    pair, raw, above = Pair(tmp_path), Transport(), Above()
    context = Certificates(pair.certificate, pair.key).server_context()
    secured = Secured(context, lambda: above, 30.0)
    secured.connection_made(cast(Any, raw))
    sent, come = ssl.MemoryBIO(), ssl.MemoryBIO()
    caller = pair.trusting().wrap_bio(come, sent, server_hostname="localhost")
    while not secured.ready.done():
        with suppress(ssl.SSLWantReadError):
            caller.do_handshake()
        secured.data_received(sent.read())
        come.write(raw.written)
        raw.written = b""
    caller.write(b"a request")
    with suppress(ssl.SSLWantReadError):
        caller.unwrap()
    secured.data_received(sent.read())
    for _ in range(3):
        secured.data_received(bytes(1000))
    assert (above.heard, secured._in.pending) == ([b"a request", "end"], 0)
    secured.connection_lost(None)


def test_a_handshake_that_takes_too_long_is_aborted(tmp_path: Path) -> None:
    asyncio.run(too_long(tmp_path))


async def too_long(tmp_path: Path) -> None:
    pair, raw = Pair(tmp_path), Transport()
    secured = Secured(Certificates(pair.certificate, pair.key).server_context(), Above, 0.0)
    secured.connection_made(cast(Any, raw))
    while not raw.aborted:
        await asyncio.sleep(0)
    secured.connection_lost(None)
    assert isinstance(secured.ready.exception(), ConnectionResetError)
