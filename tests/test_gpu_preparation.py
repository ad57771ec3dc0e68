"""What is done before a GPU is there: packages, conversions; and what no GPU run fails on."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks import gpu
from tests.benchmarks.floors import nets, operations_and_bytes
from tests.benchmarks.gpu_packages import missing, wanted
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parent.parent


def recipe(target: str) -> str:
    done = subprocess.run(
        ["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_packages_that_are_missing_are_named_and_torch_is_taken_as_it_is() -> None:
    names = [re.split(r"[><=\[]", one)[0] for one in wanted()]
    assert {"numpy", "onnxruntime-gpu", "pytest", "hypothesis"} <= set(names) and "torch" not in names
    assert missing(["numpy>=1.26", "no-such-package-of-anyone>=2,<3"]) == ["no-such-package-of-anyone>=2,<3"]


@pytest.mark.slow
def test_a_model_is_converted_once_before_and_not_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = gpu.converted(tmp_path, "tiny")
    monkeypatch.setattr(gpu, "convert", lambda *_: pytest.fail("converted again"))
    assert gpu.converted(tmp_path, "tiny").digest == first.digest


def test_tests_selftest_and_benchmark_have_time_limits_of_their_own_and_take_under_nine_minutes() -> None:
    parts = [line for line in recipe("gpu").splitlines() if "timeout" in line]
    seconds = [int(found) for found in re.findall(r"timeout (\d+)", "".join(parts))]
    assert len(seconds) == 3 and sum(seconds) < 540
    assert ["pytest" in parts[0], "selftest --device cuda:0" in parts[1], "benchmarks.gpu" in parts[2]] == [
        True
    ] * 3
    assert "--prepare" in recipe("gpu-prepare") and "--prepare" not in recipe("gpu")


@pytest.mark.slow
def test_a_warning_that_only_a_gpu_gives_fails_no_gpu_test(tmp_path: Path) -> None:
    (tmp_path / "test_warns.py").write_text(
        "import warnings\n\ndef test_it():\n    warnings.warn('cuDNN has no such engine')\n"
    )

    def returned(*options: str) -> int:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-c",
            str(ROOT / "pyproject.toml"),
            "-p",
            "no:cacheprovider",
        ]
        done = subprocess.run(
            [*command, *options, str(tmp_path)], capture_output=True, text=True, timeout=PATIENCE_S
        )
        return done.returncode

    found = re.search(r"-m pytest (.*?) -m gpu", recipe("gpu"))
    assert found is not None
    assert (returned(), returned(*found[1].split())) == (1, 0)


def test_the_floors_count_every_product_once_a_row_and_weights_once_a_batch() -> None:
    per_row, weights, sent = 2 * (64 * 256 + 256 * 10), 64 * 256 + 256 + 256 * 10 + 10, 4 * (64 + 10)
    tiny = nets()["tiny"]
    for rows in (1, 32):
        assert operations_and_bytes(tiny, rows) == (rows * per_row, 2 * weights + rows * sent)
