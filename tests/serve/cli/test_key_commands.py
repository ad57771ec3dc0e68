"""``halfeven keys`` as an operator uses it, and the client commands that send a key."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from halfeven.models.errors import BadInput, BadSetting
from halfeven.models.store.store import REFUSED, Store
from halfeven.serve.access.access_control import AccessControl
from halfeven.serve.access.client_key import VARIABLE, use_key_in
from halfeven.serve.access.keys import KeyFile
from halfeven.serve.bench.benched_model import ask as ask_for_bench
from halfeven.serve.bench.command import Plan, bench
from halfeven.serve.cli.client import predict_file
from halfeven.serve.cli.main import app
from halfeven.serve.finetune.client.remote import Remote
from typer.testing import CliRunner, Result

from tests.patience import PATIENCE_S
from tests.serve.conftest import front_of, make_roster, running


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


@pytest.mark.slow
def test_the_client_commands_send_the_key_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = KeyFile(tmp_path / "keys.json")
    key, _ = file.add("ci", ["infer", "train"])
    roster = make_roster()
    (tmp_path / "x.json").write_text(json.dumps({"instances": [[1, 2, 3, 4]]}))
    front = front_of(roster, access=AccessControl(file))
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


@pytest.mark.slow
def test_the_command_line_and_what_only_looks_at_a_store_import_nothing_heavy(tmp_path: Path) -> None:
    with Store(tmp_path).draft("net") as draft:
        draft.publish(REFUSED, {"forms": {}, "half": None, "reason": "", "notes": []})
    asked = (
        "import sys; from halfeven.serve.cli.main import app; from typer.testing import CliRunner\n"
        f"done = CliRunner().invoke(app, ['models', '--store', {str(tmp_path)!r}]); assert 'net' in done.stdout\n"
        "assert not {'numpy', 'pydantic'} & set(sys.modules)\n"
        "done = CliRunner().invoke(app, ['convert', 'nothing.onnx']); assert 'does not exist' in done.stderr\n"
        "print(sorted({'torch', 'fastapi', 'onnx'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_first_key_and_the_last_revocation_say_that_they_close_running_servers(tmp_path: Path) -> None:
    store = ("--store", tmp_path)
    first = run("add", "one", *store)
    assert "first key of" in first.output and "refuses requests without a key" in first.output
    assert "first key of" not in (second := run("add", "two", *store)).output and second.exit_code == 0
    assert "no key is left" not in run("revoke", "one", *store).output
    last = run("revoke", "two", *store)
    assert (
        "no key is left" in last.output
        and "remove the file and start the server again" in last.output.replace("\n", " ")
    )
    third = facts_of(run("add", "three", *store, "--json"))
    assert third["note"] is None, "the file was there: the servers are closed already"
    assert "no key is left" in facts_of(run("revoke", "three", *store, "--json"))["note"]
    (tmp_path / "keys.json").unlink()
    assert "first key of" in facts_of(run("add", "four", *store, "--json"))["note"]


def test_a_refused_command_says_how_to_send_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = KeyFile(tmp_path / "keys.json")
    file.add("ci", ["infer"])
    front = front_of(make_roster(), access=AccessControl(file))
    rows = tmp_path / "rows.json"
    rows.write_text('{"instances": [[1, 2, 3, 4]]}')
    with running(front) as address:
        for key, words in (("", "it is not set"), ("hek_000000000000_x", "is none of this server's")):
            monkeypatch.setenv(VARIABLE, key)
            for ask in (
                lambda: predict_file(f"http://{address}", "double", rows),
                lambda: Remote(f"http://{address}").job("ftjob-1"),
                lambda: ask_for_bench(f"http://{address}/v2/models/double", {}),
            ):
                with pytest.raises(BadInput) as refused:
                    ask()
                assert VARIABLE in str(refused.value) and "--key-file" in str(refused.value)
                assert words in str(refused.value)


@pytest.mark.parametrize("key", [b"hek\0x", "hek€".encode(), b"\0" * 5000, b"hek \x7fx"])
def test_a_key_that_no_header_can_carry_is_refused(
    key: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    (tmp_path / "key").write_bytes(key)
    with pytest.raises(BadSetting, match="expected one"):
        use_key_in(tmp_path / "key")
