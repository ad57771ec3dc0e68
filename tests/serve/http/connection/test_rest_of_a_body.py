"""The rest of a body that comes after its answer is dropped, with bounds."""

import pytest
from halfeven.serve.http.limits.request_limits import DEFAULTS

from ..wire import Wire, on_a_wire, statuses

PIECE = bytes(2**20)
HEAD = b"POST /v2/nothing HTTP/1.1\r\nhost: localhost\r\n"
LONG = HEAD + b"content-length: 999999999999999\r\n\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n7fffffffff\r\n"


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller sends faster than the server reads."""
    monkeypatch.setattr("halfeven.serve.http.connection.polite_protocol.PoliteProtocol.has_unread", True)


@pytest.mark.parametrize("begin", [LONG, CHUNKED])
def test_no_more_is_read_of_it_than_of_a_whole_body(begin: bytes) -> None:
    async def steps(wire: Wire) -> None:
        await wire.send(begin)
        sent = 0
        while not wire.reading_paused and sent <= DEFAULTS.body_bytes:
            wire.protocol.data_received(PIECE)
            sent += len(PIECE)
        assert sent == DEFAULTS.body_bytes + len(PIECE) and wire.reading_paused
        assert wire.half_closed and not wire.closed and statuses(wire.written) == [404]
        wire.after(2.1)  # the caller had time to read its answer
        assert wire.closed

    on_a_wire(steps)


def test_a_caller_that_goes_on_sending_it_gets_no_more_time(unread: None) -> None:
    async def steps(wire: Wire) -> None:
        await wire.send(LONG, PIECE)
        wire.after(6.1)  # the keep-alive time of a wire, and a second
        assert wire.closed

    on_a_wire(steps)


def test_its_connection_makes_room_for_a_newcomer(unread: None) -> None:
    async def steps(wire: Wire) -> None:
        await wire.send(LONG, PIECE)
        wire.after(1.1)
        assert wire.protocol.is_idle()

    on_a_wire(steps)
