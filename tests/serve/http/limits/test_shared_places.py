"""A bound that all callers share leaves a place for another key, however greedy the others are."""

import pytest
from halfeven.models.errors import KeyLimitReached, Overloaded
from halfeven.serve.http.limits.shared_places import SharedPlaces, TakenPlace, may_hold


def filled(places: SharedPlaces, owner: str) -> list[TakenPlace]:
    """The places that the owner gets, as many as are given."""
    taken = list[TakenPlace]()
    try:
        while True:
            taken.append(places.take(owner))
    except Overloaded:
        return taken


def places(most: int) -> SharedPlaces:
    return SharedPlaces(most, "streams are open", "come again", 3.0)


def test_without_keys_the_bound_is_that_of_all() -> None:
    shared = places(10)
    assert len(filled(shared, "")) == 10
    with pytest.raises(Overloaded, match=r"^10 streams are open; come again$"):
        shared.take("")


@pytest.mark.parametrize("most", [8, 100, 1000])
def test_greedy_keys_one_after_the_other_leave_a_place_for_the_next(most: int) -> None:
    shared = places(most)
    for key in range(3):
        assert filled(shared, f"key {key}"), key
        assert shared.count < most
    with pytest.raises(KeyLimitReached, match=r"are this key's.*come again") as refused:
        shared.take("key 0")
    assert refused.value.retry_after_s == 3.0


def test_one_key_has_half_of_the_places_and_gets_a_place_that_it_gives_back() -> None:
    shared = places(100)
    taken = filled(shared, "one")
    assert len(taken) == 50
    taken[0].leave()
    taken[0].leave()
    assert shared.count == 49
    with shared.take("one"):
        assert shared.count == 50
    for place in taken:
        place.leave()
    assert shared.count == 0 and not shared._held


def test_a_small_part_is_refused_where_nothing_is_free() -> None:
    assert not may_hold(1, 0, 10, 10, "") and not may_hold(1, 0, 10, 10, "key")
    assert may_hold(5, 0, 5, 10, "") and may_hold(5, 0, 5, 10, "key") and not may_hold(5, 1, 5, 10, "key")
