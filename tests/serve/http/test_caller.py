"""Bodies that come whole, in pieces, too slowly or never; callers who leave."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fastapi import Request
from halfeven.models.errors import BadRequest, TooLarge
from halfeven.serve.http.caller import (
    MAX_CHUNKS,
    CallerLeft,
    answer_or_leave,
    done_or_leave,
    read_body,
    read_order,
)
from halfeven.serve.http.error_mapping import SlowBody

from tests.serve.http.messages import GONE, Message, chunk, receiving


def later() -> Awaitable[None]:
    """A future that is done in the loop's next round, as a socket's would be."""
    future = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(future.set_result, None)
    return future


def read(
    *messages: Message, headers: Any = (), limit: int = 100, pause: Any = None, timeout_s: float = 30
) -> bytes:
    async def reading() -> bytes:
        scope = {"headers": headers}
        return await read_body(scope, receiving(*messages, pause=pause), limit, timeout_s)

    return asyncio.run(reading())


def test_a_body_of_one_piece_is_not_copied() -> None:
    body = b"one piece"
    assert read(chunk(body, False)) is body


@pytest.mark.parametrize("pause", [None, later, lambda: asyncio.sleep(0)])
def test_pieces_are_joined_whether_they_are_here_or_come_later(pause: Any) -> None:
    pieces = [chunk(b"ab", True), chunk(b"", True), chunk(b"c", True), chunk(b"d", False)]
    assert read(*pieces, pause=pause) == b"abcd"
    assert read(chunk(b"whole", False), pause=pause) == b"whole"


def test_a_body_that_is_too_large_is_refused_before_it_is_read_where_its_length_is_declared() -> None:
    for length in (b"101", b"9" * 30):
        with pytest.raises(TooLarge, match="exceeds the maximum allowed input size of 100 bytes"):
            read(headers=[(b"content-length", length)])
    assert read(chunk(b"x", False), headers=[(b"content-length", b"100")]) == b"x"


def test_a_length_that_is_no_number_is_refused() -> None:
    with pytest.raises(BadRequest, match="Content-Length"):
        read(headers=[(b"content-length", b"-1")])


def test_a_body_that_grows_too_large_is_refused_when_it_does() -> None:
    with pytest.raises(TooLarge, match="101 bytes exceeds"):
        read(chunk(bytes(101), False))
    for pieces in ([chunk(bytes(99), True), chunk(bytes(2), True)], [chunk(bytes(101), True)]):
        with pytest.raises(TooLarge, match="more than 100 bytes"):
            read(*pieces)


@pytest.mark.parametrize("more_room", ["", "ask for more"])
def test_the_refusal_says_how_a_larger_body_is_admitted_where_it_can_be(more_room: str) -> None:
    scope = {"type": "http", "headers": [(b"content-length", b"9" * 9)]}
    with pytest.raises(TooLarge, match=f"{100} bytes{more_room and '; '}{more_room}$"):
        asyncio.run(read_order(Request(scope, receiving()), 100, more_room=more_room))


@pytest.mark.slow
def test_a_body_in_too_many_pieces_is_refused() -> None:
    with pytest.raises(TooLarge, match="65536 pieces"):
        read(*[chunk(b"", True)] * MAX_CHUNKS)
    assert read(*[chunk(b"", True)] * (MAX_CHUNKS - 1), chunk(b"x", False)) == b"x"


def test_a_body_that_does_not_come_is_given_up() -> None:
    for messages in ((), (chunk(b"ab", True),)):
        with pytest.raises(SlowBody, match=r"within 0\.01 s"):
            read(*messages, timeout_s=0.01)


def test_a_caller_who_leaves_while_sending_is_noticed() -> None:
    for messages in ((GONE,), (chunk(b"ab", True), GONE)):
        for pause in (None, later):
            with pytest.raises(CallerLeft):
                read(*messages, pause=pause)


def waited(receive: Callable[[], Awaitable[Message]], then: Callable[[asyncio.Future[Any]], Any]) -> Any:
    """The answer of a future that ``then`` is given one round of the loop later; and the future."""

    async def waiting() -> Any:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        loop.call_soon(then, future)
        try:
            return await answer_or_leave(future, receive), future
        except CallerLeft:
            return CallerLeft, future

    return asyncio.run(waiting())


def test_an_answer_comes_through_while_the_caller_stays() -> None:
    assert waited(receiving(), lambda future: future.set_result(7))[0] == 7


def test_a_failure_comes_through_while_the_caller_stays() -> None:
    with pytest.raises(KeyError, match="mine"):
        waited(receiving(), lambda future: future.set_exception(KeyError("mine")))


@pytest.mark.parametrize("pause", [None, later, lambda: asyncio.sleep(0)])
def test_a_caller_who_leaves_cancels_what_was_asked(pause: Any) -> None:
    answer, future = waited(receiving(GONE, pause=pause), lambda future: None)
    assert answer is CallerLeft and future.cancelled()


def test_an_answer_that_is_here_already_is_taken_without_listening() -> None:
    async def answered() -> Any:
        future = asyncio.get_running_loop().create_future()
        future.set_result(7)
        return await answer_or_leave(future, lambda: pytest.fail("listened"))

    assert asyncio.run(answered()) == 7


def test_listening_stops_with_the_answer() -> None:
    stopped = []

    async def receive() -> Message:
        try:
            return await asyncio.get_running_loop().create_future()
        finally:
            stopped.append(True)

    assert waited(receive, lambda future: future.set_result(7))[0] == 7
    assert stopped == [True]


def test_a_caller_who_leaves_in_the_moment_of_the_answer_makes_no_noise() -> None:
    async def both_at_once() -> tuple[Any, list[Any]]:
        loop = asyncio.get_running_loop()
        noises: list[Any] = []
        loop.set_exception_handler(lambda _, context: noises.append(context))
        future, hung_up = loop.create_future(), loop.create_future()
        loop.call_soon(future.set_result, 7)
        loop.call_soon(hung_up.set_result, None)
        answer = await answer_or_leave(future, receiving(GONE, pause=lambda: hung_up))
        await asyncio.sleep(0)
        return answer, noises

    assert asyncio.run(both_at_once()) == (7, [])


def test_a_cancelled_request_task_cancels_what_was_asked_and_stays_cancelled() -> None:
    async def ended() -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(answer_or_leave(future, receiving()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return future

    assert asyncio.run(ended()).cancelled()


def test_work_is_done_while_the_caller_stays_and_cancelled_when_the_caller_leaves() -> None:
    async def worked(receive: Callable[[], Awaitable[Message]], then: Callable[..., Any]) -> Any:
        future = asyncio.get_running_loop().create_future()

        async def work() -> Any:
            then(future)
            return await future

        try:
            return await done_or_leave(work(), receive)
        except CallerLeft:
            return CallerLeft, future.cancelled()

    assert asyncio.run(worked(receiving(), lambda future: future.set_result(7))) == 7
    assert asyncio.run(worked(receiving(GONE), lambda future: None)) == (CallerLeft, True)
    with pytest.raises(KeyError, match="mine"):
        asyncio.run(worked(receiving(), lambda future: future.set_exception(KeyError("mine"))))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(worked(receiving(), lambda future: future.cancel()))


def test_large_json_is_counted_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = list[threading.Thread]()

    def counted(body: bytes) -> int:
        threads.append(threading.current_thread())
        return len(body)

    monkeypatch.setattr("halfeven.serve.http.caller.json_bytes", counted)
    for size in (2**20, 2**20 + 1):
        body = bytes(size)
        request = Request({"type": "http", "headers": ()}, receiving(chunk(body, False)))
        assert asyncio.run(read_order(request, 2**21, needs_type=False)) is body
    assert [one is threading.current_thread() for one in threads] == [True, False]
