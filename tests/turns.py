"""``pytest --part N``: the quick tests, and of the slow tests of each file one in N, which the run's seed draws.

In CI the commit draws them (`slow.py`), so that every slow test has its turn. A run without the option has them all,
and so has one with HALFEVEN_EVERY_CASE=1.
"""

import hashlib
from collections import Counter

import pytest

from tests.slow import EVERY_CASE, drawn_by


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part",
        type=int,
        default=1,
        metavar="N",
        help="of the slow tests of each file, run one in N by turns",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = 1 if EVERY_CASE else int(config.getoption("part") or 1)
    seen, has_turn, others = Counter[str](), list[pytest.Item](), list[pytest.Item]()
    for item in items:
        file, is_slow = item.nodeid.partition("::")[0], item.get_closest_marker("slow") is not None
        (has_turn if not is_slow or has_its_turn(file, seen[file], part) else others).append(item)
        seen[file] += is_slow
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = has_turn


def has_its_turn(file: str, place: int, part: int) -> bool:
    """True if the slow test at this ``place`` of the file is one of this run's.

    Not drawn by a checksum as `slow.turn` is: then a case that `slow.drawn` chooses with the first half of the numbers
    would never meet the second half here.
    """
    first = int.from_bytes(hashlib.sha256(f"{drawn_by()} {file}".encode()).digest()[:8])
    return (first + place) % part == 0
