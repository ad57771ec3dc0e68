"""A part of a sweep is drawn anew by every seed: no case is left out for ever, and those of every run never."""

import pytest

from tests import slow


def of_a_run(monkeypatch: pytest.MonkeyPatch, seed: int) -> list[str]:
    monkeypatch.setenv("HALFEVEN_TEST_CASES", str(seed))
    found = slow.slow_part_but(3, {"b"}, list("abcdefgh"))
    assert [case for case in found if isinstance(case, str)] == ["b"], "the others are marked slow"
    return [case if isinstance(case, str) else case.values[0] for case in found]


def test_a_run_has_one_in_three_and_in_some_runs_every_case_is_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow, "EVERY_CASE", False)
    runs = [of_a_run(monkeypatch, seed) for seed in range(20)]
    assert {len(cases) for cases in runs} == {3, 4} and all("b" in cases for cases in runs)
    assert {case for cases in runs for case in cases} == set("abcdefgh")
    assert of_a_run(monkeypatch, 7) == runs[7], "the same seed, the same cases"


def test_the_fewer_of_a_sweep_are_among_the_more_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow, "EVERY_CASE", False)
    for seed in range(20):
        monkeypatch.setenv("HALFEVEN_TEST_CASES", str(seed))
        assert set(slow.drawn(4, "abcdefgh")) < set(slow.drawn(2, "abcdefgh")) < set("abcdefgh")


def test_by_turns_a_run_has_every_one_and_a_place_has_every_one_in_some_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slow, "EVERY_CASE", False)
    runs = list[str]()
    for seed in range(20):
        monkeypatch.setenv("HALFEVEN_TEST_CASES", str(seed))
        runs.append("".join(one for place in range(3) for one in slow.one_in_turn("xyz", place)))
    assert all(sorted(run) == list("xyz") for run in runs) and {run[0] for run in runs} == set("xyz")


def test_where_every_case_is_asked_for_none_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow, "EVERY_CASE", True)
    assert of_a_run(monkeypatch, 0) == list("abcdefgh")
    assert slow.drawn(4, "abc") == slow.one_in_turn("abc", 1) == "abc"
