"""Memory and connections are bounded for all processes of a server together."""

import os
from dataclasses import dataclass, replace

import pytest
from halfeven.models.errors import Overloaded
from halfeven.serve.http.limits.request_limits import DEFAULTS
from halfeven.serve.workers.shared_bounds import SharedCounts, shared_bounds

LIMITS = replace(DEFAULTS, in_flight_bytes=1000, connections=3)


def test_bytes_that_one_process_holds_are_missing_in_the_others_until_it_ends() -> None:
    counts = SharedCounts(2)
    pid = os.fork()
    if pid == 0:
        shared_bounds(LIMITS, counts, 1).budget.take(700)
        os._exit(0)
    os.waitpid(pid, 0)
    budget = shared_bounds(LIMITS, counts, 0).budget
    budget.take(300)
    assert budget.used == 1000
    with pytest.raises(Overloaded):
        budget.take(1)
    counts.clear(1)
    budget.take(700)
    budget.give_back(1000)
    assert budget.used == 0


@dataclass(eq=False)
class Open:
    idle: bool
    closed: bool = False

    def is_idle(self) -> bool:
        return self.idle

    def close_idle(self) -> None:
        self.closed = True


def test_connections_count_together_and_a_process_closes_only_its_own_idle_ones() -> None:
    counts = SharedCounts(2)
    here, there = (shared_bounds(LIMITS, counts, place).connections for place in (0, 1))
    busy, idle = Open(False), Open(True)
    assert here.enter(busy) and there.enter(idle) and there.enter(Open(False))
    assert len(here) == len(there) == 3
    assert not here.enter(Open(False)), "the idle one is another process's"
    assert there.enter(Open(False)) and idle.closed and len(here) == 3
    here.leave(busy)
    assert len(there) == 2 and here.enter(Open(False))
