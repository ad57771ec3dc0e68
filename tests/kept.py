"""Results that take long to make, kept between processes and runs until the source that makes them or torch change."""

import fcntl
import hashlib
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch.export import ExportedProgram

from tests.few_unseen import unseen_samples

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".pytest_cache" / "kept"
CAPTURE = ("models/**/*", "tests/corpus/*.py", "tests/nets.py", "tests/programs.py")
CONVERSION = (
    "models/**/*",
    "exporters/**/*",
    "tests/model_folders.py",
    "tests/conformance/hosted.py",
    "tests/digits.py",
    "tests/recurrent.py",
)
VERSIONS = (torch.__version__, sys.version)
# A conversion measures and rounds as the processor does; a captured program is the same on each.
PROCESSOR = (torch.backends.cpu.get_cpu_capability(), os.getenv("ONEDNN_MAX_CPU_ISA"))


@cache
def _sources(patterns: tuple[str, ...]) -> str:
    """A digest of versions, and of every file of the checkout that the patterns find."""
    digest = hashlib.sha256(str(VERSIONS).encode())
    for file in sorted(file for pattern in patterns for file in ROOT.glob(pattern)):
        if file.is_file() and "__pycache__" not in file.parts:
            digest.update(f"\0{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:24]


def _place(name: str, patterns: tuple[str, ...], suffix: str = "") -> Path:
    return FOLDER / f"{hashlib.sha256(name.encode()).hexdigest()[:12]}-{_sources(patterns)}{suffix}"


def _drop_older(place: Path) -> None:
    """Remove the results under the same name that were made from other sources."""
    for older in place.parent.glob(f"{place.name[:12]}-*"):
        if older.stem != place.stem:
            shutil.rmtree(older) if older.is_dir() else older.unlink(missing_ok=True)


def kept_program(name: str, capture: Callable[[], ExportedProgram]) -> ExportedProgram:
    """The program of this name as it was captured; captured now where it is not kept, or cannot be read."""
    file = _place(name, CAPTURE, ".pt2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of what it writes by itself
        if not file.exists():
            _write(capture(), file)
        try:
            return torch.export.load(file)
        except Exception:  # whatever torch's reader makes of a file that is not whole
            _write(capture(), file)
            return torch.export.load(file)


def _write(program: ExportedProgram, file: Path) -> None:
    """Write the program in one step, so that no other worker reads half of the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    _drop_older(file)
    written = file.with_name(f"{os.getpid()}-{file.name}")
    torch.export.save(program, written)
    written.replace(file)


def kept_store(file: str, make: Callable[[Path], None]) -> Path:
    """A folder as ``make``, a function of this test file, wrote it: to be copied, never written to. Workers wait for
    the one that makes it. Conversions in ``make`` try their plan on few unseen samples."""
    path = str(Path(file).relative_to(ROOT))
    folder = _place(f"{path} {make.__name__} on {PROCESSOR}", (*CONVERSION, path))
    FOLDER.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            _drop_older(folder)
            written = folder.with_suffix(".new")
            shutil.rmtree(written, ignore_errors=True)
            with unseen_samples(few=True):
                make(written)
            written.rename(folder)
    return folder
