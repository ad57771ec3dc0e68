"""The verifier of docs/, which needs nothing of halfeven."""

import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

VERIFIER = Path(__file__).parents[3] / "docs" / "verify_proof.py"


def verified(half: Path) -> tuple[int, str]:
    """The exit code and the sentence of the verifier, run as the script that it is, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-I", str(VERIFIER), str(half)], capture_output=True, text=True, check=False
    )
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def verified_here(half: Path) -> tuple[int, str]:
    """The exit code and the sentence of the verifier, run in this process, which has imported numpy already."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as said:
        patch.setattr(sys, "argv", [str(VERIFIER), str(half)])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(VERIFIER), run_name="__main__")
    return int(end.value.code or 0), said.getvalue()
