"""A training that is killed or goes on elsewhere ends bit for bit as one that is left alone."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import NamedTuple

import numpy as np
import pytest

from tests.patience import PATIENCE_S
from tests.serve.finetune.training.hard_training import (
    EVERY,
    STEPS,
    elsewhere,
    hard_job,
    kill_at,
    outcome,
)
from tests.serve.finetune.training.trainer_runs import TRAINER, Line, run, started
from tests.slow import KILLS


class Untouched(NamedTuple):
    """A job, the digests of what it leaves when nothing disturbs it, and its seconds then."""

    request: Line
    expected: tuple[str, str]
    seconds: float


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Untouched:
    begun, request = time.monotonic(), hard_job(tmp_path_factory.mktemp("untouched") / "job")
    alone = elsewhere(request)
    lines, _ = run(alone)
    causes = [line["cause"] for line in lines if line["type"] == "step" and line["skipped"]]
    assert causes.count("gradient overflow") > 2, "the overflows are there"
    return Untouched(request, outcome(alone, lines), time.monotonic() - begun)


def copied(request: Line, folder: Path) -> Line:
    """The job with a folder and files of its own."""
    old, new = str(Path(request["out"]).parent), str(folder / "job")
    copytree(old, new, ignore=ignore_patterns("left-alone"))
    return json.loads(json.dumps(request).replace(old, new))


@pytest.fixture
def hard(untouched: Untouched, tmp_path: Path) -> Line:
    return copied(untouched.request, tmp_path)


@pytest.fixture
def expected(untouched: Untouched) -> tuple[str, str]:
    return untouched.expected


def calls(steps: int) -> int:
    """The calls of forward until so many steps and their evaluations are done: 2 parts a step, 4 an evaluation."""
    return 2 * steps + 4 * (steps // EVERY)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "resumed"),
    [
        pytest.param(3, None, id="before the first checkpoint", marks=pytest.mark.slow),
        pytest.param(calls(12) + 2, 10, id="between two parts of a batch"),
        pytest.param(calls(15) - 1, 10, id="in an evaluation", marks=pytest.mark.slow),
        pytest.param(calls(STEPS) - 2, 35, id="in the last evaluation", marks=pytest.mark.slow),
    ],
)
def test_a_killed_training_goes_on_to_the_same_bits(
    hard: Line, expected: tuple[str, str], call: int, resumed: int | None
) -> None:
    kill_at(hard, call)
    with started(hard) as process:
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
    lines, _ = run(hard)
    assert [line["step"] for line in lines if line["type"] == "resumed"] == ([resumed] if resumed else [])
    assert outcome(hard, lines) == expected
    reported = [line["step"] for line in lines if line["type"] == "step"]
    assert reported == list(range(1, STEPS + 1)), "the log until the checkpoint is reported again"
    assert sum(line.get("replayed", False) for line in lines if line["type"] == "step") == (resumed or 0)


@pytest.mark.slow
def test_killed_behind_its_last_step_it_makes_no_step_again(hard: Line, expected: tuple[str, str]) -> None:
    with started(hard) as process:
        assert process.stdout
        for line in map(json.loads, process.stdout):
            if line["type"] == "checkpoint" and line["step"] == STEPS:
                os.kill(process.pid, signal.SIGKILL)
                break
        process.wait(PATIENCE_S)
    lines, _ = run(hard)
    assert [line["step"] for line in lines if line["type"] == "resumed"] == [STEPS]
    assert [line["replayed"] for line in lines if line["type"] == "step"] == [True] * STEPS
    assert outcome(hard, lines) == expected


@pytest.mark.slow
def test_with_a_damaged_checkpoint_it_says_so_and_ends_as_it_should(
    hard: Line, expected: tuple[str, str]
) -> None:
    kill_at(hard, calls(22))
    with started(hard) as process:
        process.wait(PATIENCE_S)
    newest = sorted((Path(hard["out"]) / "checkpoints").glob("step-*"))[-1]
    (newest / "state.json").write_text("{}")
    lines, _ = run(hard)
    assert [line["code"] for line in lines if line["type"] == "note"] == ["CORRUPT_CHECKPOINT"]
    assert [line["step"] for line in lines if line["type"] == "resumed"] == [15]
    assert outcome(hard, lines) == expected


@pytest.fixture(scope="module")
def killed(untouched: Untouched, tmp_path_factory: pytest.TempPathFactory) -> Line:
    """The job, killed behind its second checkpoint."""
    request = copied(untouched.request, tmp_path_factory.mktemp("killed"))
    kill_at(request, calls(12))
    with started(request) as process:
        process.wait(PATIENCE_S)
    return request


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [{}, {"done": "many"}, {"learners": []}, {"best": 3}])
def test_a_checkpoint_that_was_changed_with_its_digests_is_refused(
    killed: Line, tmp_path: Path, numbers: Line
) -> None:
    hard = copied(killed, tmp_path)
    for place in (Path(hard["out"]) / "checkpoints").glob("step-*"):
        state, manifest = place / "state.json", json.loads((place / "manifest.json").read_text())
        changed = json.loads(state.read_text()) | numbers if numbers else {}
        state.write_text(json.dumps(changed))
        manifest["files"]["state.json"] = hashlib.sha256(state.read_bytes()).hexdigest()
        (place / "manifest.json").write_text(json.dumps(manifest))
    lines, _ = run(hard)
    assert (lines[-1]["type"], lines[-1]["code"]) == ("failed", "CORRUPT_CHECKPOINT"), lines[-1]
    assert not (Path(hard["out"]) / "weights.safetensors").exists()


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_with_the_same_bits(
    untouched: Untouched, hard: Line, tmp_path: Path
) -> None:
    """One training, killed again and again; each time after a part of its whole time, its start included. The machine
    may have been slower when that was measured."""
    draw, whole, kills = np.random.default_rng(), untouched.seconds, 0
    while kills < (KILLS or 2):
        (tmp_path / "request.json").write_text(json.dumps(hard))
        command = [sys.executable, "-PB", "-m", TRAINER, str(tmp_path / "request.json")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
            try:
                process.wait(draw.uniform(0.3, 1.0) * whole)
            except subprocess.TimeoutExpired:
                process.kill()
                kills += 1
            if process.wait() == 0:  # it was done before: once more from its beginning, and killed sooner
                whole *= 0.8
                for path in sorted((Path(hard["out"]) / "checkpoints").glob("step-*")):
                    for file in path.iterdir():
                        file.unlink()
                    path.rmdir()
    lines, _ = run(hard)
    assert outcome(hard, lines) == untouched.expected
    assert not (Path(hard["out"]) / "checkpoints" / ".draft").exists()
