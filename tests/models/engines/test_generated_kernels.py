"""The kernels that torch.compile would generate for the halves of the zoo, and for a block of BERT-base and of ViT-B,
compile for the GPUs of three generations, without one. In a run every second net's are compiled, each for one of the
three: the next net's for the next, and those of the same net in another run for another."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.corpus import CORPUS
from tests.generated_kernels import ARCHITECTURES, BLOCKS
from tests.slow import drawn, one_in_turn

ROOT = Path(__file__).resolve().parents[3]
# "zoo switch" branches by value: Inductor generates its bodies apart.
ALL = [*BLOCKS, *(name for name in CORPUS if name.startswith("zoo ") and name != "zoo switch")]
NETS = drawn(2, ALL)  # there are three generations: in some run each net is compiled for each of them
ASKED = {name: one_in_turn(ARCHITECTURES, place) for place, name in enumerate(NETS)}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None,
        reason="needs triton, whose wheel has the compiler (pip install triton)",
    ),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="torch is told that there is a device: there is one"
    ),
]


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    """The findings of one process for each net: its imports take longer than most nets. In `make check` all tests go
    before it."""
    paths = os.pathsep.join([str(ROOT), *sys.path])
    # With CI set, torch's inductor takes a missing decomposition of its own for an error (lowering.make_fallback).
    without_ci = {key: value for key, value in os.environ.items() if key != "CI"}
    asked = [f"{name}={','.join(map(str, architectures))}" for name, architectures in ASKED.items()]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.generated_kernels", *asked],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=without_ci | {"PYTHONPATH": paths},
        timeout=3600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", NETS)
def test_every_generated_kernel_compiles_for_a_generation_of_gpus(
    name: str, found: dict[str, dict[str, Any]]
) -> None:
    assert "error" not in found[name], found[name]["error"]
    counts = found[name]["compiled"]
    assert set(counts) == set(map(str, ASKED[name]))
    assert len(set(counts.values())) == 1 and min(counts.values()) > 0
