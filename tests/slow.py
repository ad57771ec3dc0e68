"""Cases of one claim: some in every run, the others marked ``slow``, so that only ``make check`` has them."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow_but(fast: Container[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases for ``pytest.mark.parametrize``; a case of several arguments is a tuple."""
    return [case if case in fast else _slow(case) for case in cases]


def slow_but_every(step: int, cases: Iterable[Any]) -> list[Any]:
    """The first case and every ``step``-th after it in every run."""
    return [_slow(case) if place % step else case for place, case in enumerate(cases)]


def _slow(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
