"""The unseen samples on which a conversion tries its plan: all 4,096 where a claim is about plans, few elsewhere.

They are four fifths of a small model's conversion, and of one with a loop nearly all of it. The tests of plans, of the
gate, of back ends and of the corpus ask all of them, and so does whatever a test starts in a process of its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from halfeven.exporters.plan import rehearsal

FEW = 128
MARK = "few_unseen"
FOLDERS = (
    "chaos", "conformance", "models", "serve",
    *(f"exporters/{name}" for name in ("differing", "exported", "guessing", "half_files", "importing", "report")),
)  # fmt: skip
_NAMES = ("UNSEEN", "UNSEEN_ALONE")
_ALL = {name: getattr(rehearsal, name) for name in _NAMES}
_TESTS = Path(__file__).parent


def asks_few(item: pytest.Item) -> bool:
    """True for the tests of `FOLDERS`, and for those with the mark ``few_unseen``."""
    return item.get_closest_marker(MARK) is not None or any(
        item.path.is_relative_to(_TESTS / folder) for folder in FOLDERS
    )


def set_unseen(few: bool) -> None:
    """Conversions of this process ask few unseen samples from now on, or all."""
    for name in _NAMES:
        setattr(rehearsal, name, FEW if few else _ALL[name])


@contextmanager
def unseen_samples(few: bool) -> Iterator[None]:
    """Conversions inside the block ask few, or all, whatever test it is in: what it makes is for several tests."""
    before = {name: getattr(rehearsal, name) for name in _NAMES}
    set_unseen(few)
    try:
        yield
    finally:
        for name, count in before.items():
            setattr(rehearsal, name, count)
