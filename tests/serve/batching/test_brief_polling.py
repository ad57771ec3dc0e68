"""The moment after a brief answer: well spent on who asks again at once, not spent on anybody else."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
from halfeven.serve.batching.batcher import LOOK_NS, BriefPolling


class Loop:
    """An event loop that only the test polls, and a clock that moves on 10 µs at every poll."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.idle = True
        self._ready: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def call_soon(self, callback: Callable[..., None], *arguments: Any) -> None:
        self._ready.append((callback, arguments))

    def polls_without_sleep(self) -> int:
        polls = 0
        while self._ready:
            polls += 1
            self.now_ns += 10_000
            ready, self._ready = self._ready, []
            for callback, arguments in ready:
                callback(*arguments)
        return polls


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def polling(loop: Loop) -> BriefPolling:
    return BriefPolling(lambda: loop.now_ns, lambda: loop.idle)


def answer(polling: BriefPolling, loop: Loop, after_ns: int) -> bool:
    """A request that comes so long after the last answer, and whether the loop looked again after its own."""
    loop.now_ns += after_ns
    polling.asked(loop.now_ns)
    polling.answered(cast(asyncio.AbstractEventLoop, loop))
    return loop.polls_without_sleep() > 0


def test_after_an_answer_the_loop_looks_again_for_a_moment_and_then_sleeps(
    polling: BriefPolling, loop: Loop
) -> None:
    polling.answered(cast(asyncio.AbstractEventLoop, loop))
    assert loop.polls_without_sleep() == LOOK_NS / 10_000


def test_another_answer_meanwhile_makes_it_longer_not_twice_as_busy(
    polling: BriefPolling, loop: Loop
) -> None:
    polling.answered(cast(asyncio.AbstractEventLoop, loop))
    polling.answered(cast(asyncio.AbstractEventLoop, loop))
    assert loop.polls_without_sleep() == LOOK_NS / 10_000


def test_who_asks_again_at_once_is_always_looked_for(polling: BriefPolling, loop: Loop) -> None:
    assert all(answer(polling, loop, after_ns=50_000) for _ in range(200))


def test_who_does_not_is_soon_hardly_looked_for(polling: BriefPolling, loop: Loop) -> None:
    looked = [answer(polling, loop, after_ns=5_000_000) for _ in range(1000)]
    assert sum(looked[:10]) < 5
    assert 10 < sum(looked[200:]) < 15


def test_who_begins_to_ask_at_once_is_looked_for_again(polling: BriefPolling, loop: Loop) -> None:
    for _ in range(100):
        answer(polling, loop, after_ns=5_000_000)
    looked = [answer(polling, loop, after_ns=50_000) for _ in range(100)]
    assert all(looked[65:])


def test_nobody_is_looked_for_while_another_model_has_the_core(polling: BriefPolling, loop: Loop) -> None:
    loop.idle = False
    polling.answered(cast(asyncio.AbstractEventLoop, loop))
    assert loop.polls_without_sleep() == 1
