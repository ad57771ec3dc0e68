"""A command's request is sent once more where its answer was lost on the way, and only there."""

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from halfeven.models.errors import (
    BadInput,
    CannotServe,
    Conflict,
    Forbidden,
    HalfevenError,
    NotReady,
    Overloaded,
    TooLarge,
    Unauthenticated,
    UnknownName,
)
from halfeven.serve.access import direct_requests
from halfeven.serve.access.direct_requests import ask, error_of_status
from halfeven.serve.http.error_mapping import exit_code_of

LOST = None
GOOD = 200, {"content-type": "application/json"}, b'{"outputs": []}'
OF_A_PROXY = 500, {"content-type": "text/plain"}, b"Internal Server Error"
OURS = 500, {"content-type": "application/json"}, b'{"error": "a kernel is missing"}'
LATER = 503, {"content-type": "text/plain", "retry-after": "7"}, b"the queue is full"
Reply = tuple[int, dict[str, str], bytes] | None


@pytest.fixture
def replies() -> list[Reply]:
    return []


@pytest.fixture
def url(replies: list[Reply], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server that gives the replies in their order, and hangs up for one that is lost."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            reply = replies.pop(0)
            if reply is None:
                return
            status, headers, body = reply
            self.send_response(status)
            for name, value in {"content-length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    monkeypatch.setattr(direct_requests, "_PAUSE_S", 0.0)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


NO_BODY = (
    408,
    {"content-type": "application/json"},
    b'{"error": "the request\'s body did not arrive within 30 s"}',
)
CUT_OFF = 200, {"content-type": "application/json", "content-length": "99"}, b"{"


@pytest.mark.parametrize(
    "first", [LOST, OF_A_PROXY, CUT_OFF, NO_BODY], ids=["hung up", "proxy", "cut off", "no body"]
)
def test_a_lost_answer_is_asked_for_once_more(first: Reply, url: str, replies: list[Reply]) -> None:
    replies += [first, GOOD]
    headers, body = ask(url, b"{}")
    assert body == GOOD[2] and headers["content-type"] == "application/json" and replies == []


@pytest.mark.parametrize("second", [LOST, OF_A_PROXY], ids=["hung up", "proxy"])
def test_a_second_loss_is_said(second: Reply, url: str, replies: list[Reply]) -> None:
    replies += [LOST, second, GOOD]
    with pytest.raises(NotReady, match=r"no server answers|refused with 500: Internal"):
        ask(url, b"{}")
    assert replies == [GOOD]


def test_a_body_that_does_not_arrive_twice_is_refused_in_the_server_s_words(
    url: str, replies: list[Reply]
) -> None:
    replies += [NO_BODY, NO_BODY, GOOD]
    with pytest.raises(BadInput, match=r"refused with 408: .*did not arrive"):
        ask(url, b"{}")
    assert replies == [GOOD]


def test_what_the_server_itself_says_is_final(url: str, replies: list[Reply]) -> None:
    replies += [OURS, LATER, GOOD]
    with pytest.raises(CannotServe, match=r"refused with 500: .*a kernel is missing"):
        ask(url, b"{}")
    with pytest.raises(Overloaded, match="the queue is full") as refused:
        ask(url, b"{}")
    assert refused.value.retry_after_s == 7.0 and replies == [GOOD]


@pytest.mark.parametrize(
    ("status", "kind", "exit_code"),
    [
        (400, BadInput, 2), (401, Unauthenticated, 2), (403, Forbidden, 2), (404, UnknownName, 2), (409, Conflict, 2),
        (413, TooLarge, 2), (429, NotReady, 1), (500, CannotServe, 1), (503, NotReady, 1), (507, CannotServe, 1),
    ],
)  # fmt: skip
def test_a_refusal_is_the_error_of_its_status_for_every_command(
    status: int, kind: type[HalfevenError], exit_code: int
) -> None:
    """`ask`, the fine-tuning client and the bench raise it; what the server failed at is no bad input."""
    error = error_of_status(status, b'{"error": "words"}')
    assert type(error) is kind and exit_code_of(error) == exit_code
    assert str(error).startswith(f"the server refused with {status}: words")


def test_a_refusal_that_comes_before_the_body_was_read_is_heard() -> None:
    """A server answers so and closes when it sees in the head that the body is too large."""
    body = (
        b'{"detail": "send less, or set HALFEVEN_MAX_BODY_MIB", "error": {"message": "the same once more"}}'
    )
    head = f"HTTP/1.1 413 Too Large\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()

    def refuse(listener: socket.socket) -> None:
        caller, _ = listener.accept()
        with caller:
            caller.recv(1000)
            caller.sendall(head + body)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=refuse, args=(listener,))
        thread.start()
        with pytest.raises(BadInput) as refused:
            ask(f"http://127.0.0.1:{listener.getsockname()[1]}", bytes(2**24))
        thread.join()
    assert str(refused.value) == (
        "the server refused with 413: send less, or set HALFEVEN_MAX_BODY_MIB"  # once, and no JSON
    )
