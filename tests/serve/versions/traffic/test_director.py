"""Orders, given to the director directly. The store's writer is the test's: it does what another thread could do while
an order is carried out."""

import asyncio
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from halfeven.models.errors import DamagedFile, DiskFull, EngineFailed, NotReady, StoreUnusable
from halfeven.models.store.store import Store
from halfeven.serve.batching.device import DeviceThread
from halfeven.serve.batching.place import Place
from halfeven.serve.versions.director import Director
from halfeven.serve.versions.orders import TrafficOrders, events, read_orders
from halfeven.serve.versions.roster import Roster
from halfeven.serve.versions.store_writer import StoreWriter
from halfeven.serve.versions.traffic.served import ServedModel

from tests.patience import PATIENCE_S, until
from tests.serve.versions.traffic.conftest import Versions, attached, publish, spec


class Writer(StoreWriter):
    """``meanwhile`` is called before a version is promoted; ``full``: the disk, when the alias is to be put back."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.meanwhile: Callable[[], object] = lambda: None
        self.full = False

    def promote(self, name: str, number: int) -> None:
        self.meanwhile()
        super().promote(name, number)

    def put_back(self, name: str, bad: int, good: int) -> None:
        if self.full:
            raise DiskFull("no space left")
        super().put_back(name, bad, good)


@pytest.fixture
def writer(store: Store) -> Writer:
    return Writer(store)


@pytest.fixture
def roster(store: Store, versions: Versions, writer: Writer) -> Iterator[Roster]:
    """A roster that follows when the test says so."""
    thread = DeviceThread("cpu")
    thread.start()
    made = Roster(store, Place(torch.device("cpu"), thread), None, writer)
    made.look()
    yield made
    thread.stop(10)


def served(roster: Roster) -> ServedModel:
    found = roster.served("net")
    assert found is not None
    return found


def answering(roster: Roster, width: int = 4, rows: int = 1) -> str:
    """The version that answers one request."""

    async def ask() -> str:
        return (await served(roster).submit([np.ones((rows, width), np.float32)], rows)).prepared.version

    return asyncio.run(ask())


def on_another_thread(deed: Callable[[], object]) -> None:
    thread = threading.Thread(target=deed)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("tidied", [False, True])
def test_a_previous_version_whose_time_is_up_while_it_is_promoted_is_not_closed(
    roster: Roster, writer: Writer, versions: Versions, tidied: bool
) -> None:
    director = Director(roster)
    director.promote("net", 2)

    def time_is_up() -> None:
        served(roster).let_previous_go()
        if tidied:
            on_another_thread(roster.tidy)

    writer.meanwhile = time_is_up
    director.promote("net", 1)
    assert answering(roster) == "1"
    assert not versions.halves[1].closed and versions.loads[1] == 1
    served(roster).let_previous_go()
    roster.tidy()
    assert versions.halves[2].closed, "what has no role any more still goes"


def test_a_version_with_other_inputs_ends_the_canary_and_the_shadow_and_is_on_no_trial(
    store: Store, roster: Roster, versions: Versions
) -> None:
    director = Director(roster)
    director.canary("net", 2, 100.0)
    director.shadow("net", 3, 100.0)
    assert answering(roster) == "2"
    versions.prepare[4] = lambda engine: setattr(engine, "fault", RuntimeError("it fails"))
    wider = publish(store, of=spec(width=5))
    director.promote("net", wider.number)
    with pytest.raises(EngineFailed, match="it fails"):
        answering(roster, width=5)
    assert versions.halves[1].runs == 0, "the previous version has other inputs"
    versions.halves[4].fault = None
    assert answering(roster, width=5) == "4"
    assert versions.halves[2].closed and versions.halves[3].closed
    until(lambda: read_orders(store, "net") == TrafficOrders())


def test_a_rejected_version_that_the_store_still_names_is_not_followed_again_when_another_is_published(
    store: Store, roster: Roster, writer: Writer
) -> None:
    Director(roster).promote("net", 2)
    writer.full = True
    served(roster).reject(served(roster).traffic.stable, "it failed", {})
    until(lambda: "rolled_back" in [event["kind"] for event in events(store, "net", 5)])
    publish(store, awaits_promotion=True, gate={"passed": True})
    roster.look()
    assert (store.live_number("net"), answering(roster)) == (2, "1")
    store.promote(store.version("net", 3))
    roster.look()
    assert answering(roster) == "3"


def test_an_order_that_cannot_be_written_leaves_no_loaded_version_behind(
    store: Store, roster: Roster, writer: Writer, versions: Versions
) -> None:
    before = attached(roster)
    (store.root / "models" / "net" / "rollout.json").write_text("{")
    with pytest.raises(DamagedFile):
        Director(roster).canary("net", 3, 10.0)
    assert versions.halves[3].closed and versions.originals[3].closed

    def unreachable() -> None:
        raise StoreUnusable("the store's writer does not answer")

    writer.meanwhile = unreachable
    with pytest.raises(StoreUnusable):
        Director(roster).promote("net", 2)
    assert versions.halves[2].closed and versions.originals[2].closed
    assert attached(roster) == before
    assert answering(roster) == "1"


def test_a_version_that_is_loaded_and_cannot_become_active_is_closed(
    store: Store, roster: Roster, versions: Versions
) -> None:
    before = attached(roster)
    (store.version("net", 2).folder / "parity.json").write_text("{")
    store.promote(store.version("net", 2))
    roster.look()
    assert roster.fault("net", 2) is not None
    assert versions.halves[2].closed and attached(roster) == before
    with pytest.raises(DamagedFile):
        roster.load("net")
    assert versions.halves[2].closed and attached(roster) == before
    assert answering(roster) == "1"


def test_a_load_after_an_unload_goes_on_with_the_canary_and_the_shadow(roster: Roster) -> None:
    director = Director(roster)
    director.canary("net", 2, 100.0)
    director.shadow("net", 3, 5.0)
    roster.unload("net")
    roster.load("net")
    assert answering(roster) == "2"
    labels = {one["label"]: one["version"] for one in director.describe("net")["loaded"]}
    assert labels == {"stable": 1, "canary": 2, "shadow": 3}


def test_a_version_that_the_alias_names_already_is_loaded_when_it_is_promoted(
    roster: Roster, versions: Versions
) -> None:
    director = Director(roster)
    roster.unload("net")
    promoted = director.promote("net", 1)
    assert [one["version"] for one in promoted["loaded"]] == [1]
    assert answering(roster) == "1"
    roster.unload("net")
    versions.refuse[2] = EngineFailed("it does not run here")
    with pytest.raises(NotReady, match="does not run here"):
        director.promote("net", 2)
    del versions.refuse[2]
    director.promote("net", 2)
    assert answering(roster) == "2"


def test_a_request_that_is_run_in_parts_goes_to_the_canary_too(roster: Roster) -> None:
    Director(roster).canary("net", 2, 100.0)
    rows = served(roster).spec.max_batch_size + 1
    assert answering(roster, rows=rows) == "2"
