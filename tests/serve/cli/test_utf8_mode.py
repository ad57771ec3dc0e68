"""A locale without the signs of our pages and messages ends no command."""

import os
import subprocess
import sys

import pytest

from tests.patience import PATIENCE_S


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["-I"], ["-X", "utf8=0"]])
def test_a_command_runs_in_a_locale_that_has_ascii_alone(options: list[str]) -> None:
    """The help of the command has an ellipsis, and the files of halfeven are read and written in UTF-8. Python may be
    asked to read no variable, or not to use UTF-8."""
    ascii_alone = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, *options, "-m", "halfeven.serve.cli.main", "bench", "--help"]
    given = {**os.environ, **ascii_alone}
    done = subprocess.run(command, capture_output=True, env=given, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    # With -I Python does not read that the terminal has ASCII alone.
    assert ("INPUT=SIZE,…".encode() if "-I" in options else b"INPUT=SIZE,?") in done.stdout
