"""Drift, faults and slowness injected into live versions, under HTTP traffic: found, replaced, no request fails."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from halfeven.models.engines.cpu.setup import CpuSetup
from halfeven.models.store.store import Store
from halfeven.serve.batching.counters import Counters
from halfeven.serve.batching.device import DeviceThread
from halfeven.serve.batching.interface import PreparedVersion
from halfeven.serve.batching.place import Place
from halfeven.serve.versions.orders import drifted, pardon
from halfeven.serve.versions.roster import Roster
from halfeven.serve.versions.store_writer import StoreWriter
from halfeven.serve.versions.traffic import loaded_version
from halfeven.serve.versions.traffic.automatic_decisions import AutomaticDecisions
from halfeven.serve.versions.traffic.loaded_version import LoadedVersion
from halfeven.serve.versions.traffic.rules import TrialRules
from halfeven.serve.versions.traffic.served import ServedModel

from tests.patience import PATIENCE_S, until
from tests.serve.versions.traffic.conftest import (
    Engine,
    Versions,
    call,
    decided,
    infer,
    kinds,
    serving,
    spec,
    traffic,
)

U = 2.0**-11
ROOT = Path(__file__).resolve().parents[4]


def growing(engine: Engine, after: int) -> None:
    """Let the half err from the ``after``-th row on, by more with every batch."""

    def drift(y: np.ndarray) -> np.ndarray:
        beyond = engine.rows - after
        return y + np.float32(max(beyond, 0) * U)

    engine.change = drift


@pytest.mark.slow
def test_a_half_that_drifts_falls_back_to_its_original_within_the_stated_number_of_requests(
    store: Store, versions: Versions
) -> None:
    """Five requests over the limit suffice, among those that are checked after the half began to drift."""
    sampled_every, healthy = 20, 200
    versions.prepare[1] = lambda engine: growing(engine, healthy)
    with serving(store, parity_sample=1 / sampled_every) as (address, roster):
        with traffic(address) as callers:
            until(lambda: roster.find("net").prepared.precision == "fp32")
            since = callers.answered
            until(lambda: callers.answered > since + 50)
        assert (callers.failed, callers.faults) == (0, [])
        # 4 rows until the error is over 4 u·S; up to 20 until one is checked, and 5 checked ones; then what is on its
        # way: while five are judged, 3 callers ask on. Twice that is the bound that holds on a busy machine.
        assert versions.halves[1].rows - healthy < 2 * (4 + sampled_every + 5) + 400
        assert versions.halves[1].closed
        assert versions.originals[1].rows > 50
        prepared = roster.find("net").prepared
        assert prepared.reason.startswith("drift: 5 of the last")
        assert infer(address) == "1"
        until(lambda: kinds(store) == ["drift"])
        found = call(address, "/v1/models/net/events")[1]["events"]
        (event,) = [one for one in found if one["kind"] not in ("activated", "retired")]
        assert event["kind"] == "drift"
        assert event["numbers"]["recent_over"] == 5
        assert event["numbers"]["outputs"]["y"]["over_limit"] >= 5
        reply = call(address, "/v1/models/net/drift")[1]["versions"][0]
        assert reply["precision"] == "fp32" and reply["over_limit"] >= 5
        assert (
            'halfeven_drift_over_limit_total{model="net",output="y",version="1"}'
            in call(address, "/metrics")[1]
        )
    assert drifted(store.version("net", 1), "cpu") == prepared.reason, "noted where the next start finds it"
    assert drifted(store.version("net", 1), "cuda:0") is None
    pardon(store.version("net", 1))
    assert drifted(store.version("net", 1), "cpu") is None


@pytest.mark.slow
def test_the_decisions_that_have_alerts_are_counted_from_0_on(store: Store, versions: Versions) -> None:
    """A counter that appears with 1 has not increased: Prometheus would miss the first one."""
    rules = (ROOT / "docker/rules.yml").read_text()
    watched = re.findall(r'halfeven_decisions_total\{kind=~?"([^"]+)"', rules)
    with serving(store) as (address, _):
        metrics = call(address, "/metrics")[1]
        for kind in "|".join(watched).split("|"):
            assert f'halfeven_decisions_total{{kind="{kind}",model="net"}} 0.0' in metrics


def test_two_threads_that_fall_back_and_one_that_closes_close_every_engine_once(store: Store) -> None:
    """A replica finds its own drift while it reads that of another one, and the version is unloaded meanwhile."""
    half, original = ClosedOnce(1), ClosedOnce(1, "fp32")
    met = threading.Barrier(2)

    def call(fn: Callable[[], Any]) -> Any:
        with suppress(threading.BrokenBarrierError):
            met.wait(0.2)  # a second thread that is here too has read the half as well
        return thread.call(fn).result()

    thread = DeviceThread("cpu")
    thread.start()
    try:
        place = cast(Place, SimpleNamespace(thread=thread, call=call))
        prepared = PreparedVersion("1", "d", "fp16", half, "made up", original)
        loaded = LoadedVersion(store.version("net", 1), spec(), place, prepared)
        with ThreadPoolExecutor(2) as pool:
            done = [pool.submit(loaded.fall_back, f"drift {n}") for n in range(2)]
        assert sorted(one.result() for one in done) == [False, True]
        loaded.close()
        assert not loaded.fall_back("drift after the end")
        assert (half.times, original.times) == (1, 1)
    finally:
        thread.stop(10)


@dataclass(eq=False)
class ClosedOnce(Engine):
    times: int = 0

    def close(self) -> None:
        self.times += 1
        super().close()


@pytest.mark.slow
def test_a_healthy_half_is_checked_and_stays(store: Store, versions: Versions) -> None:
    versions.prepare[1] = lambda engine: setattr(engine, "change", lambda y: y + np.float32(2 * U))
    with serving(store, parity_sample=0.5) as (address, roster):
        for _ in range(40):
            infer(address)
        loaded = roster.all()[0].loaded_versions()[0]
        until(lambda: loaded.drift is not None and loaded.drift.numbers()["checked"] == 20)
        reply = call(address, "/v1/models/net/drift")[1]["versions"][0]
        assert reply["over_limit"] == 0
        assert reply["outputs"]["y"]["histogram_u"]["2.0"] + reply["outputs"]["y"]["histogram_u"]["4.0"] == 20
        assert roster.find("net").prepared.precision == "fp16"


@pytest.mark.slow
def test_one_strange_request_has_every_request_checked_for_a_while(store: Store, versions: Versions) -> None:
    odd = np.float32(0.75)
    versions.prepare[1] = lambda engine: setattr(
        engine, "change", lambda y: y + (y == odd) * np.float32(9e-4 + 4 * U)
    )
    with serving(store, parity_sample=1e-9, drift_of=10) as (address, roster):
        drift = roster.all()[0].loaded_versions()[0].drift
        assert drift is not None
        drift._suspicious = 1  # the next one is checked
        call(address, "/v2/models/net/infer", asked(float(odd)))
        until(lambda: drift.over == 1)
        for checked in range(2, 12):
            infer(address)
            until(lambda checked=checked: drift.numbers()["checked"] == checked)
        for _ in range(20):
            infer(address)
        assert drift.numbers()["checked"] == 11
        assert roster.find("net").prepared.precision == "fp16", "one is not drift"


def asked(value: float) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [value] * 4}]}


@pytest.mark.slow
def test_drift_of_a_version_on_trial_rolls_back_to_the_previous_one(store: Store, versions: Versions) -> None:
    versions.prepare[2] = lambda engine: growing(engine, 50)
    with serving(store, parity_sample=0.1) as (address, roster):
        with traffic(address) as callers:
            until(lambda: callers.by_version["1"] > 20)
            store.promote(store.version("net", 2))
            until(lambda: callers.by_version["2"] > 0)
            until(lambda: roster.active("net") == "1")
            since = callers.by_version["1"]
            until(lambda: callers.by_version["1"] > since + 20)
        assert (callers.failed, callers.faults) == (0, [])
        until(lambda: store.live_number("net") == 1)
        until(lambda: versions.halves[2].closed and versions.originals[2].closed)
        assert versions.loads[1] == 1, "the previous version had stayed warm"
        until(lambda: kinds(store) == ["rolled_back", "drift"])
        reply = decided(store)[0]
        assert "net@2 was rolled back to net@1: drift" in reply["message"]
        assert (reply["numbers"]["from"], reply["numbers"]["to"]) == (2, 1)
        roster.look()
        assert roster.active("net") == "1"


def fails(engine: Engine) -> None:
    engine.fault = RuntimeError("a kernel is missing")


@pytest.mark.slow
def test_a_promoted_version_that_fails_is_rolled_back_and_no_caller_sees_it(
    store: Store, versions: Versions
) -> None:
    versions.prepare[2] = fails
    with serving(store) as (address, roster):
        with traffic(address) as callers:
            until(lambda: callers.answered > 20)
            status, _ = call(address, "/v1/models/net/promote", {"version": 2})
            assert status == 200
            until(lambda: "rolled_back" in kinds(store))
            since = callers.answered
            until(lambda: callers.answered > since + 20)
        assert (callers.failed, callers.faults) == (0, [])
        assert callers.by_version["2"] == 0
        assert store.live_number("net") == 1
        assert roster.active("net") == "1"
        assert "a kernel is missing" in decided(store)[0]["message"]


def test_a_rollback_by_itself_leaves_what_an_operator_promoted_meanwhile(store: Store) -> None:
    """Version 2 failed its trial; version 3 is what the store names by then."""
    bad, good = (SimpleNamespace(name="net", number=n, version=store.version("net", n)) for n in (2, 1))
    store.promote(store.version("net", 3))
    AutomaticDecisions(StoreWriter(store), "cpu").rolled_back(
        cast(LoadedVersion, bad), cast(LoadedVersion, good), "it failed", {}
    )
    assert store.live_number("net") == 3
    assert "the store is not changed" in decided(store)[0]["message"]


@pytest.mark.slow
def test_a_slow_version_is_rolled_back(store: Store, versions: Versions) -> None:
    versions.prepare[2] = lambda engine: setattr(engine, "seconds", 0.02)
    with serving(store, parity_sample=0.0) as (address, roster):
        with traffic(address, connections=1) as callers:
            until(lambda: callers.by_version["1"] > 50)
            call(address, "/v1/models/net/promote", {"version": 2})
            until(lambda: roster.active("net") == "1")
        assert callers.failed == 0
        until(lambda: "rolled_back" in kinds(store))
        assert decided(store)[0]["numbers"]["slower"] > 3.0


@pytest.fixture
def device() -> Iterator[Place]:
    thread = DeviceThread("cpu")
    thread.start()
    yield cast(Place, SimpleNamespace(thread=thread, call=lambda fn: thread.call(fn).result()))
    thread.stop(10)


def slow_beside(store: Store, device: Place, threads: int, monkeypatch: pytest.MonkeyPatch) -> ServedModel:
    """Version 1 on two threads, and version 2 on trial, whose batches take four times as long on its own threads."""

    def loaded(number: int, threads: int, seconds: float) -> LoadedVersion:
        engine = Engine(number, seconds=seconds)
        form: Any = "a form"
        prepared = PreparedVersion(
            str(number), "d", "fp16", engine, probe=[np.ones((1, 4))], setup=CpuSetup(threads), forms=[form]
        )
        made = LoadedVersion(store.version("net", number), spec(), device, prepared)
        taken = Counters(str(number), batches={2: (100, round(1e9 * seconds))})
        monkeypatch.setattr(made, "counters", lambda: taken)
        return made

    monkeypatch.setattr(loaded_version, "batch_seconds", lambda engine, parts: engine.seconds)
    decisions: Any = SimpleNamespace(rolled_back=lambda *given: None)
    judge: Any = SimpleNamespace(submit=lambda deed: deed())
    served = ServedModel(loaded(1, 2, 1.0), TrialRules(timed_batches=100), decisions, judge)
    served.activate(loaded(2, threads, 4.0))
    return served


@pytest.mark.parametrize(
    ("threads", "confirmed", "goes"), [(1, False, False), (1, True, True), (2, False, True)]
)
def test_the_time_of_a_way_of_serving_that_may_be_a_wrong_choice_is_held_against_no_version(
    store: Store, device: Place, monkeypatch: pytest.MonkeyPatch, threads: int, confirmed: bool, goes: bool
) -> None:
    served = slow_beside(store, device, threads, monkeypatch)
    served.traffic.stable.confirmed = confirmed
    served.look_at_time()
    assert served.traffic.stable.number == (1 if goes else 2)


def test_a_version_is_not_timed_by_a_rival_that_serves_for_a_moment_nor_by_a_run_that_fails(
    store: Store, device: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = slow_beside(store, device, 2, monkeypatch)
    loaded, own = served.traffic.stable, served.prepared
    assert loaded.lend(own.engine, replace(own, engine=Engine(2, seconds=9.0)))
    assert loaded.batch_seconds(2) is None
    assert loaded.take_back() and loaded.batch_seconds(2) == 4.0
    monkeypatch.setattr(loaded_version, "batch_seconds", lambda engine, parts: engine.seconds / 0)
    assert loaded.batch_seconds(2) is None


@pytest.mark.slow
def test_a_canary_that_fails_is_ended_and_the_active_version_stays(store: Store, versions: Versions) -> None:
    versions.prepare[3] = fails
    with serving(store) as (address, roster):
        call(address, "/v1/models/net/canary", {"version": 3, "percent": 50})
        with traffic(address) as callers:
            until(lambda: "canary_ended" in kinds(store))
        assert callers.failed == 0
        until(lambda: versions.halves[3].closed)
        assert [loaded.number for loaded in roster.all()[0].loaded_versions()] == [1]
        assert store.live_number("net") == 1
        orders = json.loads((store.root / "models" / "net" / "rollout.json").read_text())
        assert orders["canary"] is None


@pytest.mark.slow
def test_a_version_put_back_by_hand_is_not_on_trial_against_the_one_it_replaces(
    store: Store, versions: Versions
) -> None:
    with serving(store) as (address, roster):
        call(address, "/v1/models/net/promote", {"version": 2})
        assert roster.all()[0].traffic.on_trial
        call(address, "/v1/models/net/rollback", {})
        assert not roster.all()[0].traffic.on_trial
        versions.halves[1].fault = RuntimeError("it fails as well")
        for _ in range(5):
            assert call(address, "/v2/models/net/infer", asked(0.5))[0] == 500
        assert roster.active("net") == "1"


@pytest.mark.slow
def test_what_waits_at_a_version_that_is_rolled_back_is_answered(store: Store, versions: Versions) -> None:
    with serving(store) as (address, roster):
        call(address, "/v1/models/net/promote", {"version": 2})
        hold_then_reject(address, roster)
        assert roster.active("net") == "1"


def hold_then_reject(address: str, roster: Roster) -> None:
    served = roster.all()[0]
    bad = served.traffic.stable
    roster.place.thread.hold()
    answered: list[str] = []
    callers = [threading.Thread(target=lambda: answered.append(infer(address))) for _ in range(4)]
    for caller in callers:
        caller.start()
    until(lambda: bad.waiting == 4)
    served.reject(bad, "a test says so", {})
    roster.place.thread.release()
    for caller in callers:
        caller.join(PATIENCE_S)
    assert answered == ["2"] * 4
