"""Whoever causes it, each change of what answers is in the log and among the events."""

import logging

import pytest
from halfeven.models.errors import EngineFailed
from halfeven.models.store.store import Store
from halfeven.serve.versions.director import Director
from halfeven.serve.versions.orders import events

from tests.patience import until
from tests.serve.versions.traffic.conftest import Versions, serving


def kinds_of(store: Store) -> list[tuple[str, int | None]]:
    """Kind and version of each event, the oldest first."""
    return [(one["kind"], one["numbers"].get("version")) for one in reversed(events(store, "net"))]


@pytest.mark.slow
def test_a_version_that_becomes_active_by_the_store_is_told_with_its_precision_and_reason(
    store: Store, versions: Versions, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), serving(store) as (_, roster):
        store.promote(store.version("net", 2))  # as another process does
        roster.look()
        until(lambda: ("activated", 2) in kinds_of(store))
    first, *_, last = events(store, "net")[::-1]
    assert (first["kind"], first["numbers"]["version"]) == ("activated", 1)
    numbers = next(one for one in events(store, "net") if one["kind"] == "activated")["numbers"]
    assert numbers.keys() == {"version", "precision", "form", "device"} and last["model"] == "net"
    said = [one for one in caplog.records if getattr(one, "event", "") == "activated"]
    assert [one.getMessage().split(" is active")[0] for one in said] == ["net@1", "net@2"]
    assert ", in place of net@1" in said[1].getMessage()


@pytest.mark.slow
def test_a_start_that_changes_nothing_is_no_event(store: Store, versions: Versions) -> None:
    for _ in range(3):
        with serving(store):
            pass
    assert kinds_of(store).count(("activated", 1)) == 1


@pytest.mark.slow
def test_what_is_let_go_is_told(store: Store, versions: Versions) -> None:
    with serving(store) as (_, roster):
        Director(roster).canary("net", 2, 10.0)
        Director(roster).canary("net", None, 0.0)
        roster.tidy()
        until(lambda: any(kind == "retired" for kind, _ in kinds_of(store)))


@pytest.mark.slow
def test_a_version_that_cannot_be_made_ready_is_told(store: Store, versions: Versions) -> None:
    versions.refuse[2] = EngineFailed("net@2: the device has no memory for it")
    with serving(store) as (_, roster):
        store.promote(store.version("net", 2))
        roster.look()
        until(lambda: "not_ready" in [kind for kind, _ in kinds_of(store)])
    (event,) = [one for one in events(store, "net") if one["kind"] == "not_ready"]
    assert "no memory" in event["message"]
