"""An answer is read whole whatever pieces it comes in, and nothing that is not HTTP is taken for one."""

from typing import Any, cast

import pytest
from halfeven.serve.bench.connection import Connection

from tests.serve.http.wire import Transport

PLAIN = b"HTTP/1.1 200 OK\r\nHalfeven-Version: 3\r\nContent-Length: 5\r\n\r\nhello"
EMPTY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 2\r\nContent-Length: 0\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"


class Heard:
    def __init__(self) -> None:
        self.answers: list[tuple[int, bytes, bytes]] = []
        self.losses = 0

    def answered(self, connection: Connection, status: int, head: bytes, body: bytes) -> None:
        self.answers.append((status, head, body))

    def lost(self, connection: Connection) -> None:
        self.losses += 1


def asked() -> tuple[Connection, Heard, Transport]:
    heard, wire = Heard(), Transport()
    connection = Connection(heard)
    connection.connection_made(cast(Any, wire))
    connection.send(b"GET", 1.0, 1.0)
    return connection, heard, wire


@pytest.mark.parametrize("answer", [PLAIN, EMPTY, CHUNKED])
def test_an_answer_is_the_same_wherever_it_is_cut(answer: bytes) -> None:
    body = b"" if answer is EMPTY else b"hello"
    for cut in range(len(answer) + 1):
        connection, heard, _ = asked()
        for piece in (answer[:cut], answer[cut:]):
            if piece:
                connection.data_received(piece)
        assert [(status, said) for status, _, said in heard.answers] == [(int(answer[9:12]), body)], cut
        assert not connection.busy
        assert heard.losses == 0


def test_the_next_answer_on_the_same_connection_is_read_as_well() -> None:
    connection, heard, wire = asked()
    for answer in (CHUNKED, PLAIN, CHUNKED, EMPTY):
        connection.data_received(answer)
        connection.send(b"again", 2.0, 2.0)
    assert [status for status, _, _ in heard.answers] == [200, 200, 200, 503]
    assert wire.written == b"GET" + 4 * b"again"


def test_the_head_comes_in_lower_case_so_that_headers_can_be_found() -> None:
    connection, heard, _ = asked()
    connection.data_received(PLAIN)
    assert b"\r\nhalfeven-version: 3" in heard.answers[0][1]


def test_a_server_that_closes_after_its_answer_is_taken_at_its_word() -> None:
    connection, heard, wire = asked()
    connection.data_received(PLAIN.replace(b"Content-Length", b"Connection: close\r\nContent-Length"))
    assert connection.finished
    assert wire.closed
    connection.connection_lost(None)
    assert (len(heard.answers), heard.losses) == (1, 0)


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        PLAIN + b"more than was promised",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnot a size\r\n",
    ],
)
def test_what_is_not_an_answer_is_a_loss(answer: bytes) -> None:
    connection, heard, wire = asked()
    connection.data_received(answer)
    assert (heard.answers, heard.losses) == ([], 1)
    assert wire.closed
    assert connection.finished


def test_an_answer_that_nobody_asked_for_is_a_loss() -> None:
    connection, heard, wire = asked()
    connection.data_received(PLAIN)
    connection.data_received(PLAIN)
    assert (len(heard.answers), heard.losses) == (1, 1)
    assert wire.closed


def test_a_connection_that_ends_is_lost_once_and_not_after_it_was_given_up() -> None:
    connection, heard, _ = asked()
    connection.connection_lost(cast(Exception, ConnectionResetError()))
    assert heard.losses == 1
    connection, heard, _ = asked()
    connection.abort()
    connection.connection_lost(None)
    assert heard.losses == 0
