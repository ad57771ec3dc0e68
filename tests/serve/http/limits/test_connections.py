"""How many connections there may be."""

import resource
import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any, cast

import pytest
from halfeven.models.errors import BadSetting
from halfeven.serve.http.limits.connections import Connections, backlog_of, connection_limit
from halfeven.serve.versions.roster import Roster


@pytest.mark.parametrize(
    ("descriptors", "setting", "limit"),
    [(20_000, None, 1024), (1024, None, 768), (256, None, 192), (4000, 3000, 3000)],
)
def test_the_limit_is_below_that_of_descriptors(
    descriptors: int, setting: int | None, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (descriptors, descriptors))
    assert connection_limit(setting) == limit
    assert limit + backlog_of(limit) < descriptors, "those that are accepted in one go fit too"
    with pytest.raises(BadSetting, match="ulimit -n"):
        connection_limit(descriptors)


class Open:
    """A connection."""

    def __init__(self, idle: bool) -> None:
        self.idle, self.looked_at, self.closed = idle, 0, False

    def is_idle(self) -> bool:
        self.looked_at += 1
        return self.idle

    def close_idle(self) -> None:
        self.closed = True


def test_a_newcomer_costs_a_few_looks_and_all_are_looked_at_in_turn() -> None:
    connections = Connections(100)
    busy = [Open(False) for _ in range(100)]
    assert all(connections.enter(one) for one in busy)
    for newcomer in range(50):
        assert not connections.enter(Open(True))
        assert sum(one.looked_at for one in busy) == 16 * (newcomer + 1)
    assert {one.looked_at for one in busy} == {8}
    busy[40].idle = True
    assert any(connections.enter(Open(False)) for _ in range(7)) and busy[40].closed
    connections.leave(busy[40])
    connections.leave(busy[40])
    assert len(connections) == 100


def test_names_that_callers_make_up_leave_no_locks_behind() -> None:
    roster: Any = SimpleNamespace(
        _served={}, store=SimpleNamespace(names=lambda: ["a"]), _working=defaultdict(threading.RLock)
    )
    for name in ("a", "b", "c" * 60_000, "a"):
        with Roster.working(cast(Roster, roster), name):
            pass
    assert list(roster._working) == ["a"]
