"""``halfeven keys`` as an operator uses it, and the client commands that send a key."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from halfeven.models.errors import BadInput
from halfeven.serve.access.access_control import AccessControl
from halfeven.serve.access.client_key import VARIABLE
from halfeven.serve.access.key_file import KeyFile
from halfeven.serve.bench.command import Plan, bench
from halfeven.serve.cli.client import predict_file
from halfeven.serve.cli.main import app
from halfeven.serve.finetune.client.remote import Remote
from halfeven.serve.http.routes.app import build_app
from halfeven.serve.http.routes.infer import InferFront
from typer.testing import CliRunner, Result

from tests.patience import PATIENCE_S
from tests.serve.conftest import HISTORY, make_roster, running


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["keys", *map(str, arguments)])


def facts_of(result: Result) -> Any:
    return json.loads(result.stdout.strip().splitlines()[-1])


def test_a_key_is_printed_once_listed_without_itself_and_revoked(tmp_path: Path) -> None:
    store = ("--store", tmp_path)
    added = run(
        "add", "ci", "--scope", "infer", "--scope", "metrics", "--model", "digits", "--rate", 5, *store
    )
    assert added.exit_code == 0, added.output
    key = added.stdout.strip()
    found = KeyFile(tmp_path / "keys.json").read()
    assert found is not None and (record := found.find(key)) is not None
    assert (record.name, record.scopes, record.models, record.rate) == (
        "ci",
        ("infer", "metrics"),
        ("digits",),
        5.0,
    )
    for form in ((), ("--json",)):
        listed = run("list", *store, *form)
        assert record.id in listed.output and key not in listed.output and record.sha256 not in listed.output
    assert facts_of(run("revoke", "ci", *store, "--json"))["id"] == record.id
    assert "refuses every request" in run("list", *store).output
    assert run("revoke", "ci", *store).exit_code == 2


def test_a_key_is_made_for_infer_where_no_scope_is_named(tmp_path: Path) -> None:
    added = facts_of(run("add", "ci", "--key-file", tmp_path / "keys", "--json"))
    assert added["scopes"] == ["infer"] and added["key"].startswith(f"hek_{added['id']}_")
    assert run("add", "ci", "--key-file", tmp_path / "keys").exit_code == 2
    assert run("add", "x", "--scope", "root", "--key-file", tmp_path / "keys").exit_code == 2


def test_the_client_commands_send_the_key_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = KeyFile(tmp_path / "keys.json")
    key, _ = file.add("ci", ["infer", "train"])
    roster = make_roster()
    (tmp_path / "x.json").write_text(json.dumps({"instances": [[1, 2, 3, 4]]}))
    front = InferFront(build_app(roster, lambda: b"", HISTORY), roster, access=AccessControl(file))
    with running(front) as address:
        url = f"http://{address}"
        calls = (
            lambda: predict_file(url, "double", tmp_path / "x.json"),
            lambda: Remote(url).job("ftjob-1"),
            lambda: bench(url, "double", Plan((1,), seconds=0.05, warmup_s=0.0), lambda _: None),
        )
        monkeypatch.delenv(VARIABLE, raising=False)
        for call in calls:
            with pytest.raises(BadInput, match="needs a key"):
                call()
        monkeypatch.setenv(VARIABLE, key)
        assert calls[0]()["predictions"] == [[2, 4, 6, 8]]
        with pytest.raises(BadInput, match="404"):  # this application has no jobs
            calls[1]()
        stage = calls[2]()["stages"][0]
        assert stage["concurrency"] == 1 and set(stage["statuses"]) == {"200"}, stage


def test_the_command_line_begins_without_torch() -> None:
    """It takes seconds to import, and most commands' help and `keys` need none of it."""
    asked = "import sys, halfeven.serve.cli.main; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout.strip() == "False", done.stderr
