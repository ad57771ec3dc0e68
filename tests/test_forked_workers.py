"""Every test is run once by some worker, and pytest says of it what it says without workers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked_workers import Deal, expected_seconds

ROOT = Path(__file__).resolve().parent.parent


def dealt(deal: Deal, order: str) -> dict[str, list[int]]:
    """The tests that each worker is given, a letter a worker, in this order."""
    given: dict[str, list[int]] = {worker: [] for worker in order}
    for worker in order:
        if (place := deal.next(worker)) is not None:
            given[worker].append(place)
    return given


def test_a_worker_stays_with_its_group_and_the_longest_group_goes_first() -> None:
    deal = Deal(["a", "b", "a", "b", "c"], set(), [1, 2, 1, 2, 9])
    assert dealt(deal, "xyyxx") == {"x": [4, 0, 2], "y": [1, 3]}


def test_a_worker_without_a_group_takes_the_later_half_of_the_longest_file() -> None:
    deal = Deal(["long"] * 7 + ["short"] * 2, set(), [1] * 9)
    assert dealt(deal, "xyzzzxxx") == {"x": [0, 1, 2, 3], "y": [7], "z": [4, 5, 6]}


def test_no_worker_takes_a_part_of_a_group_that_is_to_stay_together() -> None:
    deal = Deal(["model"] * 4, {"model"}, [1] * 4)
    assert dealt(deal, "xyyxxxx") == {"x": [0, 1, 2, 3], "y": []}


@pytest.mark.parametrize("whole", [set[str](), {"0", "1", "2", "3"}], ids=["parted", "together"])
def test_every_test_is_given_once(whole: set[str], random) -> None:
    groups = [str(group) for group in random.integers(0, 12, 200)]
    deal = Deal(groups, whole, list(random.random(200)))
    given = dealt(deal, "".join(random.choice(list("wxyz"), 3000)))
    assert sorted(place for places in given.values() for place in places) == list(range(200))


def test_what_a_lost_worker_did_not_begin_is_given_to_others() -> None:
    deal = Deal(["a"] * 4, {"a"}, [1] * 4)
    first, second = deal.next("x"), deal.next("x")
    assert (first, second, deal.next("y")) == (0, 1, None)
    deal.take_back("x", [1])
    assert dealt(deal, "yyyy") == {"y": [1, 2, 3]}


def test_nothing_is_given_after_a_stop() -> None:
    deal = Deal(["a", "a", "b"], set(), [1] * 3)
    deal.next("x")
    deal.stop()
    assert dealt(deal, "xxyy") == {"x": [], "y": []}


def test_a_test_takes_what_it_took_or_what_its_mark_says(request: pytest.FixtureRequest) -> None:
    item = request.node
    assert expected_seconds(item, {item.nodeid: 7.0}) == 7.0
    quick = expected_seconds(item, {})
    item.add_marker(pytest.mark.slow)
    assert expected_seconds(item, {}) > quick
    item.add_marker(pytest.mark.slow(seconds=30), append=False)
    assert expected_seconds(item, {}) == 30


SUITE = """
import os, sys, warnings
import pytest

@pytest.fixture(scope="module")
def shared():
    print("made by", os.getpid())
    yield os.getpid()

@pytest.mark.parametrize("number", range(20))
def test_passes(number, shared, tmp_path):
    assert shared == os.getpid() and not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")

def test_fails():
    print("said before it failed")
    os.write(1, b"written before it failed")
    assert 1 == 2, "one is not two"

def test_skips():
    pytest.skip("because of the weather")

@pytest.mark.xfail(reason="known")
def test_fails_as_known():
    assert False

@pytest.fixture
def broken():
    raise RuntimeError("no fixture today")

def test_has_an_error(broken):
    pass

def test_warns():
    warnings.warn("mind the gap", FutureWarning)
"""
DEATHS = """
import os, signal
import pytest

@pytest.mark.parametrize("number", range(6))
def test_before(number): ...

def test_is_killed():
    os.kill(os.getpid(), signal.SIGKILL)

def test_exits():
    os._exit(3)

@pytest.mark.parametrize("number", range(6))
def test_after(number): ...
"""
INTERRUPTED = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in the background has it ignored
def test_interrupts():
    os.kill(os.getppid(), signal.SIGINT)
    signal.pause()
"""


def run(folder: Path, text: str, *options: str) -> tuple[int, str]:
    """The exit status and output of pytest with two workers over a file of this text."""
    (folder / "test_it.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\nfilterwarnings = default\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.forked_workers", "--rootdir", str(folder), "-ra"]
    done = subprocess.run(
        [*command, "-c", str(folder / "pytest.ini"), *options, str(folder / "test_it.py")],
        cwd=ROOT, env={**os.environ, "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def closing(output: str) -> str:
    return re.sub(r" in .*| *=+ *", "", output.strip().splitlines()[-1])


@pytest.mark.slow
def test_pytest_says_the_same_with_workers_and_without(tmp_path: Path) -> None:
    alone, together = (run(tmp_path, SUITE, *options) for options in ((), ("--workers", "2")))
    assert (alone[0], closing(alone[1])) == (together[0], closing(together[1]))
    assert closing(together[1]) == "1 failed, 21 passed, 1 skipped, 1 xfailed, 1 warning, 1 error"
    for said in (
        "one is not two", "said before it failed", "written before it failed", "because of the weather",
        "no fixture today", "FutureWarning: mind the gap", "FAILED", "ERROR",
    ):  # fmt: skip
        assert said in together[1], said


@pytest.mark.slow
def test_a_test_that_ends_its_process_has_failed_and_the_others_are_run(tmp_path: Path) -> None:
    status, output = run(tmp_path, DEATHS, "--workers", "2")
    assert (status, closing(output)) == (1, "2 failed, 12 passed"), output
    assert "ended (signal 9)" in output and "ended (exit status 3)" in output


@pytest.mark.slow
def test_the_first_failure_ends_a_run_that_asks_for_it(tmp_path: Path) -> None:
    status, output = run(
        tmp_path, "def test_a(): assert 0\n" + SUITE.replace("20", "2000"), "--workers", "2", "-x"
    )
    assert status == 1 and "stopping after 1 failures" in output
    assert int(re.findall(r"(\d+) passed", output)[0]) < 2000 if "passed" in output else True


@pytest.mark.slow
def test_an_interrupted_run_leaves_no_process_behind(tmp_path: Path) -> None:
    status, output = run(tmp_path, INTERRUPTED, "--workers", "1")
    assert status == pytest.ExitCode.INTERRUPTED, output  # its output is read to the end: nobody has it open


@pytest.mark.slow
@pytest.mark.parametrize("options", [("-k", "skips"), ("--collect-only", "-q")])
def test_a_choice_of_tests_means_what_it_means_without_workers(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    alone, together = (run(tmp_path, SUITE, *options, *more) for more in ((), ("--workers", "2")))
    assert (alone[0], closing(alone[1])) == (together[0], closing(together[1]))


@pytest.mark.slow
def test_a_file_that_cannot_be_collected_is_told_of(tmp_path: Path) -> None:
    status, output = run(tmp_path, "import nothing_of_this_name", "--workers", "2")
    assert status == pytest.ExitCode.INTERRUPTED and "nothing_of_this_name" in output
