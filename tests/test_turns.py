"""A run with ``--part``: every slow test has its turn, and what else is drawn by the seed has its turn beside it."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import slow
from tests.conftest import ROOT
from tests.patience import PATIENCE_S
from tests.turns import has_its_turn

SUITE = """
import pytest

def test_quick(): ...

@pytest.mark.slow
@pytest.mark.parametrize("case", range(5))
def test_slow(case): ...
"""


def of_a_run(folder: Path, seed: int, *options: str, every: str = "") -> list[str]:
    """The tests of a run, by what pytest calls them."""
    environment = {"HALFEVEN_TEST_CASES": str(seed), "HALFEVEN_TEST_SEED": "1", "HALFEVEN_EVERY_CASE": every}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-p",
        "tests.turns",
        "-o",
        "markers=slow",
    ]
    done = subprocess.run(
        [*command, "--rootdir", str(folder), *options, str(folder)],
        capture_output=True, text=True, timeout=PATIENCE_S, env=environment, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]


def test_a_run_has_a_part_of_the_slow_tests_and_another_run_has_the_others(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(SUITE)
    everything = ["test_quick", *(f"test_slow[{case}]" for case in range(5))]
    runs = [of_a_run(tmp_path, seed, "--part", "2") for seed in (0, 7)]
    assert all("test_quick" in run and len(run) < 5 for run in runs)
    assert {name for run in runs for name in run} == {*everything}
    assert of_a_run(tmp_path, 1) == of_a_run(tmp_path, 1, "--part", "2", every="1") == everything


@pytest.mark.parametrize("part", [2, 3, 8])
def test_a_case_that_is_drawn_itself_meets_the_turn_of_its_test(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow, "EVERY_CASE", False)
    met = set[int]()
    for seed in range(500):
        monkeypatch.setenv("HALFEVEN_TEST_CASES", str(seed))
        if has_its_turn("tests/test_it.py", 0, part):
            met.update(slow.drawn(8, range(8)))
    assert met == {*range(8)}
