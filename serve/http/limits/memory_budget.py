"""The bytes that requests hold in memory: one budget for all of them, whatever the route.

Counted is the memory that a caller can make grow: a body while it arrives, the data that it unpacks to, the objects
that JSON is read into, and answers that the caller does not read. The first `FREE_BYTES` of each request are not
counted: there are at most as many of them as connections, and a small request is accepted however full the budget is.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from ....models.errors import Overloaded, TooLarge
from ....models.machine.control_groups import usable_memory

FREE_BYTES = 64 * 1024
_SHARE = 4  # one part of so many of the machine's memory
_LEAST, _MOST = 64 * 2**20, 2**30
_RETRY_AFTER_S = 1.0


class MemoryBudget:
    """``used`` bytes are held now, of at most ``limit``. Threads may share it."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0
        self._lock = threading.Lock()

    def lease(self) -> "Lease":
        """A lease for one request."""
        return Lease(self)

    def take(self, nbytes: int, held: int = 0) -> None:
        """Take ``nbytes`` more for a request that holds ``held`` bytes.

        Raises Overloaded where they do not fit now, TooLarge where they never do.
        """
        with self._lock:
            if self.used + nbytes <= self.limit:
                self.used += nbytes
                return
        setting = f"all requests together may hold {self.limit} bytes (HALFEVEN_MAX_IN_FLIGHT_MIB)"
        if held + nbytes > self.limit:
            raise TooLarge(
                f"reading the request takes {held + nbytes} bytes of memory, {setting}; send fewer rows in one request"
            )
        raise Overloaded(
            f"no memory for {nbytes} bytes more of the request: {setting}; try again", _RETRY_AFTER_S
        )

    def take_anyway(self, nbytes: int) -> None:
        """Count bytes that are in memory already; the limit may be exceeded."""
        with self._lock:
            self.used += nbytes

    def give_back(self, nbytes: int) -> None:
        with self._lock:
            self.used -= nbytes


class Lease:
    """The bytes of one request. `close` gives back what is left, once, however often it is called."""

    __slots__ = ("_budget", "_closed", "_free", "_held", "_lock")

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget, self._free, self._held, self._closed = budget, FREE_BYTES, 0, False
        self._lock = threading.Lock()

    @property
    def held(self) -> int:
        """Bytes of the budget."""
        return self._held

    def add(self, nbytes: int) -> None:
        """Hold ``nbytes`` more. Raises Overloaded or TooLarge, and then holds as much as before."""
        with self._lock:
            counted = max(nbytes - self._free, 0)
            if counted:
                if self._closed:
                    raise Overloaded("the request has ended while it was being read")
                self._budget.take(counted, self._held)
                self._held += counted
            self._free -= nbytes - counted

    @contextmanager
    def meanwhile(self, nbytes: int) -> Iterator[None]:
        """Hold ``nbytes`` more inside the block. Raises as `add`."""
        before = self._held
        self.add(nbytes)
        counted = self._held - before
        try:
            yield
        finally:
            with self._lock:
                if not self._closed:
                    self._held -= counted
                    self._budget.give_back(counted)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._budget.give_back(self._held)
                self._held = 0


def unlimited() -> Lease:
    """A lease without a limit, for a request outside of a server."""
    return MemoryBudget(sys.maxsize).lease()


def default_limit(memory: Callable[[], int] | None = None) -> int:
    """A quarter of the memory that this process may have, from 64 MiB to 1 GiB."""
    return min(max((memory or usable_memory)() // _SHARE, _LEAST), _MOST)


# Bytes of each in CPython 3.11 on 64 bits, with its place in a list.
_LIST, _OBJECT, _NUMBER, _TEXT = (72, 240, 40, 64)
_PIECE = 2**18  # bytes


def json_bytes(text: bytes) -> int:
    """About the bytes of the objects that JSON is read into: a list of numbers takes up to twenty times its text.

    It is counted in pieces: a call that counts a long text at once would keep the interpreter's lock.
    """
    commas = lists = objects = quotes = 0
    for at in range(0, len(text), _PIECE):
        piece = np.frombuffer(text, np.uint8, min(_PIECE, len(text) - at), at)
        commas += int(np.count_nonzero(piece == ord(",")))
        lists += int(np.count_nonzero(piece == ord("[")))
        objects += int(np.count_nonzero(piece == ord("{")))
        quotes += int(np.count_nonzero(piece == ord('"')))
    found = _NUMBER * (commas + 1) + _LIST * lists + _OBJECT * objects + _TEXT * (quotes // 2)
    return len(text) + found
