"""The run on a GPU machine: its limits, what a phase that fails costs, what is carried; and the floors of its nets."""

import ast
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path

import pytest

from tests.benchmarks.floors import nets, operations_and_bytes
from tests.benchmarks.gpu.__main__ import LIMITS, WHEELS, environment_of
from tests.benchmarks.gpu.facts import NAME, Facts, read
from tests.benchmarks.gpu.packages import lacked, machine, unsuited, wanted
from tests.benchmarks.gpu.tests import OPTIONS
from tests.house_sources import sources
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parent.parent
PHASE = """
import os, signal, sys, time
from pathlib import Path
from tests.benchmarks.gpu.facts import Facts
name, given = sys.argv[1], dict(zip(sys.argv[2::2], sys.argv[3::2]))
facts = Facts(Path(given["--out"]), name, float(given["--began"]))
facts.add("before")
if name == "crashes":
    os.abort()
if name == "hangs":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pause()
if name == "interrupted":
    os.kill(os.getppid(), signal.SIGINT)
    signal.pause()
"""
RUN = """
import json, os, signal, sys, time
from pathlib import Path
from tests.benchmarks.gpu import __main__ as gpu
folder, limits, seconds = Path(sys.argv[1]), json.loads(sys.argv[2]), float(sys.argv[3])
gpu.GRACE_S, gpu.LEAST_S = 1.0, 0.5
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
facts = gpu.Facts(folder, "run", time.time())
command = [sys.executable, str(folder / "phase.py")]
run = gpu.Run(facts, time.monotonic() + seconds, command, {**os.environ, "PYTHONPATH": str(gpu.ROOT)})
run.go(list(limits), limits, sys.stderr.buffer)
sys.exit(gpu.summary(run))
"""


def python(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=PATIENCE_S
    )


def states_of(
    folder: Path, limits: dict[str, int], seconds: float = PATIENCE_S
) -> tuple[dict[str, str], int]:
    """The state of each phase of a run of invented ones, and the exit code."""
    (folder / "phase.py").write_text(PHASE)
    done = python("-c", RUN, str(folder), json.dumps(limits), str(seconds))
    return {fact["name"]: fact["state"] for fact in read(folder) if fact["what"] == "phase"}, done.returncode


def test_what_comes_first_is_worth_most_and_a_run_of_four_minutes_gets_through_training() -> None:
    names = list(LIMITS)
    assert names[:2] == ["machine", "correct"] and names[-3:] == ["hazards", "tests", "selftest"]
    assert sum(LIMITS.values()) <= 540
    assert sum(LIMITS[name] for name in names[: names.index("training") + 1]) <= 240
    assert all((ROOT / "tests/benchmarks/gpu" / f"{name}.py").is_file() for name in names)
    rows = re.findall(r"^\| (\w+) \| (\d+) \|", (ROOT / "docs/cuda.md").read_text(), re.M)
    assert {name: int(seconds) for name, seconds in rows if name in LIMITS} == LIMITS


def test_a_phase_that_crashes_or_hangs_costs_the_others_nothing(tmp_path: Path) -> None:
    limits = {"crashes": 300, "hangs": 3, "ends": 300}
    states, code = states_of(tmp_path, limits)
    assert states["crashes"].startswith("failed: exit code -") and states["hangs"].startswith("cut")
    assert states["ends"] == "done" and code == 1
    noted = {fact["phase"] for fact in read(tmp_path) if fact["what"] == "before"}
    assert {"crashes", "ends"} <= noted  # on a busy machine the other one may not have come so far
    assert list(read(tmp_path))[-1]["left"] == ["crashes", "hangs"]


def test_an_interrupt_ends_the_run_with_the_facts_so_far(tmp_path: Path) -> None:
    states, code = states_of(tmp_path, {"ends": 300, "interrupted": 300, "never": 300})
    assert states == {"ends": "done", "interrupted": "interrupted"} and code == 1
    assert [fact["phase"] for fact in read(tmp_path) if fact["what"] == "before"] == ["ends", "interrupted"]


def test_a_phase_without_time_is_not_begun_and_is_named_as_left(tmp_path: Path) -> None:
    states, code = states_of(tmp_path, {"first": 300}, seconds=0.1)
    assert (states, code) == ({"first": "not begun"}, 1)


def test_a_line_that_is_being_written_is_no_fact(tmp_path: Path) -> None:
    Facts(tmp_path, "speed", 0.0).add("original", ms=1.23456789)
    with (tmp_path / NAME).open("a") as file:
        file.write('{"what": "ha')
    assert [(fact["what"], fact["ms"]) for fact in read(tmp_path)] == [("original", 1.2346)]


@pytest.mark.slow
def test_a_real_phase_ends_and_a_fact_that_is_wrong_fails_the_run(tmp_path: Path) -> None:
    run = ["-m", "tests.benchmarks.gpu", str(tmp_path), "--device", "cpu", "--tiny", "--slower", "100"]
    done = python(*run, "--seconds", str(PATIENCE_S), "--only", "machine")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"machine", "product", "packages"} <= {fact["what"] for fact in read(tmp_path)}
    Facts(tmp_path, "speed", 0.0).claim("two and two are five", False)
    again = python(*run, "--seconds", str(PATIENCE_S), "--only", "machine")
    assert again.returncode == 1 and "WRONG" in again.stdout


def carried(requirements: Sequence[str], *there: str) -> list[str]:
    return lacked(requirements, {line.partition("==")[0]: line.partition("==")[2] or None for line in there})


def test_what_the_machine_lacks_is_carried_and_versions_are_compared_not_only_names() -> None:
    floors = [
        "onnx-ir>=1.1",
        "rich",
        "torch>=2.11",
        "uvloop>=0.21; sys_platform != 'win32'",
        "tomli; python_version < '3.11'",
    ]
    old = ["onnx-ir==1.0.0", "rich", "torch", "uvloop==0.22"]
    assert carried(floors, *old) == ["onnx-ir>=1.1"]
    assert carried(floors, "onnx-ir", "torch", "uvloop==0.22") == ["onnx-ir>=1.1", "rich"], "unknown: carried"
    onnxruntime = ["onnxruntime-gpu>=1.27,!=1.29.0"]
    assert not carried(onnxruntime, "onnxruntime==1.30.0") and carried(onnxruntime, "onnxruntime==1.29.0")
    assert {"torch", "onnx-ir", "protobuf"} <= set(machine())


def test_wheels_are_unpacked_with_their_metadata_and_those_of_another_python_are_not(tmp_path: Path) -> None:
    for number, name in ((f"{sys.version_info.major}.{sys.version_info.minor}", "ours"), ("9.9", "theirs")):
        folder = tmp_path / WHEELS / number
        folder.mkdir(parents=True)
        with zipfile.ZipFile(folder / f"{name}-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}-1.dist-info/METADATA", f"Name: {name}\nVersion: 1\n")
    with environment_of(tmp_path) as (_, environment):
        *_, packages = environment["PYTHONPATH"].split(os.pathsep)
        assert [one.metadata["Name"] for one in distributions(path=[packages])] == ["ours"]


def test_packages_that_do_not_suit_are_named_with_the_version_that_is_there() -> None:
    names = {re.split(r"[><=!;\[ ]", one)[0] for one in wanted()}
    assert {"numpy", "onnxruntime-gpu", "pytest", "hypothesis", "torch"} <= names
    assert unsuited(["numpy>=1.26", "no-such-package-of-anyone>=2,<3"]) == [
        "no-such-package-of-anyone<3,>=2: not there"
    ]
    (found,) = unsuited(["numpy>=99"])
    assert re.fullmatch(r"numpy>=99: \d+\..*", found)


def test_the_packages_own_version_is_not_asked_of_metadata_which_a_checkout_has_not() -> None:
    """Each name that a file takes from importlib.metadata, called with the package's name."""
    asked = []
    for file in sources(ROOT).values():
        if "importlib.metadata" not in (text := file.read_text()):
            continue
        nodes = list(ast.walk(ast.parse(text)))
        taken = [n for n in nodes if isinstance(n, ast.ImportFrom) and n.module == "importlib.metadata"]
        names = {alias.asname or alias.name for node in taken for alias in node.names}
        called = [ast.unparse(node) for node in nodes if isinstance(node, ast.Call)]
        asked += [call for call in called if call in {f"{name}('halfeven')" for name in names}]
    assert asked == []


def test_one_command_for_a_strange_machine_is_short_and_needs_no_make() -> None:
    (command,) = re.findall(
        r"```sh\n(python3 -m tests\.benchmarks\.gpu .*?)```", (ROOT / "docs/cuda.md").read_text(), re.S
    )
    assert len(command) < 2000 and "make" not in command
    done = subprocess.run(["make", "-n", "gpu", "OUT=somewhere"], cwd=ROOT, capture_output=True, text=True)
    assert "-m tests.benchmarks.gpu somewhere" in done.stdout


@pytest.mark.slow
def test_a_warning_that_only_a_gpu_gives_fails_no_gpu_test(tmp_path: Path) -> None:
    (tmp_path / "test_warns.py").write_text(
        "import warnings\n\ndef test_it():\n    warnings.warn('cuDNN has no such engine')\n"
    )

    def returned(*options: str) -> int:
        return python("-m", "pytest", "-c", str(ROOT / "pyproject.toml"), *options, str(tmp_path)).returncode

    assert (returned(*OPTIONS[:3]), returned(*OPTIONS)) == (1, 0)


def test_the_floors_count_every_product_once_a_row_and_weights_once_a_batch() -> None:
    per_row, weights, sent = 2 * (64 * 256 + 256 * 10), 64 * 256 + 256 + 256 * 10 + 10, 4 * (64 + 10)
    tiny = nets()["tiny"]
    for rows in (1, 32):
        assert operations_and_bytes(tiny, rows) == (rows * per_row, 2 * weights + rows * sent)
