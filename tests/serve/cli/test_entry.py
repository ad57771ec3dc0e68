"""The console script ends in one sentence, whatever stops it."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from halfeven.serve.cli.entry import main


def test_an_interruption_while_the_command_line_is_imported_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "halfeven.serve.cli.main", SimpleNamespace(main=interrupted))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == "interrupted; nothing half-written is left behind\n"


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_full_stdout_is_said_in_one_sentence(options: list[str]) -> None:
    command = [sys.executable, "-m", "halfeven", "models", "--store", "none-here", *options]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: stdout cannot be written (No space left on device)"), done.stderr
    assert done.stderr.count("\n") == 1
