"""The number of connections that there may be."""

import logging
import os
import resource
import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any, cast

import pytest
from halfeven.models.errors import BadSetting
from halfeven.serve.http.limits import connections
from halfeven.serve.http.limits.connections import (
    Connections,
    connection_limit,
    descriptor_limit,
    descriptors_in_use,
    raise_descriptor_limit,
)
from halfeven.serve.http.limits.repeated_warnings import WarningEachSecond
from halfeven.serve.versions.roster import Roster


@pytest.mark.parametrize(
    ("descriptors", "in_use", "setting", "each", "limit"),
    [
        (20_000, 40, None, 1, 1024),
        (1024, 24, None, 1, 750),
        (1024, 24, None, 2, 375),
        (1024, 524, None, 1, 375),
        (100, 40, None, 1, 12),  # 48 are kept at least
        (90, 40, None, 2, 1),
        (4000, 40, 2900, 1, 2900),
        (None, 10**6, None, 2, 1024),
        (None, 10**6, 10**6, 2, 10**6),
    ],
)
def test_the_limit_leaves_descriptors_for_all_else(
    descriptors: int | None, in_use: int, setting: int | None, each: int, limit: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(connections, "descriptor_limit", lambda: descriptors)
    monkeypatch.setattr(connections, "descriptors_in_use", lambda: in_use)
    assert connection_limit(setting, each) == limit
    if descriptors is not None:
        assert limit * each + in_use < descriptors
        with pytest.raises(BadSetting, match=r"of which .* are open already.*ulimit -n"):
            connection_limit((descriptors - in_use) // each, each)


@pytest.mark.parametrize(("descriptors", "each"), [(88, 1), (89, 2), (20, 1)])
def test_where_no_connection_fits_the_server_says_so_at_its_start(
    descriptors: int, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "descriptor_limit", lambda: descriptors)
    monkeypatch.setattr(connections, "descriptors_in_use", lambda: 40)
    with pytest.raises(BadSetting, match="no connection can be taken"):
        connection_limit(None, each)


def test_descriptors_that_are_open_are_counted() -> None:
    before = descriptors_in_use()
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(5)]
    assert descriptors_in_use() == before + 5
    for one in opened:
        os.close(one)
    assert descriptors_in_use() == before


def test_the_soft_limit_is_raised_to_the_hard_one(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: limits.append(wanted))
    raise_descriptor_limit()
    raise_descriptor_limit()
    assert limits == [(1024, 4096), (4096, 4096)]
    assert descriptor_limit() == 4096
    limits.append((resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert descriptor_limit() is None


def test_of_a_kind_of_warning_one_a_second_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    now_s = [0.0]
    warning = WarningEachSecond(logging.getLogger("halfeven"), "refused", lambda: now_s[0])
    for at_s in (0.0, 0.1, 0.9, 1.0, 1.5, 5.0):
        now_s[0] = at_s
        warning.count(f"at {at_s}")
    assert [record.getMessage() for record in caplog.records] == [
        "refused: at 0.0",
        "refused: at 1.0 (3 since the last line like this)",
        "refused: at 5.0 (2 since the last line like this)",
    ]


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
    places = Connections(100)
    busy = [Open(False) for _ in range(100)]
    assert all(places.enter(one) for one in busy)
    for newcomer in range(50):
        assert not places.enter(Open(True))
        assert sum(one.looked_at for one in busy) == 16 * (newcomer + 1)
    assert {one.looked_at for one in busy} == {8}
    busy[40].idle = True
    assert any(places.enter(Open(False)) for _ in range(7)) and busy[40].closed
    places.leave(busy[40])
    places.leave(busy[40])
    assert len(places) == 100


def test_names_that_callers_make_up_leave_no_locks_behind() -> None:
    roster: Any = SimpleNamespace(
        _served={},
        store=SimpleNamespace(numbers=lambda name: [1] * (name == "a")),
        _working=defaultdict(threading.RLock),
    )
    for name in ("a", "b", "c" * 60_000, "a"):
        with Roster.working(cast(Roster, roster), name):
            pass
    assert list(roster._working) == ["a"]
