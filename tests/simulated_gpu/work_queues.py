"""The device's side: a queue of work for each stream, which advances by chance and only as events allow."""

import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.patience import PATIENCE_S


@dataclass(eq=False)
class Point:
    """A place in a stream's queue; ``reached`` once all work before it has been done."""

    reached: bool = False


@dataclass(eq=False)
class _Work:
    do: Callable[[], object] | None = None
    needs: Point | None = None
    reaches: Point | None = None


class WorkQueues:
    """Streams by number; 0 is the default stream, which does not wait for the others (they are non-blocking streams).

    ``pace`` is the probability that a queue advances after each call of the host: 0 leaves everything to the waits.
    ``done`` counts the operations that were carried out, ``points`` the events that were put into queues. An error of
    an operation is sticky, as in CUDA: ``lost`` has its text, nothing is carried out any more, and every later call
    raises it.
    """

    def __init__(self, chance: random.Random, pace: float) -> None:
        self.pace = pace
        self.done = self.points = 0
        self.lost: str | None = None
        self.fail_at: int | None = None  # the operation, counted by `done`, that fails
        self.fail_with = ""
        self.changed = threading.Condition(threading.RLock())
        self._chance = chance
        self._held = False
        self.captured: dict[
            int, list[Callable[[], object]]
        ] = {}  # of streams that are captured: their work so far
        self._invalid: set[int] = set()  # captured streams in which something happened that no graph can hold
        self._kept_error = False  # of such a capture: the next kernel's check finds it (cudaGetLastError)
        self._queues: dict[int, deque[_Work]] = {0: deque()}

    def new_stream(self) -> int:
        with self.changed:
            self._queues[len(self._queues)] = deque()
            return len(self._queues) - 1

    def put(self, stream: int, do: Callable[[], object]) -> None:
        with self.changed:
            self.check()
            if stream in self.captured:
                self.captured[stream].append(do)
                return
            self._queues[stream].append(_Work(do))
            self.advance()

    def point(self, stream: int) -> Point:
        with self.changed:
            self.check()
            self.check_capture(stream)
            point = Point()
            self._queues[stream].append(_Work(reaches=point))
            self.points += 1
            self.advance()
            return point

    def wait_in(self, stream: int, point: Point) -> None:
        """Let the stream wait for the point, not the host."""
        with self.changed:
            self.check()
            self.check_capture(stream)
            self._queues[stream].append(_Work(needs=point))

    def wait_for(self, point: Point) -> None:
        """Let the calling thread wait for the point. Raises the device's sticky error."""
        with self.changed:
            while not point.reached and self.lost is None:
                if self._held:
                    assert self.changed.wait(PATIENCE_S), "a thread waits for a device that a test holds"
                elif not self._step():
                    raise AssertionError("a wait for something that no queue will ever reach")
            self.check()

    def synchronize(self, stream: int | None = None) -> None:
        with self.changed:
            self.check_capture(stream)
            for point in [self.point(one) for one in self._queues if stream in (None, one)]:
                self.wait_for(point)

    def begin_capture(self, stream: int, work: list[Callable[[], object]]) -> None:
        """Put the operations that the stream is given from now on into ``work``, and do not carry them out."""
        self.check()
        self.captured[stream] = work

    def end_capture(self, stream: int) -> None:
        """End a capture. Raises where something happened meanwhile that no graph can hold."""
        self.check()
        del self.captured[stream]
        if stream in self._invalid:
            self._invalid.remove(stream)
            self._kept_error = True
            raise torch.AcceleratorError(
                "CUDA error: operation failed due to a previous error during capture"
            )

    def noise(self) -> int:
        """The number of roundings by which a sum in another order differs."""
        return self._chance.choice((-1, 0, 1))

    def hold(self) -> None:
        """Carry nothing out until `go`: a thread that waits for the device sleeps."""
        with self.changed:
            self._held = True

    def go(self) -> None:
        with self.changed:
            self._held = False
            self.changed.notify_all()

    def check_capture(self, stream: int | None) -> None:
        """Raise where the stream (None: any) is captured: nothing of it may be waited for."""
        hit = set(self.captured) if stream is None else {stream} & set(self.captured)
        if hit:
            self._invalid |= hit
            raise torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing")

    def check_launch(self) -> None:
        """The check that torch makes behind each kernel: it finds an error that CUDA still keeps, and clears it."""
        kept, self._kept_error = self._kept_error, False
        if kept:
            raise torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing")

    def check(self) -> None:
        if self.lost is not None:
            raise torch.AcceleratorError(f"CUDA error: {self.lost}")

    def advance(self) -> None:
        """Carry out as much as chance will have."""
        while not self._held and self._chance.random() < self.pace and self._step():
            pass

    def _step(self) -> bool:
        able = [queue for queue in self._queues.values() if queue and _may_run(queue[0])]
        if not able:
            return False
        queue = self._chance.choice(able)
        work = queue.popleft()
        if work.do is not None and self.lost is None:
            self._carry_out(work.do)
        if work.reaches is not None:
            work.reaches.reached = True
            self.changed.notify_all()
        return True

    def _carry_out(self, do: Callable[[], object]) -> None:
        self.done += 1
        if self.fail_at is not None and self.done >= self.fail_at:
            self.lost = self.fail_with
            return
        try:
            with _disable_current_modes(), torch.inference_mode():
                do()
        except Exception as error:  # rubbish used as an index, for one
            self.lost = f"device-side assert triggered ({type(error).__name__}: {error})"


def _may_run(work: _Work) -> bool:
    return work.needs is None or work.needs.reached
