"""A second thread that blocks in the device's events, so that the device thread never has to.

While a batch computes, the device thread begins the next one as soon as that is full. A thread that waited for the
first in an event would find the second only afterwards.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

_Watched = tuple[Callable[[], None], Callable[[], None]]


class Arrivals:
    """Waits for batches in the order in which they are given. The thread starts with the first of them."""

    def __init__(self, name: str) -> None:
        self._watched: SimpleQueue[_Watched | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._live, name=f"halfeven-{name}-arrivals", daemon=True)

    def watch(self, synchronize: Callable[[], None], arrived: Callable[[], None]) -> None:
        """Call ``synchronize``, which blocks until a batch has ended, and then ``arrived``, both on the thread.

        What ``synchronize`` raises is dropped: the device thread's own wait raises it again.
        """
        if self._thread.ident is None:
            self._thread.start()
        self._watched.put((synchronize, arrived))

    def stop(self) -> None:
        self._watched.put(None)

    def _live(self) -> None:
        while (watched := self._watched.get()) is not None:
            synchronize, arrived = watched
            with suppress(Exception):
                synchronize()
            arrived()
