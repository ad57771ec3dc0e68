"""Triton's example scripts, where a folder has them."""

import os
import subprocess
import sys
from pathlib import Path

from tests.patience import PATIENCE_S

FOLDER = os.environ.get("HALFEVEN_TRITON_EXAMPLES")


def run_example(script: str, address: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(Path(FOLDER or "") / script), "-u", address, *options],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
