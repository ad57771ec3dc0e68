"""Captured programs kept between processes and runs, until the source that captures them or torch changes."""

import hashlib
import os
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch.export import ExportedProgram

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".pytest_cache" / "programs"
SOURCE = ("models/**/*.py", "tests/corpus/*.py", "tests/nets.py", "tests/programs.py")


@cache
def _source() -> str:
    files = sorted(file for pattern in SOURCE for file in ROOT.glob(pattern))
    digest = hashlib.sha256(f"{torch.__version__} {torch.get_default_dtype()}".encode())
    for file in files:
        digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def kept_program(name: str, capture: Callable[[], ExportedProgram]) -> ExportedProgram:
    """The program of this name as it was captured; captured now where it is not kept, or cannot be read."""
    file = FOLDER / f"{hashlib.sha256(f'{_source()} {name}'.encode()).hexdigest()[:32]}.pt2"
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
    """At once, so that no other worker reads half of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    written = file.with_name(f"{file.stem}-{os.getpid()}.pt2")
    torch.export.save(program, written)
    written.replace(file)
