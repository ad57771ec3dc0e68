"""The unseen samples on which a conversion tries its plan: all of them where a claim is about plans, few elsewhere.

They are two fifths of a small model's conversion, and of one with a loop nearly all of it. The tests of plans, of the
gate, of back ends and of the corpus ask all of them, and so does every fresh interpreter that a test starts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from halfeven.exporters.plan import rehearsal

from tests.preloaded import FEW_UNSEEN

FOLDERS = (
    "chaos", "conformance", "models", "serve",
    *(f"exporters/{name}" for name in ("differing", "exported", "guessing", "half_files", "importing", "report")),
)  # fmt: skip
_ALL = rehearsal.UNSEEN, rehearsal.UNSEEN_ALONE
_FEW = FEW_UNSEEN, FEW_UNSEEN
_TESTS = Path(__file__).parent


def asks_few(item: pytest.Item) -> bool:
    """True for the tests of `FOLDERS`, and for those with the mark ``few_unseen``."""
    marked = item.get_closest_marker("few_unseen") is not None
    return marked or any(item.path.is_relative_to(_TESTS / folder) for folder in FOLDERS)


def set_unseen(few: bool) -> None:
    """Conversions of this process ask few unseen samples from now on, or all."""
    rehearsal.UNSEEN, rehearsal.UNSEEN_ALONE = _FEW if few else _ALL


@contextmanager
def unseen_samples(few: bool) -> Iterator[None]:
    """Conversions inside the block ask few, or all, whatever test it is in: what it makes is for several tests."""
    before = rehearsal.UNSEEN, rehearsal.UNSEEN_ALONE
    set_unseen(few)
    try:
        yield
    finally:
        rehearsal.UNSEEN, rehearsal.UNSEEN_ALONE = before
