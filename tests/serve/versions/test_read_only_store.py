"""A store that may not be written: it is served from, state is kept elsewhere, what needs the store is refused."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from halfeven.models.errors import BadSetting, StoreUnusable
from halfeven.models.store.store import Store
from halfeven.serve.server import build
from halfeven.serve.settings import read_settings
from halfeven.serve.versions.read_only_store import LinkedStore, state_folder

from tests.patience import until
from tests.serve.versions.traffic.conftest import Versions, call, infer, publish, serving, spec
from tests.serve.versions.traffic.conftest import store as store
from tests.serve.versions.traffic.conftest import versions as versions


@pytest.fixture
def read_only(store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Store]:
    """The store, as if its folder were mounted read-only: a test may run as root, to whom modes are nothing."""
    made, opened, root = tempfile.TemporaryFile, os.open, str(store.root)

    def temporary(*arguments: Any, **more: Any) -> Any:
        if str(more.get("dir")).startswith(root):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(more["dir"]))
        return made(*arguments, **more)

    def open_(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if (
            flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            and os.fspath(path) == str(path)
            and str(path).startswith(root)
        ):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return opened(path, flags, *more, **named)

    monkeypatch.setattr(tempfile, "TemporaryFile", temporary)
    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield store


def files_in(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file below, with its time and size."""
    found = {}
    for path in sorted(folder.rglob("*")):
        facts = path.lstat()
        found[str(path.relative_to(folder))] = facts.st_mtime_ns, facts.st_size
    return found


@pytest.mark.slow
def test_a_read_only_store_is_served_and_nothing_is_written_into_it(
    read_only: Store, versions: Versions, tmp_path: Path
) -> None:
    before = files_in(read_only.root)
    with serving(read_only) as (address, roster):
        assert infer(address) == "1"
        assert call(address, "/v2/health/ready")[0] == 200
        roster.decisions.record("net", "noted", "an event")
        assert call(address, "/v1/models/net/events")[1]["events"][0]["message"] == "an event"
        assert call(address, "/v1/models/net/canary", {"version": 2, "percent": 50})[0] == 200
    assert files_in(read_only.root) == before
    (state,) = (tmp_path / "cache" / "halfeven" / "state").iterdir()
    assert {"events.jsonl", "rollout.json"} <= {path.name for path in (state / "models/net").iterdir()}
    with serving(read_only) as (_, roster):  # the state holds after a restart
        until(lambda: len(roster.all()[0].loaded_versions()) == 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/models/net/promote", {"version": 2}, 409, "net@2 is not promoted"),
        ("/v1/models/net/rollback", {}, 409, "'net' is not rolled back"),
        ("/v1/files", {}, 501, "nothing is trained here"),
        ("/v1/fine_tuning/jobs", {"model": "net"}, 501, "nothing is trained here"),
        ("/v1/fine_tuning/jobs/validate", {"model": "net"}, 501, "nothing is trained here"),
    ],
)
def test_what_needs_the_store_is_refused_by_name(
    store: Store, versions: Versions, tmp_path: Path, path: str, body: Any, status: int, words: str
) -> None:
    with serving(store, state=tmp_path / "state") as (address, _):
        found, answer = call(address, path, body)
        assert found == status and words in answer["detail"] and "only reads the store" in answer["detail"]
        assert infer(address) == "1"


@pytest.mark.slow(seconds=4)
def test_the_server_follows_what_others_do_in_the_store(
    store: Store, versions: Versions, tmp_path: Path
) -> None:
    with serving(store, state=tmp_path / "state") as (address, roster):
        assert infer(address) == "1"
        store.promote(store.version("net", 2))
        until(lambda: infer(address) == "2")
        store.promote(publish(store, of=spec(name="other")))
        until(lambda: roster.served("other") is not None)
        shutil.rmtree(store.root / "models" / "other")
        until(lambda: not roster.knows("other"))
        assert infer(address) == "2"


def test_a_version_that_this_server_took_back_stays_so_until_the_store_names_another(
    store: Store, tmp_path: Path
) -> None:
    linked = LinkedStore(store, tmp_path / "state")
    store.promote(store.version("net", 2))
    linked.follow()
    assert linked.store.live_number("net") == 2
    linked.store.promote_over(2, linked.store.version("net", 1), "trial")
    for one in (linked, LinkedStore(store, tmp_path / "state")):  # after a restart too
        one.follow()
        assert one.store.live_number("net") == 1
    (tmp_path / "state/models/net/.live-of-the-store").write_bytes(b"\xff")  # damaged: it names nothing
    store.promote(store.version("net", 3))
    linked.follow()
    assert linked.store.live_number("net") == 3


def test_what_was_measured_and_proven_before_is_taken_over_once(store: Store, tmp_path: Path) -> None:
    proofs = store.root / "models" / "net" / "proofs-1.json"
    proofs.write_text("[]")
    linked = LinkedStore(store, tmp_path / "state")
    linked.follow()
    kept = tmp_path / "state" / "models" / "net" / "proofs-1.json"
    assert kept.read_text() == "[]"
    kept.write_text("[1]")
    proofs.write_text("[2]")
    linked.follow()
    assert kept.read_text() == "[1]", "from then on this server's own"


def test_a_tuning_reaches_a_server_that_only_reads_the_store_each_time_it_is_made(
    store: Store, tmp_path: Path
) -> None:
    tuned, linked = store.root / "models/net/tuned", LinkedStore(store, tmp_path / "state")
    tuned.mkdir()

    def written(text: str, at_s: int) -> None:
        for name in ("cpu.json", "setups-cpu.json"):
            (tuned / name).write_text(text)
            os.utime(tuned / name, (at_s, at_s))

    def kept() -> list[str]:
        linked.follow()
        here = tmp_path / "state/models/net/tuned"
        return [(here / name).read_text() for name in ("cpu.json", "setups-cpu.json")]

    written("first", 100)
    assert kept() == ["first", "first"]
    written("second", 200)  # by a machine whose clock is far behind
    assert kept() == ["second", "first"], "a server's own setups stay"
    (tmp_path / "state/models/net/tuned/cpu.json").write_text("corrected here")
    assert kept()[0] == "corrected here"


def test_a_model_with_a_file_that_cannot_be_read_costs_the_others_nothing(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.promote(publish(store, of=spec(name="other")))
    (store.root / "models" / "net" / "proofs-1.json").write_bytes(bytes(65 * 2**20))
    linked = LinkedStore(store, tmp_path / "state")
    for _ in range(2):
        linked.follow()
        assert [linked.store.live_number(name) for name in ("net", "other")] == [1, 1]
    assert [record.getMessage()[:33] for record in caplog.records] == ["net cannot be read from the store"]


def test_a_store_that_is_away_for_a_moment_takes_nothing_along(store: Store, tmp_path: Path) -> None:
    linked = LinkedStore(store, tmp_path / "state")
    linked.follow()
    (store.root / "models").rename(tmp_path / "away")
    linked.follow()
    assert linked.store.names() == [] and (tmp_path / "state/models/net/live").exists()
    (tmp_path / "away").rename(store.root / "models")
    linked.follow()
    assert linked.store.live_number("net") == 1


def test_a_model_that_one_look_misses_keeps_what_this_server_wrote(store: Store, tmp_path: Path) -> None:
    """Its folder is replaced by two renames, and a look falls between them."""
    linked = LinkedStore(store, tmp_path / "state")
    linked.follow()
    note = tmp_path / "state/models/net/drifted-1.json"
    note.write_text("{}")
    (store.root / "models/net").rename(tmp_path / "away")
    linked.follow()
    assert note.exists()
    (tmp_path / "away").rename(store.root / "models/net")
    linked.follow()
    assert note.exists()
    shutil.rmtree(store.root / "models/net")
    linked.follow()
    linked.follow()
    assert not note.parent.exists()


def test_the_state_of_one_store_is_not_taken_for_another_store(store: Store, tmp_path: Path) -> None:
    """The two stores have a net@1 each, and the links in the state folder lead to the first store."""
    LinkedStore(store, tmp_path / "state").follow()
    other = Store(tmp_path / "other")
    other.promote(publish(other, of=spec(), source={"source": "another"}, report="another"))
    with pytest.raises(
        BadSetting, match=f"state of the store {store.root}, and not of {other.root}.*--state"
    ):
        LinkedStore(other, tmp_path / "state")
    store.root.rename(tmp_path / "away")  # then the links lead nowhere
    with pytest.raises(BadSetting, match=f"state of the store {store.root}, and not of {other.root}"):
        LinkedStore(other, tmp_path / "state")


def test_a_state_that_cannot_be_compared_is_not_called_that_of_other_versions(
    store: Store, tmp_path: Path
) -> None:
    LinkedStore(store, tmp_path / "state").follow()
    (tmp_path / "state/models/net/.digests-of-the-store").unlink()  # as an earlier release left it
    moved = Store(store.root.rename(tmp_path / "elsewhere"))
    with pytest.raises(BadSetting, match="nothing shows that both are the same"):
        LinkedStore(moved, tmp_path / "state")


def test_a_store_that_is_mounted_elsewhere_keeps_its_state(store: Store, tmp_path: Path) -> None:
    linked = LinkedStore(store, tmp_path / "state")
    linked.follow()
    (note := tmp_path / "state/models/net/drifted-1.json").write_text("{}")
    moved = Store(store.root.rename(tmp_path / "elsewhere"))
    linked = LinkedStore(moved, tmp_path / "state")
    linked.follow()
    assert note.exists() and linked.store.numbers("net") == moved.numbers("net")
    assert (tmp_path / "state/models/net/1").readlink() == moved.root / "models/net/1"


def test_where_the_state_goes(
    store: Store, read_only: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tmp_path / "given"
    assert state_folder(read_only, given) == given
    found = state_folder(read_only, None)
    assert found is not None and found.parent == tmp_path / "cache" / "halfeven" / "state"
    monkeypatch.undo()
    assert state_folder(store, None) is None
    with pytest.raises(StoreUnusable):
        state_folder(Store(store.root / "models" / "net" / "live"), None)


def test_a_state_folder_that_cannot_be_written_ends_the_start_with_a_sentence(
    store: Store, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    settings = read_settings(store=store.root, state=tmp_path / "file", device="cpu")
    with pytest.raises(BadSetting, match=r"the state folder .* cannot be written"):
        build(settings, store)
