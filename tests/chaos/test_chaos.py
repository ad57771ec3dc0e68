"""Faults of every kind, injected into real servers under load: no invariant is violated (`invariants.py`).

A few in every run of `make check`. ``HALFEVEN_FAULTS=200`` injects so many, of all kinds in turn, and prints how many
of each: about two seconds each on a calm machine.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from random import Random

import pytest

from tests.chaos import faults
from tests.chaos.servers import zygote
from tests.chaos.world import World
from tests.conftest import SEED
from tests.slow import FAULTS, turn

pytestmark = pytest.mark.slow  # real processes


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with zygote() as own:
        world = World(own, tmp_path_factory.mktemp("chaos"), SEED)
        yield world
        world.server.kill()


def few(among: Iterable[str], count: int) -> list[str]:
    """The names of ``count`` faults, others in another run; with ``HALFEVEN_FAULTS`` each in turn."""
    names = sorted(among)
    Random(turn()).shuffle(names)
    return list(itertools.islice(itertools.cycle(names), count))


def injected(world: World, among: dict[str, faults.Fault], count: int) -> None:
    seen, found = Counter[str](), list[str]()
    for name in few(among, count):
        world.recover()
        seen[name.partition(":")[0]] += 1
        new = [f"{name}: {one}" for one in among[name](world)]
        print("\n".join(new), end="\n" if new else "", flush=True)
        found += new
    print(
        f"{sum(seen.values())} faults, {len(found)} violations: {dict(sorted(seen.items()))}; {world.lost()}"
    )
    assert found == []


def test_what_was_acknowledged_survives_a_death_at_any_moment(world: World) -> None:
    injected(world, faults.kills(), FAULTS * 4 // 10 or 2)


def test_a_damaged_file_is_named_and_the_rest_is_served(world: World) -> None:
    injected(world, faults.damages(), FAULTS * 4 // 10 or 2)


def test_clocks_that_jump_and_clients_that_leave_disturb_nobody(world: World) -> None:
    injected(world, faults.others(), FAULTS // 10 or 1)


@pytest.mark.skipif(not faults.can_mount(), reason="this user may not mount a small file system to fill")
def test_a_full_disk_refuses_what_must_be_written_and_serves_the_rest(world: World) -> None:
    acts = few(faults.FULL, FAULTS // 10 or 1)
    found = list[str]()
    with faults.on_small_disk(world) as ballast:
        for name in acts:
            found += [f"{name}: {one}" for one in faults.full_disk(faults.FULL[name], world, ballast)]
    print(f"{len(acts)} faults, {len(found)} violations: {dict(Counter(acts))} on a full disk")
    assert found == []
