"""Errors planted in our own functions: one place of a function's source is changed, wherever it is imported."""

import gc
import inspect
import textwrap
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest


def plant(monkeypatch: pytest.MonkeyPatch, function: Any, old: str, new: str, **names: Any) -> None:
    """Run ``function`` (or a property) from now on with ``old``, which its source has once, as ``new``. ``names`` are
    added to its globals."""
    function = function.fget if isinstance(function, property) else function
    assert isinstance(function, FunctionType)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"the planted error no longer fits {function.__qualname__}: {old}"
    for name, value in names.items():
        monkeypatch.setitem(function.__globals__, name, value)
    made: dict[str, Any] = {}
    exec(compile(source.replace(old, new), inspect.getfile(function), "exec"), function.__globals__, made)
    changed = made[function.__name__]
    changed = getattr(changed, "fget", changed)
    monkeypatch.setattr(function, "__code__", changed.__code__)


def broken(claim: Callable[[], object]) -> bool:
    """True if a claim does not hold: it raises."""
    try:
        claim()
    except (Exception, pytest.fail.Exception):
        pass
    else:
        return False
    # A claim that ends early leaves answers that nobody took, and asyncio logs each when it is collected. In Python
    # 3.11 that fails another test, if it happens while that one parses source (python/cpython#106905).
    gc.collect()
    return True
