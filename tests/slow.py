"""Cases of one claim: some in every run, the others marked ``slow``, so that ``make test`` leaves them out. Of long
sweeps a run has a part of those, which its seed draws: every case has its turn, and HALFEVEN_EVERY_CASE=1 runs all.
"""

import os
import zlib
from collections.abc import Collection, Container, Iterable, Sequence
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")
EVERY_CASE = bool(os.environ.get("HALFEVEN_EVERY_CASE"))
# So many random deaths of each process; 20 take a quarter of an hour or more.
KILLS = int(os.environ.get("HALFEVEN_KILLS", "0"))
# So many mutated inputs of all readers together; 1,000,000 take minutes.
FUZZED = int(os.environ.get("HALFEVEN_FUZZ", "3000"))
FAULTS = int(os.environ.get("HALFEVEN_FAULTS", "0"))  # injected faults; 200 take a quarter of an hour or more


def slow_but(fast: Container[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases for ``pytest.mark.parametrize``; a case of several arguments is a tuple."""
    return [case if case in fast else _slow(case) for case in cases]


def slow_part_but(part: int, fast: Container[Any], cases: Collection[Any]) -> list[Any]:
    """The cases as `slow_but` marks them, with one in ``part`` of the slow cases: those of another seed are others."""
    some = drawn(part, [case for case in cases if case not in fast])
    return slow_but(fast, [case for case in cases if case in fast or case in some])


def drawn(part: int, cases: Sequence[Case]) -> Sequence[Case]:
    """One in ``part`` of the cases. Where one part is a multiple of another, the fewer ones are among the more."""
    return cases if EVERY_CASE else cases[turn() % part :: part]


def one_in_turn(cases: Sequence[Case], place: int) -> Sequence[Case]:
    """One of the cases, for the next place and for another seed another one; all where every case is asked for."""
    return cases if EVERY_CASE else [cases[(turn() + place) % len(cases)]]


def turn() -> int:
    """The number that the run's seed draws; in CI, whose seed stays, that of the commit."""
    return zlib.crc32(drawn_by().encode())


def drawn_by() -> str:
    """The commit in CI, the run's seed elsewhere."""
    return os.environ.get("HALFEVEN_TEST_CASES") or os.environ["HALFEVEN_TEST_SEED"]


def by_name(case: Any) -> Any:
    """A case that takes many minutes: only where every case is asked for."""
    reason = "takes many minutes: asked for by name, HALFEVEN_EVERY_CASE=1"
    return pytest.param(case, marks=[pytest.mark.slow, pytest.mark.skipif(not EVERY_CASE, reason=reason)])


def _slow(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
