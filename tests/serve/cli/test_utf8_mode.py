"""A locale without the signs of our pages and messages ends no command."""

import os
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_a_command_runs_in_a_locale_that_has_ascii_alone() -> None:
    """The help of the command has an ellipsis, and the files of halfeven are read and written in UTF-8."""
    ascii_alone = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "halfeven.serve.cli.main", "bench", "--help"]
    done = subprocess.run(command, capture_output=True, env={**os.environ, **ascii_alone})
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    assert b"INPUT=SIZE,?" in done.stdout
