"""The verifier of docs/, which needs nothing of halfeven."""

import subprocess
import sys
from pathlib import Path

VERIFIER = Path(__file__).parents[3] / "docs" / "verify_proof.py"


def verified(half: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-I", str(VERIFIER), str(half)], capture_output=True, text=True, check=False
    )
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout
