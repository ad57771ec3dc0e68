"""The batch sizes that once ran out of memory are remembered."""

import json
import logging
import sys
from pathlib import Path

import pytest
from halfeven.serve.batching.ceiling import Ceiling
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), max_size=20), st.integers(0, 60))
def test_a_size_is_limited_by_everything_no_larger_that_ever_failed(
    failed: list[tuple[int, int]], size: int
) -> None:
    ceiling = Ceiling()
    for row_elements, rows in failed:
        ceiling.lower(row_elements, rows)
    assert ceiling.rows(size) == min((r for b, r in failed if b <= size), default=sys.maxsize)
    assert ceiling.smallest == min((r for _, r in failed), default=0)


def test_it_is_kept_in_a_file_that_people_can_read_and_delete(tmp_path: Path) -> None:
    path = tmp_path / "tuned" / "ceiling-cuda-0.json"
    Ceiling(path).lower(16, 8)
    Ceiling(path).lower(900, 4)
    again = Ceiling(path)
    assert (again.rows(16), again.rows(900), again.rows(8)) == (8, 4, sys.maxsize)
    assert json.loads(path.read_text())["ceilings"][0] == {"row_elements": 16, "rows": 8}
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    path.unlink()
    assert Ceiling(path).smallest == 0


def test_what_was_only_measured_is_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "ceiling.json"
    ceiling = Ceiling(path)
    ceiling.lower(16, 8, keep=False)
    assert ceiling.rows(16) == 8 and not path.exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"ceilings": [{"rows": 3}]}',
        '{"ceilings": [3]}',
        '{"x": 1}',
        '{"ceilings": [{"row_elements": 1e999, "rows": 1}]}',
    ],
)
def test_a_damaged_file_is_named_and_left_aside(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "ceiling.json"
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert Ceiling(path).smallest == 0
    assert str(path) in caplog.text


def test_a_disk_that_takes_nothing_costs_the_memory_of_it_and_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tuned").write_text("a file where the folder should be")
    ceiling = Ceiling(tmp_path / "tuned" / "ceiling.json")
    ceiling.lower(16, 8)
    assert ceiling.rows(16) == 8 and "could not be kept" in caplog.text and "Traceback" not in caplog.text
