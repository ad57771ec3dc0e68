"""Keys: made once, kept as digests, found in constant time, and never half written."""

import hmac
import os
import stat
import threading
from pathlib import Path

import pytest
from halfeven.models.errors import (
    BadInput,
    Conflict,
    DamagedFile,
    HalfevenError,
    StoreUnusable,
    UnknownName,
)
from halfeven.serve.access import keys as keys_module
from halfeven.serve.access.keys import KeyFile


@pytest.fixture
def file(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "store" / "keys.json")


def test_the_file_has_the_digest_of_a_key_and_never_the_key(file: KeyFile) -> None:
    key, record = file.add("ci", ["infer"])
    content = file.path.read_text()
    assert record.sha256 in content and key not in content and key.split("_", 2)[2] not in content
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert len(key.split("_", 2)[2]) >= 43, "256 bits"


def test_a_key_is_found_by_all_of_its_text_and_by_nothing_else(file: KeyFile) -> None:
    key, record = file.add("ci", ["infer", "metrics"], ["digits"], 2.5, 4)
    other, _ = file.add("other", ["manage"])
    found = file.read()
    assert found is not None and found.find(key) == record
    assert (record.scopes, record.models, record.rate, record.concurrency) == (
        ("infer", "metrics"),
        ("digits",),
        2.5,
        4,
    )
    wrong = [key[:-1], key + "x", key.upper(), "", "hek__", f"hek_{record.id}_", other.replace("_", "-")]
    wrong.append(f"hek_{record.id}_{other.split('_', 2)[2]}")
    assert [one for one in wrong if found.find(one)] == []


def test_digests_are_compared_in_constant_time_for_known_and_unknown_keys(
    file: KeyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, record = file.add("ci", ["infer"])
    compared: list[str] = []
    compare_digest = hmac.compare_digest

    def compare(left: str, right: str) -> bool:
        compared.append(right)
        return compare_digest(left, right)

    monkeypatch.setattr(keys_module.hmac, "compare_digest", compare)
    found = file.read()
    assert found is not None
    assert [bool(found.find(one)) for one in (key, key + "x", "hek_000000000000_x", "nonsense")] == [
        True, False, False, False,
    ]  # fmt: skip
    assert compared[:2] == [record.sha256] * 2 and len(compared) == 4


def test_a_revoked_key_is_gone_by_its_name_or_its_id_and_others_stay(file: KeyFile) -> None:
    made = {name: file.add(name, ["infer"]) for name in ("one", "two", "three")}
    assert file.revoke("one") == made["one"][1]
    assert file.revoke(made["two"][1].id) == made["two"][1]
    left = file.read()
    assert left is not None
    assert [left.find(key) is not None for key, _ in made.values()] == [False, False, True]
    with pytest.raises(UnknownName, match="no key 'one'"):
        file.revoke("one")
    file.revoke("three")
    assert (left := file.read()) is not None and not left.by_id, "an empty file, and not none"


def test_a_word_that_is_one_key_s_name_and_another_one_s_identifier_revokes_neither(file: KeyFile) -> None:
    _, first = file.add("one", ["infer"])
    _, second = file.add(first.id, ["infer"])
    with pytest.raises(Conflict, match=rf"'one' \(identifier {first.id}\) and '{first.id}'"):
        file.revoke(first.id)
    assert file.revoke(second.id) == second and file.revoke(first.id) == first


def test_keys_that_are_made_at_once_are_all_kept(file: KeyFile) -> None:
    threads = [threading.Thread(target=file.add, args=(f"key{i}", ["infer"])) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = file.read()
    assert found is not None and len(found.by_id) == 8


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("../x", ["infer"]), "key name"),
        (("x", []), "--scope"),
        (("x", ["root"]), "--scope root"),
        (("x", ["infer"], ["a/b"]), "--model 'a/b'"),
        (("x", ["infer"], ["*"]), "--model"),
        (("x", ["infer"], [], 0.0), "--rate"),
        (("x", ["infer"], [], float("nan")), "--rate"),
        (("x", ["infer"], [], None, 0), "--concurrency"),
    ],
)
def test_what_is_no_key_is_refused_and_nothing_is_written(
    file: KeyFile, arguments: tuple[object, ...], words: str
) -> None:
    with pytest.raises(BadInput) as refused:
        file.add(*arguments)  # type: ignore[arg-type]
    assert words in str(refused.value)
    assert file.read() is None


def test_a_name_is_given_once(file: KeyFile) -> None:
    file.add("ci", ["infer"])
    with pytest.raises(Conflict, match="'ci'"):
        file.add("ci", ["manage"])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b'{"format": 2, "keys": []}',
        b'{"format": 1, "keys": [{}]}',
        b'{"format": 1, "keys": [{"id": "a", "name": "b", "sha256": "c", "scopes": ["infer"]}]}',
        b'{"format": 1, "keys": [1]}',
        *(
            b'{"format": 1, "keys": [{"id": "a", "name": "b", "sha256": "%s", "scopes": ["infer"], "models": %s}]}'
            % (b"0" * 64, models)
            for models in (b'""', b'"abc"', b'{"abc": 1}', b"null")
        ),
        b'{"format": 1, "keys": {"a": 1}}',
        bytes(range(192, 256)),
    ],
)
def test_a_file_that_is_none_of_ours_is_refused_by_name(file: KeyFile, content: bytes) -> None:
    file.path.parent.mkdir()
    file.path.write_bytes(content)
    with pytest.raises(DamagedFile, match=r"keys\.json"):
        file.read()


def test_a_file_that_every_user_may_write_is_refused(file: KeyFile) -> None:
    file.add("ci", ["infer"])
    file.path.chmod(0o666)
    with pytest.raises(DamagedFile, match="every user may write"):
        file.read()


def test_a_pipe_or_a_folder_in_the_place_of_the_file_ends_in_a_sentence(file: KeyFile) -> None:
    file.path.parent.mkdir()
    os.mkfifo(file.path)
    with pytest.raises(StoreUnusable, match="not a regular file"):
        file.read()
    file.path.unlink()
    file.path.mkdir()
    with pytest.raises(HalfevenError):
        file.read()
    with pytest.raises(HalfevenError):
        file.add("ci", ["infer"])


def test_a_file_that_is_mounted_as_a_link_is_read(file: KeyFile) -> None:
    file.add("ci", ["infer"])
    real = file.path.rename(file.path.parent / "mounted")
    file.path.symlink_to(real)
    assert (found := file.read()) is not None and len(found.by_id) == 1


def test_a_folder_that_cannot_be_made_ends_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnusable):
        KeyFile(tmp_path / "file" / "keys.json").add("ci", ["infer"])


def test_a_key_that_is_revoked_by_a_link_is_gone_from_the_file_itself(file: KeyFile) -> None:
    revoked, _ = file.add("old", ["infer"])
    link = file.path.parent.parent / "keys.json"
    link.symlink_to(file.path)
    KeyFile(link).revoke("old")
    made, _ = KeyFile(link).add("new", ["infer"])
    left = file.read()
    assert left is not None and left.find(revoked) is None and left.find(made) is not None
    assert link.is_symlink()


def test_a_loop_of_symbolic_links_is_refused(file: KeyFile) -> None:
    file.path.parent.mkdir()
    file.path.symlink_to(file.path)
    with pytest.raises(StoreUnusable, match="cannot be opened"):
        file.add("ci", ["infer"])
