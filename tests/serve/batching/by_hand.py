"""The batch scheduler with the device thread's part done by hand, step by step: what would hang is seen at once."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from halfeven.models.spec.spec import ModelSpec
from halfeven.serve.batching.interface import Answer
from halfeven.serve.batching.request_queue import Request
from halfeven.serve.batching.scheduler import BatchScheduler

from tests.serve.batching.stage import prepared, spec


class _Waiting:
    """A caller that stays."""

    def done(self) -> bool:
        return False

    cancelled = done


class ByHand:
    """``answered``: what each request got, by its number. ``lost``: what the device was said to be lost for.

    It stands for the device thread and for the thread that waits for events: `turn` does the next thing that one of
    them would do.
    """

    def __init__(self, engine: Any, toy: ModelSpec | None = None) -> None:
        self.arrivals = self
        self.lost: str | None = None
        self.now_ns = 0
        self.answered: dict[int, Any] = {}
        self._spec = toy or spec(rows=2)
        self._rung = False
        self._watched: deque[tuple[Callable[[], None], Callable[[], None]]] = deque()
        self._numbers: dict[int, int] = {}
        self.scheduler = BatchScheduler(self._spec, self, prepared(engine), self._answer)  # type: ignore[arg-type]

    def clock(self) -> int:
        self.now_ns += 1
        return self.now_ns

    def ring(self) -> bool:
        self._rung = True
        return True

    def lose(self, reason: str) -> None:
        self.lost = self.lost or reason

    def watch(self, synchronize: Callable[[], None], arrived: Callable[[], None]) -> None:
        self._watched.append((synchronize, arrived))

    def send(self, *rows: Sequence[np.ndarray]) -> None:
        """One request for each array, handed over together."""
        requests = []
        for arrays in rows:
            future: Any = _Waiting()
            request = Request(arrays, len(arrays[0]), future, self.clock(), None, 0)
            self._numbers[id(request)] = len(self._numbers)
            requests.append(request)
        self._kept = [*getattr(self, "_kept", []), *requests]
        self.scheduler.inbox.append((self._spec, requests))
        self.ring()

    def turn(self) -> bool:
        """The device thread's next step where it was rung and has one, else the next event; False where all sleeps."""
        if self._rung and self.scheduler.due_ns() is not None:
            self.scheduler.step()
            return True
        self._rung = False
        if not self._watched:
            return False
        synchronize, arrived = self._watched.popleft()
        try:
            synchronize()
        except Exception as error:
            self.dropped = error  # the device thread's own wait raises it again
        arrived()
        return True

    def finish(self) -> None:
        """Go on until all sleeps."""
        for _ in range(1000):
            if not self.turn():
                return
        raise AssertionError("it goes on for ever")

    def _answer(self, outcomes: Sequence[Any]) -> None:
        for request, outcome in outcomes:
            number = self._numbers[id(request)]
            assert number not in self.answered, "a request is answered twice"
            found = outcome.outputs[0].tolist() if isinstance(outcome, Answer) else outcome
            self.answered[number] = found
