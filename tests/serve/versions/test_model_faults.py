"""The moments at which a model that could not be made ready is tried again: by a clock and by files, both in the test's
hand."""

from pathlib import Path

import pytest
from halfeven.serve.versions.readiness import MOST_SECONDS, Faults

from tests.serve.clock import Clock


@pytest.fixture
def clock() -> Clock[float]:
    return Clock(100.0)


@pytest.fixture
def faults(tmp_path: Path, clock: Clock[float]) -> Faults:
    (tmp_path / "net" / "1" / "source").mkdir(parents=True)
    (tmp_path / "net" / "live").write_text("1\n")
    return Faults(tmp_path, clock)


def failed(faults: Faults, clock: Clock[float], took_s: float = 0.0, why: str = "a file is missing") -> bool:
    faults.trying("net")
    clock.now += took_s
    return faults.note("net", why)


def test_tries_are_further_and_further_apart_up_to_the_most(faults: Faults, clock: Clock[float]) -> None:
    pauses = []
    for _ in range(8):
        failed(faults, clock)
        began_s = clock.now
        while faults.waits("net"):
            clock.now += 0.5
        pauses.append(clock.now - began_s)
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30] and MOST_SECONDS == 30


def test_a_model_that_fails_for_a_day_is_tried_no_more_often(faults: Faults, clock: Clock[float]) -> None:
    for _ in range(1100):
        failed(faults, clock)
    clock.now += MOST_SECONDS - 1
    assert faults.waits("net")


@pytest.mark.parametrize(
    "change", ["a new file", "a longer file", "the alias", "a file deep down", "a file goes"]
)
def test_a_model_is_tried_again_when_one_of_its_files_changes(
    faults: Faults, clock: Clock[float], tmp_path: Path, change: str
) -> None:
    kept = tmp_path / "net" / "1" / "kept"
    kept.write_bytes(b"1")
    failed(faults, clock)
    assert faults.waits("net")
    if change == "a file goes":
        kept.unlink()
    elif change == "the alias":
        (tmp_path / "net" / "live").write_text("12\n")
    else:
        where = {"a new file": "new", "a longer file": "kept", "a file deep down": "source/model.py"}[change]
        (tmp_path / "net" / "1" / where).write_bytes(b"longer than before")
    assert not faults.waits("net")


def test_what_changes_while_a_model_is_tried_is_a_reason_for_another_try(
    faults: Faults, clock: Clock[float], tmp_path: Path
) -> None:
    faults.trying("net")
    (tmp_path / "net" / "1" / "weights.safetensors").write_bytes(b"came meanwhile")
    faults.note("net", "weights.safetensors is missing")
    assert not faults.waits("net")


def test_what_the_server_itself_writes_beside_the_versions_is_none(
    faults: Faults, clock: Clock[float], tmp_path: Path
) -> None:
    failed(faults, clock)
    for name in ("events.jsonl", "rollout.json", "promotions.json", ".promoting"):
        (tmp_path / "net" / name).write_text("{}")
    (tmp_path / "net" / "tuned").mkdir()
    assert faults.waits("net")


def test_a_try_that_took_long_is_not_made_again_before_as_long_has_passed(
    faults: Faults, clock: Clock[float]
) -> None:
    failed(faults, clock, took_s=300.0)
    clock.now += 299.0
    assert faults.waits("net")
    clock.now += 1.0
    assert not faults.waits("net")


def test_the_same_fault_again_is_no_news(faults: Faults, clock: Clock[float]) -> None:
    assert failed(faults, clock) and not failed(faults, clock) and failed(faults, clock, why="another")
    assert faults.of("net") == "another"
    faults.clear("net")
    assert faults.of("net") is None and not faults.waits("net") and failed(faults, clock)
