"""The output of a command is the text itself: nothing in it is read as markup, and no line of it is broken."""

import errno
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from halfeven.models.store.store import REFUSED, Store
from halfeven.serve.cli.console import finish, listing, notify, progress
from halfeven.serve.cli.main import app
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from tests.patience import PATIENCE_S

ODD = "an output [precision] called [/b] of [red]one[/red] model.toml, code.py:X: a class"  # :X: is an emoji of rich


def test_a_text_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    long = f'{ODD} "{"x" * 300}"'
    with pytest.raises(typer.Exit):
        finish(lambda: ({}, long, 0), as_json=False)
    assert capsys.readouterr().out == f"{long}\n"
    notify(ODD)
    assert capsys.readouterr().err == f"{ODD}\n"


def test_no_control_character_of_a_text_reaches_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "a node \x1b]0;owned\x07\x1b[8m\x9b2Jnamed\x7f so\tin\ntwo lines"
    notify(hostile)
    table = Table("node")
    table.add_row(Text(hostile))
    with pytest.raises(typer.Exit):
        finish(lambda: ({}, table, 0), as_json=False)
    came = capsys.readouterr()
    assert "�]0;owned�[8m�2Jnamed� so" in came.err and came.err.endswith("two lines\n")
    assert set(re.findall("[\x00-\x1f\x7f-\x9f]", came.err + came.out)) <= {"\n", "\t"}


def test_json_is_printed_of_a_path_that_is_no_utf_8(capsys: pytest.CaptureFixture[str]) -> None:
    path = os.fsdecode(b"/models/\xff\xc3\xbc")
    with pytest.raises(typer.Exit):
        finish(lambda: ({"paths": [path], path: 1, "half": "\ud800"}, None, 0), as_json=True)
    assert json.loads(capsys.readouterr().out) == {
        "paths": ["/models/\ufffdü"],
        "/models/\ufffdü": 1,
        "half": "\ufffd",
    }


def test_a_file_of_any_name_may_be_in_progress() -> None:
    with progress("converting") as show:
        show(f"reading {ODD}")


def test_without_a_terminal_each_stage_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("converting") as show:
        for sentence in ("capturing resnet50", "search: 1 of 30 kept", "search: 2 of 30 kept", "proving"):
            show(sentence)
    assert capsys.readouterr().err.splitlines() == ["capturing resnet50", "search: 1 of 30 kept", "proving"]


def test_the_list_of_models_shows_the_reason_as_it_is(tmp_path: Path) -> None:
    with Store(tmp_path).draft("net") as draft:
        draft.publish(REFUSED, {"forms": {}, "half": None, "reason": ODD, "notes": []})
    done = CliRunner().invoke(app, ["models", "--store", str(tmp_path)])
    assert done.exit_code == 0, done.exception
    words = {word for line in done.stdout.splitlines() for word in line.replace("│", " ").split()}
    assert {"[precision]", "[/b]", "[red]one[/red]"} <= words


def test_no_name_is_cut_in_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with Store(tmp_path).draft(name := "zyxwvu" * 12) as draft:
        draft.publish(REFUSED, {"forms": {}, "half": None, "reason": "why", "notes": []})
    assert CliRunner().invoke(app, ["keys", "add", name, "--store", str(tmp_path)]).exit_code == 0
    for words in (["models"], ["keys", "list"]):
        shown = CliRunner().invoke(app, [*words, "--store", str(tmp_path)]).stdout
        assert "…" not in shown and max(map(len, shown.splitlines())) <= 80
        cells = [line.replace("│", " ").split() for line in shown.splitlines()]
        assert name in "".join(word for line in cells for word in line if set(word) <= set(name)), shown
    job = "ftjob-0123456789abcdef01234567"  # `halfeven cancel` takes it
    table = listing("job", "model", "is", whole="job")
    table.add_row(job, name, "word " * 20)
    Console(width=80, file=(written := io.StringIO())).print(table)
    assert job in written.getvalue()


@pytest.mark.parametrize("target", ["none/report.html", ".", "file/report.html"])
def test_a_report_that_cannot_be_written_is_refused_before_the_work(target: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    report, store = str(tmp_path / target), ["--store", str(tmp_path / "store")]
    # The errors of the work itself would come later: neither the model nor the server is there.
    for words in (["convert", "none", *store, "--report", report], ["bench", "x", "m", "--report", report]):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 2 and f"--report {report}" in done.stderr, done.stderr
    done = CliRunner().invoke(app, ["selftest", *store, "--out", report])
    assert done.exit_code == 2 and f"--out {report}" in done.stderr


def test_a_samples_file_replaces_nothing_but_a_file_and_is_refused_before_the_pictures_are_read(
    tmp_path: Path,
) -> None:
    os.mkfifo(pipe := tmp_path / "pipe.safetensors")
    for out in (tmp_path / "none" / "x.safetensors", pipe):
        done = CliRunner().invoke(app, ["samples", "none", str(tmp_path), str(out)])
        assert done.exit_code == 2 and f"OUT {out}" in done.stderr, done.stderr
    assert pipe.is_fifo()


def test_a_store_that_is_a_file_is_refused_by_every_command_that_looks_into_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for words in (["doctor"], ["models"]):
        done = CliRunner().invoke(app, [*words, "--store", str(tmp_path / "file")])
        assert done.exit_code == 2 and "it is not a folder" in done.stderr, (words, done.stderr)


def test_a_full_disk_is_said_and_no_file_that_was_only_read_is_blamed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def work() -> tuple[dict[str, object], str, int]:
        raise OSError(errno.ENOSPC, "No space left on device", "net/model.toml")

    with pytest.raises(typer.Exit) as ended:
        finish(work, as_json=False)
    said = capsys.readouterr().err
    assert ended.value.exit_code == 2 and "No space left on device: free some" in said
    assert "model.toml" not in said and "read and write" not in said


@pytest.mark.parametrize(
    "words",
    [
        ["convert"],
        ["convert", "net", "--levl", "O1"],
        ["no-such-command"],
        ["bench", "x", "m", "--url", "http://127.0.0.1:1", "--key", "a b"],
        ["keys", "add"],
    ],
)
def test_a_usage_error_is_one_object_too(words: list[str]) -> None:
    done = CliRunner().invoke(app, [*words, "--json"])
    facts = json.loads(done.stdout)
    assert done.exit_code == 2 and facts["code"] == "bad_usage" and facts["status"] == "failed"
    assert facts["error"].split("'")[0] in done.stderr.replace("\n", " ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "stdout", "code", "said"),
    [
        (["models", "--json"], ">&-", 0, ""),
        (["models", "--json"], ">&- 2>&- <&-", 0, ""),
        (["convert", "none", "--json"], ">/dev/full", 2, "none does not exist"),
        (["convert", "--json"], ">/dev/full", 2, "Missing argument"),
        (["lint", "script.py"], ">/dev/full", 1, "the work is done"),
        (["keys", "add", "ci"], ">/dev/full", 1, "the work is done"),
    ],
)
def test_an_stdout_that_takes_nothing_changes_no_exit_code_of_a_failure_and_shows_no_traceback(
    words: list[str], stdout: str, code: int, said: str, tmp_path: Path
) -> None:
    (tmp_path / "script.py").touch()
    line = f"{shlex.join([sys.executable, '-m', 'halfeven', *words])} {stdout}"
    done = subprocess.run(
        line, shell=True, cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == code and said in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_a_lock_needs_a_folder_that_may_be_written_and_no_such_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier lock is replaced. Which may be written is made up: root may write anything."""
    (tmp_path / "halfeven.lock").touch()
    words = ["lock", str(tmp_path / "none.onnx"), "-o", str(tmp_path / "halfeven.lock")]
    for writable, sentence in (
        (tmp_path, "none.onnx: no such file"),
        (tmp_path / "halfeven.lock", "error: -o"),
    ):
        may = lambda path, mode, writable=writable: mode != os.W_OK or Path(path) == writable  # noqa: E731
        monkeypatch.setattr(os, "access", may)
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 2 and sentence in done.stderr, done.stderr
