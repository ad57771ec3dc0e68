"""Bounds that hold for all processes of a server together: the memory of requests, and the connections.

Each process writes its own two counts into memory that all of them share, and reads those of the others: there is no
lock between processes. Two processes that take the last bytes in the same moment may exceed the limit, by what these
two requests take.
"""

import mmap

from ..http.limits.bounds import Bounds
from ..http.limits.connections import Connection, Connections, connection_limit
from ..http.limits.memory_budget import MemoryBudget, default_limit
from ..http.limits.request_limits import RequestLimits

_BYTES, _CONNECTIONS = range(2)  # the counts of one process
_COUNTS = 2
# Of each connection, in a worker: its own, and the socket over which a call goes to the engine process; there, that
# socket's other end, and a connection of gRPC.
DESCRIPTORS_EACH = 2


class SharedCounts:
    """The counts of ``processes`` processes. To be made before they are forked."""

    def __init__(self, processes: int) -> None:
        self._table = memoryview(mmap.mmap(-1, processes * _COUNTS * 8)).cast("q")

    def clear(self, place: int) -> None:
        """The process at this place has ended."""
        for which in range(_COUNTS):
            self.set(place, which, 0)

    def set(self, place: int, which: int, count: int) -> None:
        self._table[place * _COUNTS + which] = count

    def sum(self, which: int) -> int:
        return sum(self._table[which::_COUNTS])


def shared_bounds(limits: RequestLimits, counts: SharedCounts, place: int) -> Bounds:
    """The bounds of the process at this place. Raises BadSetting as `connection_limit`."""
    budget = SharedBudget(limits.in_flight_bytes or default_limit(), counts, place)
    connections = SharedConnections(connection_limit(limits.connections, DESCRIPTORS_EACH), counts, place)
    return Bounds(limits.arrival_seconds, budget, connections)


class SharedBudget(MemoryBudget):
    """A `MemoryBudget` of which this process holds a part. ``used`` is what all processes hold."""

    def __init__(self, limit: int, counts: SharedCounts, place: int) -> None:
        super().__init__(limit)
        self._counts, self._place = counts, place

    @property
    def used(self) -> int:
        return self._counts.sum(_BYTES)

    def _add(self, nbytes: int) -> None:
        super()._add(nbytes)
        self._counts.set(self._place, _BYTES, self._own)


class SharedConnections(Connections):
    """`Connections` of which this process has a part. The length is the number of all; an idle one is closed for a new
    one only where this process has it."""

    def __init__(self, limit: int, counts: SharedCounts, place: int) -> None:
        super().__init__(limit)
        self._counts, self._place = counts, place

    def __len__(self) -> int:
        return self._counts.sum(_CONNECTIONS)

    def enter(self, connection: Connection) -> bool:
        entered = super().enter(connection)
        self._counts.set(self._place, _CONNECTIONS, len(self._open))
        return entered

    def leave(self, connection: Connection) -> None:
        super().leave(connection)
        self._counts.set(self._place, _CONNECTIONS, len(self._open))
