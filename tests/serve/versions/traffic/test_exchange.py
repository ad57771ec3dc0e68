"""Another engine takes the place of one that serves, under HTTP traffic: no request is lost, no closed engine runs."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from halfeven.models.engines.cpu.setup import CpuSetup
from halfeven.models.store.store import Store
from halfeven.serve.versions.roster import Roster
from halfeven.serve.versions.traffic.loaded_version import LoadedVersion, retire

from tests.patience import PATIENCE_S, until
from tests.serve.versions.traffic.conftest import Engine, Versions, attached, call, infer, serving, traffic


def loaded_of(roster: Roster) -> LoadedVersion:
    return roster.all()[0].traffic.stable


@pytest.mark.slow
def test_engines_and_batch_sizes_are_exchanged_and_every_request_is_answered(
    store: Store, versions: Versions
) -> None:
    with serving(store, parity_sample=1.0) as (address, roster), traffic(address) as callers:
        loaded = loaded_of(roster)
        until(lambda: callers.answered > 20)
        for turn in range(20):
            old: Any = loaded.prepared.engine
            if turn % 3 == 2:
                assert loaded.exchange(old, replace(loaded.prepared, useful_rows=1 + turn % 8))
                assert not old.closed and loaded.prepared.useful_rows == 1 + turn % 8
                continue
            new = replace(loaded.prepared, engine=Engine(1), setup=CpuSetup(turn + 1), reason=f"turn {turn}")
            assert loaded.exchange(old, new)
            assert old.closed and loaded.prepared.engine is new.engine
        since = callers.answered
        until(lambda: callers.answered > since + 50)
        (model,) = call(address, "/v1/models")[1]["models"]
        assert model["cpu"]["threads"] == 20 and model["reason"] == "turn 19"
        original: Any = loaded.prepared.original
        assert original is versions.originals[1] and not original.closed, "it goes on checking"
        assert loaded.drift is not None
    assert (callers.failed, callers.faults) == (0, [])
    assert callers.by_version == {"1": callers.answered}


@pytest.mark.slow
def test_an_engine_that_serves_no_more_is_not_exchanged(store: Store, versions: Versions) -> None:
    with serving(store) as (_, roster):
        loaded = loaded_of(roster)
        rival: Any = Engine(1)
        assert not loaded.exchange(rival, replace(loaded.prepared, engine=rival))
        half: Any = loaded.prepared.engine
        assert loaded.serves_by(half) and loaded.fall_back("a test says so")
        assert not loaded.exchange(half, replace(loaded.prepared, engine=rival)) and loaded.fell_back
        assert not loaded.serves_by(half)
    assert not loaded.exchange(loaded.prepared.engine, replace(loaded.prepared, engine=rival)), "it is closed"
    assert not rival.closed, "whose engine it is, closes it"


@pytest.mark.slow
def test_a_rival_serves_for_a_moment_and_every_engine_stays_loaded(store: Store, versions: Versions) -> None:
    with serving(store, parity_sample=1.0) as (address, roster), traffic(address) as callers:
        loaded = loaded_of(roster)
        lender, rival = loaded.prepared, Engine(1)
        for _ in range(10):
            assert loaded.lend(lender.engine, replace(lender, engine=rival))
            assert not loaded.lend(rival, replace(lender, engine=Engine(1))), "one at a time"
            since = rival.rows
            until(lambda since=since: rival.rows > since)
            assert loaded.take_back() and loaded.prepared is lender
        assert not loaded.take_back(), "that has ended"
        assert not rival.closed and loaded.drift is not None, "the checks go on"
    assert (callers.failed, callers.faults) == (0, [])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["falls back", "is closed"])
def test_a_version_that_ends_a_trial_closes_its_own_engines_and_not_the_rival(
    how: str, store: Store, versions: Versions
) -> None:
    with serving(store) as (address, roster):
        loaded = loaded_of(roster)
        lender, rival = loaded.prepared, Engine(1)
        half: Any = lender.engine
        assert loaded.lend(half, replace(lender, engine=rival))
        if how == "falls back":
            assert loaded.fall_back("a test says so") and loaded.prepared.engine is lender.original
        else:
            assert call(address, "/v2/repository/models/net/unload", {})[0] == 200
            until(lambda: half.closed)
        assert not loaded.take_back() and half.closed and not rival.closed


@pytest.mark.slow
def test_from_half_to_original_and_back_the_checks_end_and_begin(store: Store, versions: Versions) -> None:
    with serving(store, parity_sample=1.0) as (address, roster), traffic(address) as callers:
        served = roster.all()[0]
        loaded = served.traffic.stable
        half: Any = loaded.prepared.engine
        checked = attached(roster)
        until(lambda: callers.answered > 20)
        fp32: Any = Engine(1, "fp32")
        assert loaded.exchange(half, replace(loaded.prepared, engine=fp32, precision="fp32", original=None))
        served.exchanged(loaded)
        assert half.closed and versions.originals[1].closed and loaded.drift is None
        assert attached(roster) == checked - 1, "the queue of the checks is gone with its engine"
        other: Any = Engine(1)
        assert loaded.exchange(fp32, replace(loaded.prepared, engine=other, precision="fp16", original=fp32))
        served.exchanged(loaded)
        assert not fp32.closed and loaded.drift is not None and attached(roster) == checked
        since = fp32.rows
        until(lambda: fp32.rows > since + 5)
        assert infer(address) == "1"
    assert (callers.failed, callers.faults) == (0, [])


@pytest.mark.slow
def test_an_exchange_beside_a_promotion_loses_nothing(store: Store, versions: Versions) -> None:
    with serving(store) as (address, roster), traffic(address) as callers:
        for number in (2, 1, 2):
            loaded = loaded_of(roster)
            call(address, "/v1/models/net/promote", {"version": number})
            rival = Engine(loaded.number)
            old: Any = loaded.prepared.engine
            if loaded.exchange(old, replace(loaded.prepared, engine=rival)):
                assert old.closed
        until(lambda: callers.answered > 50)
    assert (callers.failed, callers.faults) == (0, [])


@pytest.mark.slow
def test_a_version_that_is_retired_while_its_engine_is_exchanged_is_closed(
    store: Store, versions: Versions
) -> None:
    """The queue of checks is dropped after `drain` has begun: it waits for no turn that will not come."""
    with serving(store, parity_sample=1.0) as (address, roster), ThreadPoolExecutor(2) as pool:
        loaded, device = loaded_of(roster), roster.place.thread
        device.hold()
        waiting = pool.submit(infer, address)
        until(lambda: loaded.waiting == 1)
        retired = pool.submit(retire, [loaded], loaded.batcher._loop)
        until(lambda: loaded.batcher._drained is not None)
        new = Engine(1, "fp32")
        assert loaded.exchange(
            loaded.prepared.engine, replace(loaded.prepared, engine=new, precision="fp32", original=None)
        )
        device.release()
        assert waiting.result(PATIENCE_S) == "1"
        retired.result(PATIENCE_S)
        assert new.closed and versions.originals[1].closed and versions.halves[1].closed


@pytest.mark.slow
def test_a_shutdown_does_not_wait_for_a_device_that_does_not_come_back(
    store: Store, versions: Versions
) -> None:
    hangs = threading.Event()
    with serving(store, shutdown_seconds=0.2) as (_, roster):
        engine = versions.halves[1]
        roster.place.thread.call(hangs.wait)
    assert not hangs.is_set() and not engine.closed
    hangs.set()
