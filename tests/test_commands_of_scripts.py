"""A command that a script starts is as the command itself: its words, its exit code, its signals and its end."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.commands_of_scripts import forked_halfeven
from tests.patience import PATIENCE_S, until

pytestmark = pytest.mark.slow  # the process that forks imports everything


def is_alive(words: bytes) -> bool:
    commands = (path / "cmdline" for path in Path("/proc").iterdir() if path.name.isdigit())
    return any(command.exists() and words in command.read_bytes() for command in commands)


def test_its_words_exit_code_and_signals_are_those_of_the_command(tmp_path: Path) -> None:
    with forked_halfeven(tmp_path / "halfeven"):
        command = [tmp_path / "halfeven"]
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0 and done.stdout.startswith("halfeven"), done
        done = subprocess.run(
            [*command, "status", "--nosuch"], capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert done.returncode == 2 and "nosuch" in done.stderr
        environment = {**os.environ, "HALFEVEN_DRAIN_SECONDS": "0"}
        for number, code in ((signal.SIGINT, 0), (signal.SIGKILL, -signal.SIGKILL)):
            store = tmp_path / number.name
            serve = [*command, "serve", "--store", str(store), "--port", "0"]
            with subprocess.Popen(serve, stderr=subprocess.PIPE, text=True, env=environment) as server:
                assert server.stderr is not None
                next(line for line in server.stderr if "has no model yet" in line)
                server.send_signal(number)
                assert server.wait(PATIENCE_S) == code
            until(lambda store=store: not is_alive(b"serve\0--store\0" + str(store).encode()))
