"""Two replicas over copies of one store: an order to one, or its own decision, is followed by the other."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from halfeven.models.errors import NotReady
from halfeven.models.store.store import Store
from halfeven.serve.batching.device import DeviceThread
from halfeven.serve.batching.place import Place
from halfeven.serve.versions.director import Director
from halfeven.serve.versions.following import Following
from halfeven.serve.versions.orders import TrafficOrder, events, read_orders
from halfeven.serve.versions.roster import Roster
from halfeven.serve.versions.store_copy import StoreCopy
from halfeven.serve.versions.store_writer import Role, StoreWriter
from halfeven.serve.versions.traffic.served import ServedModel

from tests.patience import until
from tests.serve.versions.traffic.conftest import Versions, kinds


class Writer(StoreWriter):
    """The one writer as a replica sees it: its copy follows each order. ``away``: the writer does not answer."""

    def __init__(self, store: Store, copy: StoreCopy) -> None:
        super().__init__(store)
        self._copy, self.away = copy, False

    def promote(self, name: str, number: int) -> None:
        super().promote(name, number)
        self._copy.follow()

    def roll_back(self, name: str) -> int:
        number = super().roll_back(name)
        self._copy.follow()
        return number

    def end_share(self, name: str, role: Role, number: int) -> None:
        if self.away:
            raise NotReady("the store's writer does not answer")
        super().end_share(name, role, number)


class Replica(NamedTuple):
    """A replica that follows when the test says so."""

    roster: Roster
    following: Following
    writer: Writer

    @property
    def served(self) -> ServedModel:
        served = self.roster.served("net")
        assert served is not None
        return served

    @property
    def active(self) -> int:
        return self.served.traffic.stable.number

    @property
    def canary(self) -> tuple[int, float] | None:
        traffic = self.served.traffic
        return traffic.canary and (traffic.canary.number, traffic.canary_percent)

    def look(self) -> None:
        self.following.look()
        self.roster.look()


@pytest.fixture
def replicas(store: Store, versions: Versions, tmp_path: Path) -> Iterator[tuple[Replica, Replica]]:
    made = list[Replica]()
    for name in ("one", "other"):
        copy = StoreCopy(str(store.root), tmp_path / name)
        copy.follow()
        thread = DeviceThread("cpu")
        thread.start()
        writer = Writer(store, copy)
        roster = Roster(copy.store, Place(torch.device("cpu"), thread), None, writer)
        roster.look()
        made.append(Replica(roster, Following(copy, roster), writer))
    yield made[0], made[1]
    for replica in made:
        replica.roster.place.thread.stop(10)


def test_a_promotion_and_a_rollback_reach_the_other_replica(replicas: tuple[Replica, Replica]) -> None:
    one, other = replicas
    Director(one.roster).promote("net", 2)
    assert (one.active, other.active) == (2, 1)
    other.look()
    assert other.active == 2
    Director(other.roster).roll_back("net")
    for replica in replicas:
        replica.look()
        assert replica.active == 1


def test_a_canary_that_becomes_active_by_a_rollback_is_ordered_no_more(
    store: Store, replicas: tuple[Replica, Replica]
) -> None:
    one, other = replicas
    Director(one.roster).promote("net", 2)
    Director(one.roster).canary("net", 1, 25.0)
    Director(one.roster).roll_back("net")
    other.look()
    assert read_orders(store, "net").canary is None
    assert (one.active, one.canary, other.active, other.canary) == (1, None, 1, None)


@pytest.mark.slow
def test_a_canary_reaches_the_other_replica_and_one_that_starts_later(
    replicas: tuple[Replica, Replica],
) -> None:
    one, other = replicas
    Director(one.roster).canary("net", 3, 25.0)
    other.look()
    assert one.canary == other.canary == (3, 25.0)
    Director(other.roster).canary("net", 3, 50.0)
    one.look()
    assert one.canary == (3, 50.0)
    Director(one.roster).canary("net", None, 0.0)
    other.look()
    assert other.canary is None


def test_a_canary_that_a_replica_cannot_load_is_said_and_its_shadow_is_loaded_all_the_same(
    store: Store, versions: Versions, replicas: tuple[Replica, Replica]
) -> None:
    one, other = replicas
    Director(one.roster).canary("net", 3, 25.0)
    Director(one.roster).shadow("net", 2, 5.0)
    versions.refuse[3] = NotReady("no memory")
    other.look()
    assert other.canary is None and other.served.traffic.shadow is not None
    assert "net@3 was ordered as a canary or shadow and could not be loaded: no memory" in str(
        events(store, "net")
    )


@pytest.mark.slow
def test_a_canary_that_one_replica_ends_is_ended_on_the_other(
    store: Store, replicas: tuple[Replica, Replica]
) -> None:
    one, other = replicas
    Director(one.roster).canary("net", 3, 25.0)
    other.look()
    one.served.reject(one.served.loaded("3"), "it failed", {})
    until(lambda: "canary_ended" in kinds(store))
    for replica in replicas:
        replica.look()
        assert replica.canary is None


@pytest.mark.slow
def test_a_canary_stays_ended_where_it_failed_although_the_writer_is_away(
    store: Store, replicas: tuple[Replica, Replica]
) -> None:
    one, other = replicas
    Director(other.roster).canary("net", 3, 25.0)
    one.look()
    one.writer.away = True
    one.served.reject(one.served.loaded("3"), "it failed", {})
    until(lambda: "canary_ended" in kinds(store))
    one.look()
    assert one.canary is None and other.canary == (3, 25.0)
    (ended,) = [event for event in events(store, "net") if event["kind"] == "canary_ended"]
    assert "the order is still in the store (the store's writer does not answer)" in ended["message"]


def test_a_canary_that_was_ordered_meanwhile_is_not_ended_by_the_fault_of_another(store: Store) -> None:
    writer = StoreWriter(store)
    writer.order("net", "canary", 2, 10.0)
    writer.end_share("net", "canary", 3)
    assert read_orders(store, "net").canary == TrafficOrder(2, 10.0)


@pytest.mark.slow
def test_a_version_that_fails_its_trial_on_one_replica_is_rolled_back_on_both(
    store: Store, replicas: tuple[Replica, Replica]
) -> None:
    one, other = replicas
    Director(one.roster).promote("net", 2)
    other.look()
    one.served.reject(one.served.loaded("2"), "it failed", {})
    until(lambda: "rolled_back" in kinds(store))
    for replica in replicas:
        replica.look()
        assert replica.active == 1


def test_a_half_that_drifts_on_one_replica_is_replaced_by_its_original_on_both(
    store: Store, replicas: tuple[Replica, Replica]
) -> None:
    one, other = replicas
    one.served.drifted(one.served.traffic.stable, {"recent_over": 5, "recent": 50})
    other.look()
    for replica in replicas:
        assert replica.served.prepared.precision == "fp32"
        assert "5 of the last 50 live requests" in replica.served.prepared.reason


def test_whatever_the_library_of_the_store_raises_the_next_look_follows(
    replicas: tuple[Replica, Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not every library of fsspec raises an OSError where a connection is lost."""
    one, other = replicas
    Director(one.roster).promote("net", 2)
    files = type(other.following._copy._fs)
    with monkeypatch.context() as lost:
        lost.setattr(files, "ls", lambda *_, **__: [][1])
        other.following.look()
        other.following.look_at_keys()
        assert other.active == 1
    other.look()
    assert other.active == 2


def test_a_revoked_key_waits_for_no_version_that_is_made_ready(
    replicas: tuple[Replica, Replica], store: Store
) -> None:
    _, other = replicas
    keys = other.roster.store.root / "keys.json"
    with other.following._copy._working:  # a version of many gigabytes is being copied
        (store.root / "keys.json").write_text("{}")
        other.following.look_at_keys()
        assert keys.read_text() == "{}"
