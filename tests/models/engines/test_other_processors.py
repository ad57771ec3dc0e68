"""Engines and trainings compute rightly on processors with less than this one has: oneDNN and torch take the kernels of
the named one, which both read from the environment at their start. So each runs its tests in a process."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.slow import drawn

ROOT = Path(__file__).resolve().parents[3]
# oneDNN's name → what torch's own kernels are then (by itself: the best of the processor), what a processor needs to
# run it, and what a processor has that is more than it.
PROCESSORS = {
    "AVX2": ("avx2", {"avx2"}, {"avx512f"}),
    "AVX512_CORE": (None, {"avx512f", "avx512bw", "avx512vl", "avx512dq"}, {"avx512_bf16"}),
    "AVX512_CORE_BF16": (None, {"avx512_bf16"}, {"avx512_fp16", "amx_bf16"}),
}
ENGINES = [
    "tests/models/engines/test_engines.py", "tests/models/engines/cpu/test_packed.py",
    "tests/models/engines/cpu/test_row_shares.py", "tests/models/engines/cpu/test_scripted.py",
    "tests/serve/versions/loading/test_ready.py",
]  # fmt: skip
TRAININGS = ["tests/serve/finetune/training/loop"]
SEARCH = ["tests/serve/tuning/test_search.py"]
FARTHEST = "AVX2"  # it differs most: there the slow tests of engines run as well, and the search of all that there is


def units() -> set[str]:
    """The names that Linux has for what this processor can do; nothing elsewhere."""
    file = Path("/proc/cpuinfo")
    found = re.search(r"^flags\s*:(.*)$", file.read_text(), re.M) if file.exists() else None
    return set(found[1].split()) if found else set()


def cases() -> Sequence[object]:
    """A run has the engines on one of the processors, and the trainings on another one."""
    found, has = list[object](), units()
    for name, (_, needed, more) in PROCESSORS.items():
        lacking = pytest.mark.skipif(
            not (needed <= has and more & has), reason=f"this one is no more than {name}"
        )
        engines = [*ENGINES, *SEARCH] if name == FARTHEST else ENGINES
        for what, files in (("engines", engines), ("trainings", TRAININGS)):
            found.append(pytest.param(name, files, id=f"{name}-{what}", marks=lacking))
    return drawn(3, found)


@pytest.mark.slow(seconds=30)
@pytest.mark.parametrize(("processor", "files"), cases())
def test_the_engines_and_trainings_are_right_on_a_processor_with_less(
    processor: str, files: list[str]
) -> None:
    torch_has = PROCESSORS[processor][0]
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": processor}
    if torch_has:
        environment["ATEN_CPU_CAPABILITY"] = torch_has
    choice = [] if processor == FARTHEST and files != TRAININGS else ["-m", "not slow"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *choice, *files],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
