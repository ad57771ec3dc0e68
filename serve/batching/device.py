"""One thread that owns a device and all models on it.

Autocast and CUDA streams belong to a thread. OpenMP gives every thread that runs a model its own pool, so two such
threads on a CPU would compete for its cores. The thread sleeps on a bell. When the bell rings, it runs the batch that
is due first, then looks for the next. It never polls; it sets a timer only where an operator asked for a delay, and one
when its work has ended. Between batches it runs calls: load, prove, swap, close.

Batchers that are attached in the background (shadow traffic, parity samples) run a batch when no other batch may start,
and at least once a second: under full load they cost one batch a second.
"""

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from ...models.errors import NotReady
from .arrivals import Arrivals

logger = logging.getLogger("halfeven.device")
T = TypeVar("T")
BACKGROUND_EVERY_NS = 1_000_000_000
REST_NS = 1_000_000_000


class Schedulable(Protocol):
    """A batcher, as the device thread sees it. The device thread calls all methods but ``refuse``.

    A `step` may leave a batch computing. It is landed (`land`) before a call uses the device, and before another
    batcher does unless it is ``computing``: the device itself then keeps the order.
    """

    @property
    def computing(self) -> bool:
        """True if the device computes a batch of this batcher in the background, whose end wakes the device thread."""
        ...

    def due_ns(self) -> int | None:
        """The time when the next batch may start, on the device's clock (past: at once); None where nothing waits."""
        ...

    def step(self) -> None:
        """Run the batch whose time the last ``due_ns`` gave, or wait for one under way."""
        ...

    def land(self) -> bool:
        """Wait for a batch that is computing and answer its callers. False where there is none."""
        ...

    def refuse(self) -> None:
        """Accept no more requests; those that wait are still answered."""
        ...


class Bell:
    """A binary semaphore: several calls of `ring` before a `wait` wake it once. A bare lock: no allocation, no
    queue."""

    def __init__(self) -> None:
        self._silent = threading.Lock()
        self._silent.acquire()

    def ring(self) -> None:
        if self._silent.locked():
            try:
                self._silent.release()
            except RuntimeError:  # another thread rang in between: once is enough
                return

    def wait(self, timeout_ns: int | None = None) -> bool:
        """Sleep until it is rung, or until ``timeout_ns`` have passed: False."""
        timeout_s = -1 if timeout_ns is None else min(timeout_ns / 1e9, threading.TIMEOUT_MAX)
        return self._silent.acquire(timeout=timeout_s)


class DeviceThread:
    """Start it once, attach batchers to it, stop it once. ``clock`` gives nanoseconds.

    ``nice`` (0 to 19, Linux) is the niceness of the thread, and of those that OpenMP starts for it, above the process's
    other threads: a batch takes long, while the HTTP thread needs a core at once and for a short time. ``at_rest`` is
    called on the thread when it has had nothing to do for ``rest_ns``, and not again before its next work.
    """

    def __init__(
        self,
        name: str = "cpu",
        clock: Callable[[], int] = time.monotonic_ns,
        nice: int = 0,
        at_rest: Callable[[], object] | None = None,
        rest_ns: int = REST_NS,
    ) -> None:
        self.name = name
        self.clock = clock
        self._nice = nice
        self._at_rest = at_rest
        self._rest_ns = rest_ns
        self._bell = Bell()
        self.arrivals = Arrivals(name)
        self._awake = threading.Lock()  # held while the thread looks, runs and calls; not while it sleeps
        self._door = threading.Lock()  # guards: the list of the attached, and calls against stopping
        # The attached: replaced, never changed, so that the thread reads them without a lock.
        self._attached: tuple[Schedulable, ...] = ()
        self._background: tuple[Schedulable, ...] = ()
        self._background_turn_ns: int | None = None  # when the last one began
        self.lost: str | None = None
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._held = False
        self._stopping = False
        self._ended = False
        self._thread = threading.Thread(target=self._live, name=f"halfeven-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Refuse new work, then finish the waiting requests, then stop. False where the time did not suffice.

        It blocks. A server first awaits ``Batcher.drain()``, so that its event loop can take the answers.
        """
        with self._door:
            self._stopping = True
        for one in (*self._attached, *self._background):
            one.refuse()
        if self._thread.ident is None:
            self._thread.start()  # never started: the waiting requests are finished all the same
        self.ring()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.error("device %s: a batch or call did not end within %g s", self.name, timeout_s)
        return not self._thread.is_alive()

    @property
    def here(self) -> bool:
        """True if the calling thread is the device thread."""
        return threading.get_ident() == self._thread.ident

    @property
    def native_id(self) -> int | None:
        """The system's number of the device thread; None before it is started."""
        return self._thread.native_id

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def asleep(self) -> bool:
        """True if no batch and no call runs on the device at this moment."""
        return not self._awake.locked()

    def lose(self, reason: str) -> None:
        """The device itself is gone, with everything on it: ``lost`` says why. The first reason stays."""
        self.lost = self.lost or reason

    def attach(self, one: Schedulable, background: bool = False) -> None:
        """Let a batcher run its batches. In the ``background``: when no other batch may start, and once a second."""
        with self._door:
            if background:
                self._background = (*self._background, one)
            else:
                self._attached = (*self._attached, one)

    def detach(self, one: Schedulable) -> None:
        """Let a batcher run no more batches. Await its ``drain()`` first: waiting requests would not be answered."""
        with self._door:
            self._attached = tuple(other for other in self._attached if other is not one)
            self._background = tuple(other for other in self._background if other is not one)

    def run_here(self, one: Schedulable) -> bool:
        """Run the next batch of ``one`` on the calling thread, while the device thread is asleep.

        For batches so short that waking another thread takes longer than they do. False where the device thread has
        work, or has to look again: `ring` then.
        """
        if not self.borrow():
            return False
        try:
            due_ns = self._due_ns(one)
            if due_ns is not None and due_ns > self.clock():
                return False
            if due_ns is not None:
                self._guarded("a batch", one.step, None)
            return self._due_ns(one) is None
        finally:
            self.give_back()

    def borrow(self) -> bool:
        """Use the device on the calling thread until `give_back`. False where the device thread is awake or has
        work."""
        if not self._awake.acquire(blocking=False):
            return False
        if self._calls or self._stopping or self._held:
            self._awake.release()
            return False
        return True

    def give_back(self) -> None:
        self._awake.release()

    def ring(self) -> bool:
        """Wake the thread, for there is work. False where it has ended and will not look again."""
        self._bell.ring()
        return not self._ended

    def call(self, fn: Callable[[], T]) -> Future[T]:
        """Run ``fn`` on the device thread, between two batches; its result or exception is in the future.

        While it runs no batch is run: slice long work (proving) into several calls, and wait for each.
        One call runs between two batches, so many calls do not hold up the batches either.
        On the device thread itself never wait for the future. Raises NotReady once the thread is stopping.
        """
        future: Future[T] = Future()
        with self._door:
            if self._stopping:
                raise NotReady(f"device {self.name} is stopping and takes no more calls; start a new server")
            self._calls.append((fn, future))
        self._bell.ring()
        return future

    def hold(self) -> None:
        """Begin no batch until ``release()``; calls are still run.

        For tests and for debugging, as TRITONSERVER_DELAY_SCHEDULER is. A batch under way is finished.
        """
        self._held = True

    def release(self) -> None:
        self._held = False
        self._bell.ring()

    def _live(self) -> None:
        self._stand_back()
        rested = True
        self._awake.acquire()
        while True:
            stopping = self._stopping  # read first: work that came before it was set is then found below
            called = self._one_call()
            wait_ns = self._one_turn()
            if called or wait_ns == 0:
                rested = False
                continue
            if stopping:
                break
            self._awake.release()
            rested = self._sleep(wait_ns, rested)
            self._awake.acquire()
        self._ended = True
        self.arrivals.stop()
        while self._one_turn() == 0:  # requests that were handed over before `_ended` was seen
            pass

    def _sleep(self, wait_ns: int | None, rested: bool) -> bool:
        """Sleep until the bell rings or the time is over; gives whether `at_rest` has been called since the last
        work."""
        if self._at_rest is None or rested or wait_ns is not None:
            self._bell.wait(wait_ns)
            return rested
        if self._bell.wait(self._rest_ns):
            return False
        self._guarded("the work at rest", self._at_rest, None)
        return True

    def _stand_back(self) -> None:
        """Raise the thread's niceness. On Linux niceness belongs to a thread, unlike in POSIX (setpriority(2))."""
        if self._nice and sys.platform == "linux":
            try:
                os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + self._nice)
            except OSError as error:  # a sandbox may forbid it
                logger.warning("device %s: its threads stay as nice as the others: %s", self.name, error)

    def _one_call(self) -> bool:
        if not self._calls:
            return False
        self._land_all()
        fn, future = self._calls.popleft()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(fn())
            except BaseException as error:  # SystemExit from a model's code must not end the thread either
                future.set_exception(error)
        return True

    def _one_turn(self) -> int | None:
        """Run the batch that is due first. 0: done; else nanoseconds until one may start; None: none may."""
        first, due_ns = self._earliest(self._attached)
        behind, behind_ns = self._earliest(self._background)
        if self._held and not self._stopping:
            return 0 if self._land_all() else None
        now_ns = self.clock()
        if behind is not None and self._may_run(behind_ns, first, due_ns, now_ns):
            first, due_ns = behind, behind_ns
            self._background_turn_ns = now_ns
        if first is None:
            return 0 if self._stopping and self._land_all() else None
        if due_ns > now_ns and not self._stopping:
            return (due_ns if behind is None else min(due_ns, behind_ns)) - now_ns
        # A background batch waits for all that compute: it may need the place of one of them on its engine.
        self._land_all(but=first, computing=first is behind)
        self._guarded("a batch", first.step, None)
        return 0

    def _earliest(self, several: tuple[Schedulable, ...]) -> tuple[Schedulable | None, int]:
        """The batcher whose batch is due first, and when."""
        first: Schedulable | None = None
        due_ns = 0
        for one in several:
            its_ns = self._due_ns(one)
            if its_ns is not None and (first is None or its_ns < due_ns):
                first, due_ns = one, its_ns
        return first, due_ns

    def _may_run(self, behind_ns: int, first: Schedulable | None, due_ns: int, now_ns: int) -> bool:
        """True if a background batch runs before the first of the others."""
        if first is None and not any(one.computing for one in self._attached):
            return True
        if first is not None and behind_ns <= now_ns < due_ns:
            return True
        last_ns = self._background_turn_ns
        waits_since_ns = behind_ns if last_ns is None else max(behind_ns, last_ns)
        return now_ns - waits_since_ns >= BACKGROUND_EVERY_NS

    def _land_all(self, but: Schedulable | None = None, computing: bool = True) -> bool:
        """Wait for all batches under way, and return whether there were any. ``computing``: also for those that the
        device computes in the background."""
        landed = False
        for one in (*self._attached, *self._background):
            while one is not but and (computing or not one.computing):
                if not self._guarded("an end", one.land, False):
                    break
                landed = True
        return landed

    def _due_ns(self, one: Schedulable) -> int | None:
        return self._guarded("a queue", one.due_ns, None)

    def _guarded(self, what: str, work: Callable[[], T], otherwise: T) -> T:
        """The result of ``work``; ``otherwise`` where it raises, which ends neither the thread nor other batches."""
        try:
            return work()
        except BaseException:
            logger.exception("device %s: %s raised; a mistake of ours, please report it", self.name, what)
            return otherwise
