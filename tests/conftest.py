"""What many tests stand on: the wheel as a user gets it, built once per session; no GPU, no GPU tests."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
NOT_SOURCE = shutil.ignore_patterns(
    ".git",
    ".links",
    ".venv",
    "build",
    "dist",
    "tests",
    "*.egg-info",
    "__pycache__",
    ".*_cache",
    "halfeven-store",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` are skipped, and so counted, where there is no CUDA device."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device (make gpu)"))


@pytest.fixture(scope="session")
def built_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout. Built from a copy: setuptools leaves ``build/`` where it works."""
    folder = tmp_path_factory.mktemp("wheel")
    source = Path(shutil.copytree(ROOT, folder / "source", ignore=NOT_SOURCE))
    command = [sys.executable, "-m", "pip", "wheel", str(source), "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--quiet", "--wheel-dir", str(folder)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"the wheel could not be built:\n{done.stdout}\n{done.stderr}"
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="session")
def unpacked_wheel(built_wheel: Path) -> Path:
    """A folder like a site-packages that has nothing but the wheel: put it on ``PYTHONPATH``."""
    folder = built_wheel.parent / "site"
    with zipfile.ZipFile(built_wheel) as archive:
        archive.extractall(folder)
    return folder
