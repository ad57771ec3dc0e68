"""Canary, shadow, promote and rollback over real HTTP; what was ordered outlives the server."""

import time
from typing import Any

import numpy as np
import pytest
from halfeven.models.errors import EngineFailed
from halfeven.models.store.store import REFUSED, Store
from halfeven.serve.versions.traffic.split import Sticky

from tests.patience import until
from tests.serve.plain_request import get
from tests.serve.versions.traffic.conftest import (
    Engine,
    Versions,
    attached,
    call,
    infer,
    publish,
    serving,
    spec,
)


def order(address: str, verb: str, **asked: Any) -> Any:
    status, answer = call(address, f"/v1/models/net/{verb}", asked)
    assert status == 200, answer
    return answer


def refusal(address: str, verb: str, **asked: Any) -> tuple[int, str]:
    status, answer = call(address, f"/v1/models/net/{verb}", asked)
    return status, answer["detail"]


@pytest.mark.slow
def test_a_canary_answers_its_share_and_always_the_same_ids(store: Store, versions: Versions) -> None:
    with serving(store) as (address, _):
        reply = order(address, "canary", version=3, percent=30)
        assert [(one["version"], one["label"], one["percent"]) for one in reply["loaded"]] == [
            (1, "stable", 70.0),
            (3, "canary", 30.0),
        ]
        ids = [f"caller-{i}" for i in range(40)]
        share = Sticky(0.3, "net@3")
        wanted = ["3" if share.takes(id) else "1" for id in ids]
        assert {"1", "3"} == set(wanted)
        assert [infer(address, id=id) for id in ids] == wanted
        assert [infer(address, id=id) for id in ids] == wanted
        spread = [infer(address) for _ in range(40)]
        assert abs(spread.count("3") - 12) <= 2
        assert infer(address, version="canary") == "3"
        assert 'halfeven_canary_percent{model="net",version="3"} 30.0' in call(address, "/metrics")[1]
        ended = order(address, "canary")
        assert [one["label"] for one in ended["loaded"]] == ["stable"]
        assert versions.halves[3].closed
        assert {infer(address, id=id) for id in ids} == {"1"}


@pytest.mark.slow
def test_a_promoted_canary_is_not_loaded_again_and_the_previous_version_stands_by(
    store: Store, versions: Versions
) -> None:
    with serving(store) as (address, _):
        order(address, "canary", version=3, percent=10)
        reply = order(address, "promote", version=3)
        assert store.live_number("net") == 3
        assert {one["version"]: one["label"] for one in reply["loaded"]} == {3: "stable", 1: "previous"}
        assert infer(address) == "3"
        status, answer = call(address, "/v1/models/net/rollback", {})
        assert (status, answer["version"]) == (200, 2), "the newest live version before"
        assert infer(address) == "2"
        order(address, "promote", version=3)
        assert infer(address) == "3"
        assert dict(versions.loads) == {1: 1, 2: 1, 3: 1}
        found = [event["kind"] for event in call(address, "/v1/models/net/events")[1]["events"]]
        kinds = [kind for kind in found if kind not in ("activated", "retired")]
        assert kinds == ["promoted", "rolled_back_by_hand", "promoted", "canary"]


@pytest.mark.slow
def test_the_previous_version_goes_when_its_time_is_up(store: Store, versions: Versions) -> None:
    with serving(store, keep_previous_seconds=0.5) as (address, roster):
        began = time.monotonic()
        order(address, "promote", version=2)
        until(lambda: versions.halves[1].closed)
        assert time.monotonic() - began >= 0.5
        assert [one["label"] for one in call(address, "/v1/models/net")[1]["loaded"]] == ["stable"]
        assert attached(roster) == 2


@pytest.mark.slow
def test_orders_outlive_the_server(store: Store, versions: Versions) -> None:
    with serving(store) as (address, _):
        order(address, "canary", version=3, percent=30)
        order(address, "shadow", version=2, percent=50)
    with serving(store) as (address, _):
        loaded = call(address, "/v1/models/net")[1]["loaded"]
        assert {one["label"]: (one["version"], one["percent"]) for one in loaded} == {
            "stable": (1, 70.0), "canary": (3, 30.0), "shadow": (2, 0.0),
        }  # fmt: skip
        assert loaded[2]["shadow"]["percent"] == 50
        order(address, "promote", version=3)
    with serving(store) as (address, _):
        loaded = call(address, "/v1/models/net")[1]["loaded"]
        assert {one["label"]: one["version"] for one in loaded} == {"stable": 3, "shadow": 2}


@pytest.mark.slow
def test_orders_that_cannot_be_are_refused_and_change_nothing(store: Store, versions: Versions) -> None:
    publish(store, REFUSED)
    publish(store, of=spec(width=5))
    with serving(store) as (address, roster):
        assert refusal(address, "canary", version=9, percent=10)[0] == 404
        assert refusal(address, "canary", version=3, percent="10") == (
            400,
            "percent = '10': expected a number from 0 to 100",
        )
        assert "version = 'x': expected" in refusal(address, "canary", version="x", percent=10)[1]
        assert "active: a canary is another version" in refusal(address, "canary", version=1, percent=10)[1]
        assert refusal(address, "canary", version=4, percent=10)[0] >= 400
        assert "other inputs or outputs" in refusal(address, "shadow", version=5, percent=10)[1]
        for asked in (
            {"version": 3},
            {"version": 3, "percent": 101},
            {"version": "x", "percent": 1},
            {"percents": 1},
        ):
            assert refusal(address, "canary", **asked)[0] == 400
        for beyond in (f'"percent": {10**400}', f'"percent": 10, "version": {10**300}'):
            body = f'{{"version": NaN, "version": 3, {beyond}}}'
            assert get(address, "/v1/models/net/canary", body.encode())[0] == 400
        assert refusal(address, "promote")[0] == 400
        assert "was refused by the parity gate" in refusal(address, "promote", version=4)[1]
        versions.refuse[3] = EngineFailed("does not run here")
        assert "does not run here" in refusal(address, "canary", version=3, percent=10)[1]
        assert "does not run here" in refusal(address, "promote", version=3)[1]
        assert store.live_number("net") == 1
        assert [loaded.number for loaded in roster.all()[0].loaded_versions()] == [1]
        assert not (store.root / "models" / "net" / "rollout.json").exists()
        for verb, more in (("promote", {}), ("canary", {"percent": 1}), ("shadow", {"percent": 1})):
            assert call(address, f"/v1/models/nobody/{verb}", {"version": 1} | more)[0] == 404


@pytest.mark.slow
def test_a_shadow_is_asked_what_was_answered_and_its_differences_are_told(
    store: Store, versions: Versions
) -> None:
    def tilted(engine: Engine) -> None:
        # Another first choice, by 0.1 of S.
        engine.change = lambda y: y + np.array([0.0, 0.0, 0.0, 0.1], np.float32)

    versions.prepare[2] = tilted
    with serving(store) as (address, roster):
        order(address, "shadow", version=2, percent=50)
        for _ in range(20):
            assert infer(address) == "1"
        served = roster.all()[0]
        until(lambda: served.shadow is not None and served.shadow.numbers()["compared"] == 10)
        assert versions.halves[2].rows == 10
        seen = call(address, "/v1/models/net")[1]["loaded"][1]["shadow"]
        assert seen["version"] == 2
        assert seen["failed"] == seen["dropped"] == 0
        assert seen["outputs"]["y"]["flipped"] == seen["outputs"]["y"]["decisions"] == 10
        assert seen["outputs"]["y"]["histogram_u"]["256.0"] == 10, "0.1 of S is 205 u·S"
        metrics = call(address, "/metrics")[1]
        assert 'halfeven_shadow_u_bucket{le="64",model="net",output="y",version="2"} 0.0' in metrics
        assert 'halfeven_shadow_flipped_total{model="net",output="y",version="2"} 10.0' in metrics
        order(address, "shadow", version=2, percent=0)
        assert versions.halves[2].closed


@pytest.mark.slow
def test_a_shadow_that_fails_or_is_busy_is_counted_and_harms_nobody(store: Store, versions: Versions) -> None:
    versions.prepare[2] = lambda engine: setattr(engine, "fault", RuntimeError("no"))
    with serving(store) as (address, roster):
        order(address, "shadow", version=2, percent=100)
        for _ in range(5):
            assert infer(address) == "1"
        served = roster.all()[0]
        until(lambda: served.shadow is not None and served.shadow.comparator.failed == 5)
        assert served.shadow is not None
        served.shadow.comparator._begun += 16  # as if so many were on their way
        for _ in range(3):
            assert infer(address) == "1"
        until(lambda: served.shadow is not None and served.shadow.comparator.dropped == 3)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["canary", "shadow"])
def test_a_active_version_is_no_canary_or_shadow_any_more(
    store: Store, versions: Versions, verb: str
) -> None:
    with serving(store) as (address, _):
        order(address, verb, version=2, percent=50)
        store.promote(store.version("net", 2))
        until(lambda: call(address, "/v1/models/net")[1]["loaded"][0]["version"] == 2)
        loaded = call(address, "/v1/models/net")[1]["loaded"]
        assert [(one["version"], one["label"]) for one in loaded] == [(2, "stable"), (1, "previous")]
        assert versions.loads[2] == 1
