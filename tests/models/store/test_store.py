"""The store: a draft becomes a version by one rename or vanishes; what is damaged is refused by name."""

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
from halfeven.models.errors import BadInput, Conflict, DamagedFile, HalfevenError, UnknownName
from halfeven.models.files.durable import _locked_file
from halfeven.models.spec.spec import Dim, ModelSpec, TensorSpec
from halfeven.models.store.manifest import sha256_of
from halfeven.models.store.promotions import was_cut_off
from halfeven.models.store.store import LIVE, REFUSED, Store, Version
from safetensors.numpy import save_file

from tests.patience import PATIENCE_S


def publish(
    store: Store,
    name: str = "net",
    status: str = LIVE,
    text: str = "hello",
    facts: Mapping[str, Any] | None = None,
) -> Version:
    with store.draft(name) as draft:
        (draft.folder / "source").mkdir()
        (draft.folder / "source/model.py").write_text(text)
        draft.write_json("spec.json", {"text": text})
        save_file({"x": np.arange(3)}, draft.folder / "samples.safetensors")
        return draft.publish(status, {"half": "fp16", **(facts or {})})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def hidden(store: Store) -> list[str]:
    return [path.name for path in store.root.rglob(".*")]


WRITER = """
import sys, time
from pathlib import Path
from halfeven.models.store.store import Store
with Store(Path(sys.argv[1])).draft("net") as draft:
    print(draft.folder, flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
def test_the_draft_of_a_dead_process_is_deleted_and_that_of_a_living_one_stays(store: Store) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(store.root)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        dead, living = [Path(writer.stdout.readline().strip()) for writer in writers if writer.stdout]
        writers[0].kill()
        writers[0].wait(PATIENCE_S)
        assert dead.is_dir() and living.is_dir()
        with store.draft("another"):  # a machine that only converts has no server that would do it
            assert not dead.exists() and living.is_dir()
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()


def test_a_published_version_has_its_files_its_facts_and_their_digests(store: Store) -> None:
    version = publish(store)
    assert (version.name, version.number, version.status, str(version)) == ("net", 1, LIVE, "net@1")
    assert version.folder == store.root / "models/net/1"
    assert version.json("spec.json") == {"text": "hello"} and version.manifest["half"] == "fp16"
    manifest = json.loads((version.folder / "manifest.json").read_text())
    files = {p.relative_to(version.folder).as_posix(): p for p in version.folder.rglob("*") if p.is_file()}
    del files["manifest.json"]
    assert manifest["files"] == {name: sha256_of(path) for name, path in files.items()}
    assert manifest["files"].keys() == {"source/model.py", "spec.json", "samples.safetensors"}
    assert version.has("source/model.py") and not version.has("half.pt2")


def test_facts_cannot_pretend_another_status(store: Store) -> None:
    with store.draft("net") as draft:
        assert draft.publish(REFUSED, {"status": LIVE, "files": {}, "digest": ""}).status == REFUSED


def test_the_digest_is_that_of_the_files_whatever_the_number(store: Store) -> None:
    one, same, other = publish(store), publish(store), publish(store, text="other")
    assert one.digest == same.digest != other.digest
    assert [version.number for version in (one, same, other)] == [1, 2, 3]


def test_publishing_is_one_rename_of_a_folder_that_is_whole(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[list[str], list[int]]] = []
    rename = Path.rename

    def watched(path: Path, target: Path) -> Path:
        seen.append((sorted(p.name for p in path.rglob("*") if p.is_file()), store.numbers("net")))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", watched)
    publish(store)
    assert seen == [(["manifest.json", "model.py", "samples.safetensors", "spec.json"], [])]


def test_everything_is_on_the_disk_before_the_rename(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: Counter[str] = Counter()
    fsync, rename = os.fsync, Path.rename

    def watched(handle: int) -> None:
        synced[Path(f"/proc/self/fd/{handle}").readlink().name] += 1
        fsync(handle)

    def renamed(path: Path, target: Path) -> Path:
        synced["(rename)"] = len(synced)
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", watched)
    monkeypatch.setattr(Path, "rename", renamed)
    publish(store)
    names = list(synced)
    before, after = names[: names.index("(rename)")], names[names.index("(rename)") + 1 :]
    assert {"source", "model.py", "spec.json", "samples.safetensors", "manifest.json"} < set(before)
    assert any(name.startswith(".draft-") for name in before) and after == ["net", "models", store.root.name]


def test_a_draft_that_is_not_published_vanishes(store: Store) -> None:
    with store.draft("net") as draft:
        draft.write_json("spec.json", {})
        assert store.names() == [] and store.numbers("net") == []
    assert not (store.root / "models/net").exists()
    with pytest.raises(RuntimeError, match="mine"), store.draft("net"):
        raise RuntimeError("mine")
    assert not (store.root / "models/net").exists() and store.names() == []


def test_a_draft_begins_while_another_one_of_a_new_model_vanishes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(**given: Any) -> str:
        monkeypatch.undo()
        (store.root / "models/net").rmdir()  # what the end of the other draft does here
        return tempfile.mkdtemp(**given)

    monkeypatch.setattr(tempfile, "mkdtemp", late)
    assert publish(store).number == 1


def test_a_draft_that_fails_leaves_earlier_versions_alone(store: Store) -> None:
    publish(store)
    with pytest.raises(ValueError), store.draft("net") as draft:
        draft.write_json("spec.json", {"x": float("nan")})
    assert store.numbers("net") == [1] and hidden(store) == []


def test_threads_that_publish_at_once_get_a_number_each(store: Store) -> None:
    barrier = Barrier(8)

    def one(i: int) -> Version:
        with store.draft("net") as draft:
            draft.write_json("spec.json", {"i": i})
            barrier.wait(timeout=PATIENCE_S)
            return draft.publish(LIVE, {})

    with ThreadPoolExecutor(8) as pool:
        versions = list(pool.map(one, range(8)))
    assert sorted(version.number for version in versions) == list(range(1, 9))
    assert {version.json("spec.json")["i"] for version in versions} == set(range(8))
    assert hidden(store) == []


def test_of_two_conversions_of_one_folder_at_once_one_version_is_published(store: Store) -> None:
    with store.draft("net") as first, store.draft("net") as second, store.draft("net") as other:
        one = first.publish(LIVE, {"fingerprint": "a"}, twins_after=0)
        assert second.publish(LIVE, {"fingerprint": "a"}, twins_after=0).number == one.number == 1
        assert other.publish(LIVE, {"fingerprint": "b"}, twins_after=0).number == 2
    with store.draft(
        "net"
    ) as again:  # the first one was known, and is made again because a file of it is damaged
        assert again.publish(LIVE, {"fingerprint": "a"}, twins_after=2).number == 3
    assert store.numbers("net") == [1, 2, 3] and hidden(store) == [".promoting"]


def test_a_number_that_another_process_took_first_is_not_taken_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other publishes between the look at the numbers and the rename."""
    code = "import sys; from pathlib import Path; from halfeven.models.store.store import Store\n"
    code += "with Store(Path(sys.argv[1])).draft('net') as draft: draft.publish('live', {'who': 'other'})"
    rename = Path.rename

    def late(path: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "rename", rename)
        subprocess.run([sys.executable, "-c", code, str(store.root)], check=True, timeout=PATIENCE_S)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", late)
    version = publish(store)
    assert version.number == 2 and store.numbers("net") == [1, 2]
    assert store.version("net", 1).manifest["who"] == "other"


def test_what_is_not_a_version_is_no_version(store: Store) -> None:
    publish(store)
    folder = store.root / "models/net"
    for name in ("02", "²", "3x", ".draft-abc"):
        (folder / name).mkdir()
    (folder / "2").write_text("a file")
    (store.root / "models/empty").mkdir()
    assert store.numbers("net") == [1] and store.names() == ["net"]
    assert publish(store).number == 3


def test_promotion_writes_one_number_and_only_that(store: Store) -> None:
    first, second = publish(store), publish(store)
    assert store.live("net") is None and store.live_number("net") is None
    store.promote(second)
    assert (store.root / "models/net/live").read_text() == "2\n"
    store.promote(first)
    live = store.live("net")
    assert live is not None and live.number == 1
    assert hidden(store) == [".promoting"], "the lock of the alias"


def test_a_refused_version_is_kept_but_never_made_active(store: Store) -> None:
    store.promote(publish(store))
    refused = publish(store, status=REFUSED)
    with pytest.raises(Conflict, match="net@2 was refused"):
        store.promote(refused)
    assert store.live_number("net") == 1
    assert store.newest("net") == refused and refused.json("spec.json") == {"text": "hello"}


def test_rollback_goes_to_the_newest_earlier_version_that_was_not_refused(store: Store) -> None:
    for status in (LIVE, LIVE, REFUSED, LIVE):
        publish(store, status=status)
    store.promote(store.version("net", 4))
    assert store.rollback("net").number == 2
    assert store.live_number("net") == 2
    assert store.rollback("net").number == 1
    with pytest.raises(Conflict, match="no version before 1"):
        store.rollback("net")
    assert store.live_number("net") == 1


def test_rollback_passes_over_what_waits_for_its_promotion_until_somebody_promoted_it(store: Store) -> None:
    publish(store)
    held = publish(store, facts={"awaits_promotion": True})
    store.promote(publish(store))
    assert store.rollback("net").number == 1
    store.promote(held)
    store.promote(store.version("net", 3))
    assert store.rollback("net").number == 2


def test_a_promotion_over_another_version_than_the_active_one_is_refused(store: Store) -> None:
    one, two, three = publish(store), publish(store), publish(store)
    store.promote_over(None, one, "test")
    with pytest.raises(Conflict, match="the place of version None, but version 1 is active"):
        store.promote_over(None, two, "test")
    store.promote_over(1, two, "test")
    store.rollback("net")
    with pytest.raises(Conflict, match="version 1 is active"):
        store.promote_over(2, three, "test")
    assert store.live_number("net") == 1


@pytest.mark.slow
def test_a_conversion_that_promotes_late_does_not_go_before_a_version_that_was_published_later(
    store: Store,
) -> None:
    versions = []
    for _ in range(3):
        with store.draft("net") as draft:
            versions.append(draft.publish(LIVE, {}))
    assert store.promote_published(versions[1], "conversion")
    assert not store.promote_published(versions[0], "conversion"), "its process was slower"
    assert store.live_number("net") == 2 and set(store.promotions("net")) == {2}
    assert store.promote_published(versions[2], "conversion") and store.live_number("net") == 3


def test_of_many_who_promote_over_one_version_at_once_one_does(store: Store) -> None:
    """Processes and threads: each compares and moves in one step."""
    base = publish(store)
    store.promote(base)
    others = [publish(store) for _ in range(6)]
    code = "import sys; from pathlib import Path; from halfeven.models.store.store import Store\n"
    code += "from halfeven.models.errors import Conflict\nstore = Store(Path(sys.argv[1]))\n"
    code += (
        "version = store.version('net', int(sys.argv[2]))\nprint('ready', flush=True)\nsys.stdin.read(1)\n"
    )
    code += (
        "try: store.promote_over(1, version, 'process'); print('moved')\nexcept Conflict: print('refused')"
    )
    start = [sys.executable, "-c", code, str(store.root)]
    pipe = subprocess.PIPE
    racers = [subprocess.Popen([*start, str(n)], stdin=pipe, stdout=pipe, text=True) for n in (2, 3)]
    for racer in racers:
        assert racer.stdout is not None and racer.stdout.readline() == "ready\n"
    barrier = Barrier(len(others) - 2)

    def race(version: Version) -> bool:
        barrier.wait(PATIENCE_S)
        try:
            store.promote_over(1, version, "thread")
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(len(others)) as pool:
        threads = pool.map(race, others[2:])
        words = [racer.communicate("x", timeout=PATIENCE_S)[0].strip() for racer in racers]
        moved = [*threads].count(True) + words.count("moved")
    assert moved == 1
    assert store.promotions("net")[store.live_number("net") or 0]["last"]["over"] == 1


def test_each_version_s_first_and_last_promotion_are_kept(store: Store) -> None:
    one, two = publish(store), publish(store)
    for version, by in ((one, "conversion"), (two, "operator"), (one, "rollback"), (two, "operator")):
        store.promote(version, by)
    found = store.promotions("net")
    assert {
        number: [(one[key]["over"], one[key]["by"]) for key in ("first", "last")]
        for number, one in found.items()
    } == {
        1: [(None, "conversion"), (2, "rollback")],
        2: [(1, "operator"), (1, "operator")],
    }
    for text in (
        "[",
        '{"1": {"first": 1, "last": 1}}',
        '{"1": {"first": {"by": "operator"}}}',
        "[" * 100_000,
    ):
        (store.root / "models/net/promotions.json").write_text(text)
        with pytest.raises(DamagedFile, match=r"promotions\.json cannot be read.*remove it"):
            store.rollback("net")


def test_rollback_of_a_name_that_nobody_knows_says_which_there_are(store: Store) -> None:
    publish(store, "other")
    with pytest.raises(UnknownName, match=r"'net'.*\['other'\]"):
        store.rollback("net")


@pytest.mark.parametrize("number", ["1" + "0" * 17 + "7", "0" * 17 + "12", "1" * 5000, "01", "", "-1", "²"])
def test_a_number_is_taken_whole_or_refused(number: str, store: Store) -> None:
    with store.draft("net") as draft:
        assert draft.publish(LIVE, {}).number == 1
    assert store.numbered("net", "1").number == 1
    with pytest.raises(UnknownName, match=r"has no version .* it has \[1\]") as refused:
        store.numbered("net", number)
    assert len(str(refused.value)) < 120


def test_unknown_versions_and_impossible_names_are_refused(store: Store) -> None:
    publish(store)
    with pytest.raises(UnknownName, match=r"no version 7: it has \[1\]"):
        store.version("net", 7)
    for name in ("", "..", "../net", "a/b", ".hidden", "net\n"):
        assert store.numbers(name) == []
        with pytest.raises(BadInput, match="not a model name"):
            store.live_number(name)


@pytest.mark.parametrize("file", ["spec.json", "samples.safetensors", "source/model.py"])
def test_a_damaged_file_is_refused_by_name(file: str, store: Store) -> None:
    version = publish(store)
    path = version.folder / file
    assert version.file(file) == path
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedFile, match=f"{path} is damaged.*restore"):
        version.file(file)


def test_a_text_that_a_killed_process_was_writing_is_removed_and_one_that_is_written_stays(
    store: Store,
) -> None:
    store.promote(publish(store))
    killed = """
import os, signal, sys
from pathlib import Path
from halfeven.models.files import durable

os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
durable.replace_text(Path(sys.argv[1]), "2")
"""
    model = store.root / "models/net"
    subprocess.run([sys.executable, "-c", killed, str(model / "live")], check=False)
    handle, written = _locked_file(model / "live")
    left = {path.name for path in model.glob(".live-*")}
    assert len(left) == 2
    store.remove_dead_drafts()
    assert {path.name for path in model.glob(".live-*")} == {Path(written).name}
    os.close(handle)
    store.remove_dead_drafts()
    assert not list(model.glob(".live-*")) and store.live_number("net") == 1
    assert (model / ".promoting").exists(), "a lock is no text"


def test_who_removes_dead_texts_never_takes_one_that_is_just_being_renamed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store)
    rename = Path.replace

    def after_a_removal(path: Path, target: Path) -> Path:
        store.remove_dead_drafts()
        return rename(path, target)

    monkeypatch.setattr(Path, "replace", after_a_removal)
    store.promote(store.version("net", 1))
    assert store.live_number("net") == 1


def test_a_missing_file_is_refused_by_name(store: Store) -> None:
    version = publish(store)
    (version.folder / "spec.json").unlink()
    with pytest.raises(DamagedFile, match=r"spec\.json cannot be read"):
        version.json("spec.json")
    with pytest.raises(DamagedFile, match=r"net@1 has no file 'half.pt2'.*spec\.json"):
        version.file("half.pt2")


SPEC = ModelSpec(
    "net", (TensorSpec("x", "FP32", (Dim(), Dim.parse(4))),), (TensorSpec("y", "FP32", (Dim(),)),)
)


def test_a_spec_with_a_value_of_another_kind_is_refused_by_name(store: Store) -> None:
    """The digest of the damaged spec is right: it was made of that spec."""
    whole = SPEC.to_json()
    places = [(whole, key) for key in whole if key != "name"]
    places += [(side[0], key) for side in (whole["inputs"], whole["outputs"]) for key in side[0]]
    places += [(whole[key], inner) for key in ("parity", "batching") for inner in whole[key]]
    taken = []
    for place, key in places:
        kept, place[key] = place[key], {"a": []}
        with store.draft("net") as draft:
            draft.write_json("spec.json", whole)
            version = draft.publish(LIVE, {"half": "fp16"})
        place[key] = kept
        try:
            version.spec()
        except DamagedFile as error:
            assert str(version.folder / "spec.json") in str(error)
        else:
            taken.append(key)
    assert taken == []


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"status": "live"}', "\x00", '{"status":"live","digest":"","files":[]}', "[" * 100_000],
)
def test_a_damaged_manifest_is_refused_by_name(text: str, store: Store) -> None:
    path = publish(store).folder / "manifest.json"
    path.write_text(text)
    with pytest.raises(DamagedFile, match=str(path)):
        store.version("net", 1)
    path.unlink()
    with pytest.raises(DamagedFile, match=str(path)):
        store.version("net", 1)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("status", "livf", "its status is 'livf'"),
        ("status", [], "its status is"),
        ("files", {"spec.json": 1}, "a digest of a file is no text"),
        ("files", {"spec.json": "0" * 64}, "its digest is not that of its files"),
        ("digest", "0" * 64, "its digest is not that of its files"),
        *(
            ("files", {name: "0" * 64}, "it names .*, which is no file of its folder")
            for name in (
                "../../net/2/spec.json",
                "/etc/hostname",
                "source/../../spec.json",
                "./spec.json",
                ".",
                "",
                "a\0b",
            )
        ),
        ("forms", {"torch": {"passed": "false"}}, "its forms are not each passed or refused"),
        ("forms", [], "its forms are not"),
    ],
)
def test_a_manifest_with_a_changed_value_is_refused_by_name(
    key: str, value: object, words: str, store: Store
) -> None:
    path = publish(store).folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(DamagedFile, match=f"{path} is damaged: {words}"):
        store.version("net", 1)


def test_an_alias_of_a_version_that_is_not_there_is_named(store: Store) -> None:
    publish(store)
    alias = store.root / "models/net/live"
    alias.write_text("3")
    with pytest.raises(DamagedFile, match=rf"{alias} names version 3, and the model has \[1\]"):
        store.live("net")


@pytest.mark.parametrize("text", ["", "one", "1 2", "-1", "0", "²"])
def test_a_damaged_alias_is_refused_by_name(text: str, store: Store) -> None:
    publish(store)
    alias = store.root / "models/net/live"
    alias.write_text(text)
    with pytest.raises(DamagedFile, match=f"{alias} must hold one version number"):
        store.live_number("net")
    alias.unlink()
    alias.mkdir()
    with pytest.raises(DamagedFile, match=f"{alias} cannot be read.*one version number"):
        store.live_number("net")


def test_a_spec_that_is_not_json_is_refused_by_name(store: Store) -> None:
    with store.draft("net") as draft:
        (draft.folder / "spec.json").write_text("{")
        version = draft.publish(LIVE, {})
    with pytest.raises(DamagedFile, match=r"spec\.json is not JSON"):
        version.spec()


def test_a_spec_with_a_dimension_that_is_none_is_refused_by_name(store: Store) -> None:
    """An earlier release wrote a symbol of an ONNX file that no dimension may have."""
    written = SPEC.to_json()
    written["inputs"][0]["shape"][1] = "长度"
    with store.draft("net") as draft:
        draft.write_json("spec.json", written)
        version = draft.publish(LIVE, {})
    with pytest.raises(
        DamagedFile, match=r"spec\.json has not what a conversion writes.*the dimension '长度'"
    ):
        version.spec()


def test_others_may_read_what_was_published(store: Store) -> None:
    """safetensors and mkstemp write files that only their owner may read; the server may be another user."""
    umask = os.umask(0o077)
    try:
        version = publish(store)
        store.promote(version)
    finally:
        os.umask(umask)
    paths = [*version.folder.rglob("*"), version.folder, store.root / "models/net/live"]
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in paths}
    folders = {"source", "1"}
    assert modes == {name: 0o755 if name in folders else 0o644 for name in modes}


def test_inputs_of_callers_stay_private_in_a_version(store: Store) -> None:
    with store.draft("net") as draft:
        for name in ("samples.safetensors", "spec.json"):
            (draft.folder / name).write_text("{}")
        version = draft.publish(LIVE, {"samples": {"drifted": 1}})
    modes = [stat.S_IMODE(version.path(name).stat().st_mode) for name in ("samples.safetensors", "spec.json")]
    assert modes == [0o600, 0o644]


def test_a_store_that_does_not_exist_is_empty_and_reading_makes_nothing(store: Store) -> None:
    assert (store.names(), store.numbers("net"), store.newest("net"), store.live("net")) == (
        [],
        [],
        None,
        None,
    )
    assert not store.root.exists()


def test_a_model_whose_folder_cannot_be_listed_hides_no_other_one(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    shut, listed = publish(store, "bad").folder.parent, Path.iterdir
    publish(store)

    def iterdir(path: Path) -> Iterator[Path]:
        if path == shut:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert store.names() == ["bad", "net"]
    with pytest.raises(DamagedFile, match=r"models/bad cannot be listed .*let the user who"):
        store.numbers("bad")
    with pytest.raises(UnknownName, match="bad"):
        store.known("nobody")


def test_a_store_may_be_moved_whole(store: Store, tmp_path: Path) -> None:
    store.promote(publish(store))
    moved = Store(Path(shutil.move(store.root, tmp_path / "elsewhere")))
    live = moved.live("net")
    assert live is not None and live.json("spec.json") == {"text": "hello"}


@pytest.mark.parametrize(
    "file", ["live", "1/manifest.json", "promotions.json", ".x.unfinished", ".promoting", "1/spec.json"]
)
def test_a_pipe_in_the_store_is_not_waited_for(file: str, store: Store) -> None:
    version = publish(store)
    store.promote(version)
    path = version.folder.parent / file
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    store.remove_dead_drafts()
    for ask in (store.live, store.promotions, store.rollback, lambda name: store.version(name, 1).spec()):
        with suppress(HalfevenError):
            ask("net")


def test_a_version_whose_publisher_ended_is_told_from_one_that_was_taken_back(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(number: int) -> bool:
        return was_cut_off(store.promotions("net"), number, store.live_number("net"))

    versions = [publish(store, text=str(number)) for number in range(3)]
    assert cut_off(1), "nothing was recorded"
    store.promote(versions[0])
    assert not cut_off(1) and cut_off(2)
    with monkeypatch.context() as patch:
        patch.setattr("halfeven.models.store.store.replace_text", lambda *_: None)  # recorded, and no more
        store.promote(versions[1])
    assert cut_off(2)
    store.promote(versions[1])
    store.rollback("net")
    assert store.live_number("net") == 1 and not cut_off(2), "taken back by its operator"
