"""The store as the commands find it: damaged, not theirs, or no store at all."""

from pathlib import Path

import pytest
from halfeven.models.errors import StoreUnusable
from halfeven.models.store.store import LIVE, Store, Version
from halfeven.serve import server

from tests.command_line import run

FACTS = {"half": None, "forms": {}, "reason": "", "notes": []}


def published(store: Path, name: str) -> Version:
    with Store(store).draft(name) as draft:
        (draft.folder / "original.onnx").write_bytes(b"as it was written")
        return draft.publish(LIVE, FACTS)


COMMANDS = [
    ("convert", "FOLDER", "--store"), ("serve", "--port", "0", "--store"), ("models", "--store"),
    ("rollback", "net", "--store"), ("parity", "net", "--store"), ("tune", "net", "--store"),
    ("samples", "net", "FOLDER", "out.safetensors", "--store"), ("demo", "--store"), ("selftest", "--store"),
    ("promote", "net@1", "--store"),
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_file_in_the_stores_place_is_a_plain_message(command: tuple[str, ...], tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.write_text("a file")
    code, facts, reply = run(*(str(tmp_path) if word == "FOLDER" else word for word in command), store)
    assert (code, facts["code"]) == (2, "store_unusable")
    assert f"the store {store} cannot be used: it is not a folder" in facts["error"].replace("\n", "")
    assert "Traceback" not in reply and "--store" in facts["error"]


KEPT = {
    "convert": "the new version", "rollback": "which version is active", "promote": "which version is active",
    "demo": "its versions", "tune": "the winner", "selftest": "what is wrong on this device",
}  # fmt: skip


@pytest.mark.parametrize("command", [one for one in COMMANDS if one[0] in (*KEPT, "serve")])
def test_a_store_that_cannot_be_written_is_a_plain_message(command: tuple[str, ...], tmp_path: Path) -> None:
    """Below /proc nobody may write, whatever user the tests run as."""
    code, facts, _ = run(*(str(tmp_path) if word == "FOLDER" else word for word in command), "/proc/store")
    assert (code, facts["code"]) == (2, "store_unusable")
    assert "read and write" in facts["error"]
    assert command[0] == "serve" or f"{KEPT[command[0]]} is to be kept there" in facts["error"]
    assert ("--state" in facts["error"]) == (command[0] in ("tune", "selftest"))


def test_checking_a_store_leaves_nothing_behind(tmp_path: Path) -> None:
    Store(tmp_path / "store").check("a version")
    assert list(tmp_path.iterdir()) == []


def test_one_damaged_manifest_hides_no_other_model(tmp_path: Path) -> None:
    bad, good = published(tmp_path, "bad"), published(tmp_path, "good")
    published(tmp_path, "bad")
    (bad.folder / "manifest.json").write_text("{")
    code, facts, reply = run("models", "--store", tmp_path)
    assert code == 0 and facts["models"].keys() == {"bad", "good"}
    assert [one["status"] for one in facts["models"]["good"]] == [good.status]
    assert [one["status"] for one in facts["models"]["bad"]] == ["damaged", LIVE]
    (fault,) = facts["damaged"]["bad"]
    assert str(bad.folder / "manifest.json") in fault and "good" not in facts["damaged"]
    assert str(bad.folder / "manifest.json") in reply


@pytest.mark.parametrize("text", ['{"status": "live", "digest": "", "files": {}}', "[]"])
def test_a_manifest_that_lacks_something_is_damaged_too(text: str, tmp_path: Path) -> None:
    bad = published(tmp_path, "bad")
    (bad.folder / "manifest.json").write_text(text)
    code, facts, _ = run("models", "--store", tmp_path)
    assert code == 0 and facts["models"]["bad"][0]["status"] == "damaged"
    assert str(bad.folder / "manifest.json") in facts["damaged"]["bad"][0]


def test_a_damaged_file_of_the_active_version_is_listed(tmp_path: Path) -> None:
    version = published(tmp_path, "net")
    Store(tmp_path).promote(version)
    assert run("models", "--check", "--store", tmp_path)[1]["damaged"] == {}
    (version.folder / "original.onnx").write_bytes(b"as it is now")
    assert run("models", "--store", tmp_path)[1]["damaged"] == {}, (
        "no large file is read unless that is asked for"
    )
    (fault,) = run("models", "--check", "--store", tmp_path)[1]["damaged"]["net"]
    assert f"{version.folder / 'original.onnx'} is damaged" in fault
    (version.folder / "original.onnx").unlink()
    (fault,) = run("models", "--store", tmp_path)[1]["damaged"]["net"]
    assert f"{version.folder / 'original.onnx'} cannot be read" in fault


def test_a_damaged_alias_hides_no_other_model(tmp_path: Path) -> None:
    for name in ("bad", "good"):
        published(tmp_path, name)
    (tmp_path / "models" / "bad" / "live").write_text("nonsense")
    code, facts, _ = run("models", "--store", tmp_path)
    assert code == 0 and len(facts["models"]["good"]) == 1
    assert "must hold one version number" in facts["damaged"]["bad"][0]


def test_a_rollback_passes_over_a_damaged_version(tmp_path: Path) -> None:
    first, second, third = (published(tmp_path, "net") for _ in range(3))
    Store(tmp_path).promote(third)
    (second.folder / "manifest.json").write_text("{")
    code, facts, _ = run("rollback", "net", "--store", tmp_path)
    assert (code, facts["version"]) == (0, first.number)


@pytest.mark.parametrize("target", ["victim", "absent"])
def test_the_lock_is_not_opened_through_a_symbolic_link(target: str, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("kept")
    store = tmp_path / "store"
    store.mkdir()
    (store / "server.lock").symlink_to(tmp_path / target)
    with pytest.raises(StoreUnusable, match=r"server.lock cannot be opened: it is a symbolic link"):
        server.alone_with(Store(store))
    assert (tmp_path / "victim").read_text() == "kept" and not (tmp_path / "absent").exists()
