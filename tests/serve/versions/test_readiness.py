"""A server is ready by the stated rule; a fault of one model leaves the others and the server alone."""

import errno
import os
import re
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
from halfeven.models.errors import BadSetting, NotReady, UnknownName
from halfeven.models.store.store import Store
from halfeven.serve.settings import read_settings
from halfeven.serve.versions.readiness import Readiness

from tests.patience import until
from tests.serve.conftest import ASKED
from tests.serve.versions.traffic.conftest import Versions, call, infer, publish, serving, spec
from tests.serve.versions.traffic.conftest import store as store
from tests.serve.versions.traffic.conftest import versions as versions


@pytest.mark.parametrize(
    ("required", "there", "at_start", "ready", "unloaded", "missing"),
    [
        ((), (), (), (), (), []),
        ((), ("a", "b"), ("a", "b"), ("a", "b"), (), []),
        ((), ("a", "b"), ("a",), ("a",), (), []),  # b failed: its own fault
        ((), ("a", "b"), ("a", "b"), ("a",), (), ["b"]),
        ((), ("a", "b"), ("a", "b"), ("a",), ("b",), []),
        ((), ("a", "b"), (), (), (), ["a", "b"]),  # nothing could be made ready
        ((), ("a", "b"), (), ("b",), (), []),
        (("c",), (), (), (), (), ["c"]),
        (("c",), ("a",), ("a",), ("a",), (), ["c"]),
        (("c", "c"), ("a",), ("a",), ("a", "c"), (), []),
        (("b",), ("a", "b"), ("a",), ("a",), (), ["b"]),
        (("b",), ("a", "b"), ("a", "b"), ("a",), ("b",), ["b"]),  # an order unloaded what is required
    ],
)
def test_the_rule(
    required: Collection[str], there: Collection[str], at_start: Collection[str], ready: Collection[str],
    unloaded: Collection[str], missing: list[str],
) -> None:  # fmt: skip
    readiness = Readiness(required)
    readiness.started(there, at_start)
    assert readiness.missing(ready, unloaded) == missing


def test_a_deleted_model_counts_only_where_it_is_required() -> None:
    for required, missing in (((), []), (("a",), ["a"])):
        readiness = Readiness(required)
        readiness.started(["a"], ["a"])
        readiness.forget("a")
        assert readiness.missing((), ()) == missing


def copied(store: Store, files: Collection[str], name: str = "copy") -> None:
    """A part of the model `net`, in another folder, with its alias."""
    source, target = store.root / "models" / "net", store.root / "models" / name
    (target / "1").mkdir(parents=True, exist_ok=True)
    (target / "live").write_text("1\n")
    for file in files:
        shutil.copy(source / "1" / file, target / "1" / file)


@pytest.mark.slow
@pytest.mark.parametrize(
    "first", [(), ("manifest.json",), ("spec.json",)], ids=["nothing", "manifest", "spec"]
)
def test_a_model_that_is_being_copied_is_its_own_fault_and_serves_when_it_is_whole(
    store: Store, versions: Versions, first: Collection[str]
) -> None:
    with serving(store) as (address, roster):
        copied(store, first)
        until(lambda: roster.fault("copy") is not None)
        assert call(address, "/v2/health/ready")[0] == 200
        fault = roster.fault("copy") or ""
        assert "copy/1/" in fault and "where the folder is still being copied, wait" in fault
        with pytest.raises(NotReady, match="model 'copy' is not ready"):
            roster.find("copy")
        (entry,) = [one for one in roster.index() if one[0] == "copy"]
        assert entry[2] == "UNAVAILABLE" and entry[3] == fault
        everything = [path.name for path in (store.root / "models" / "net" / "1").iterdir()]
        copied(store, everything)
        until(lambda: roster.served("copy") is not None and roster.fault("copy") is None)
        status, answer = call(address, "/v2/models/copy")
        assert status == 200 and answer["name"] == "copy", "it answers under its folder's name"


@pytest.mark.slow
def test_a_start_beside_a_model_that_is_half_copied_is_ready_with_the_others(
    store: Store, versions: Versions
) -> None:
    copied(store, ["manifest.json"])
    with serving(store) as (address, roster):
        assert call(address, "/v2/health/ready")[0] == 200 and roster.fault("copy") is not None
    with serving(store, require="net,copy") as (address, _):
        status, answer = call(address, "/v2/health/ready")
        assert status == 503
        (reason,) = answer["reasons"]
        for words in ("model 'copy' is not served", "spec.json", "still being copied", "tried again"):
            assert words in reason, reason
        everything = [path.name for path in (store.root / "models" / "net" / "1").iterdir()]
        copied(store, everything)
        until(lambda: call(address, "/v2/health/ready")[0] == 200)


@pytest.mark.slow
def test_a_model_whose_folder_cannot_be_listed_is_its_own_fault_and_the_others_are_followed(
    store: Store, versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.promote(publish(store, of=spec(name="bad")))
    shut, listed = store.root / "models" / "bad", Path.iterdir

    def iterdir(path: Path) -> Iterator[Path]:
        if path == shut:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    with serving(store) as (address, roster):
        assert call(address, "/v2/health/ready")[0] == 200
        assert "cannot be listed" in (roster.fault("bad") or "")
        assert call(address, "/v2/repository/index", {})[0] == 200
        store.promote(store.version("net", 2))
        until(lambda: infer(address) == "2")
    shutil.rmtree(store.root / "models" / "net")
    with serving(store) as (address, _):
        status, answer = call(address, "/v2/health/ready")
        assert status == 503 and "cannot be listed" in answer["reasons"][0]


@pytest.mark.slow
def test_a_look_that_fails_is_not_the_last_one(
    store: Store, versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, failed = store.names, list[bool]()

    def damaged() -> list[str]:
        failed.append(True)
        raise ValueError("'utf-8' codec can't decode byte 0xff")

    with serving(store) as (address, roster):
        monkeypatch.setattr(roster.store, "names", damaged)
        until(lambda: failed)
        monkeypatch.setattr(roster.store, "names", names)
        store.promote(store.version("net", 2))
        until(lambda: infer(address) == "2")


@pytest.mark.slow
def test_a_required_model_that_is_nowhere_is_named_with_what_to_do(store: Store, versions: Versions) -> None:
    with serving(store, require="net,absent") as (address, _):
        status, answer = call(address, "/v2/health/ready")
        assert status == 503
        assert answer["reasons"] == [
            "model 'absent' is not served: it is not in the store: convert it into the store or copy it there, or "
            "start without --require for it"
        ]
        store.promote(publish(store, of=spec(name="absent")))
        until(lambda: call(address, "/v2/health/ready")[0] == 200)


@pytest.mark.slow
def test_a_required_model_that_an_order_unloaded_is_missed_with_the_way_back(
    store: Store, versions: Versions
) -> None:
    for require, status in (("", 200), ("net", 503)):
        with serving(store, require=require) as (address, roster):
            roster.unload("net")
            said, answer = call(address, "/v2/health/ready")
            assert said == status
            if require:
                assert answer["reasons"] == [
                    "model 'net' is not served: it was unloaded by an order; POST /v2/repository/models/net/load "
                    "loads it"
                ]
            roster.load("net")
            assert call(address, "/v2/health/ready")[0] == 200


@pytest.mark.slow
def test_a_deleted_model_is_gone_from_every_answer_and_comes_back_when_it_does(
    store: Store, versions: Versions, tmp_path: Path
) -> None:
    store.promote(publish(store, of=spec(name="other")))
    store.promote(store.version("net", 2))
    with serving(store) as (address, roster):
        assert call(address, "/v2/models/net/infer", ASKED)[0] == 200
        (store.root / "models" / "net").rename(tmp_path / "away")
        until(lambda: not roster.knows("net"))
        seen = [
            call(address, "/v2/repository/index", {})[1],
            call(address, "/metrics")[1],
            call(address, "/v1/models")[1],
            call(address, "/")[1],
            call(address, "/v2/models/stats")[1],
        ]
        assert [re.search(r"\bnet\b", str(one)) for one in seen] == [None] * len(seen)
        assert all("other" in str(one) for one in seen)
        assert call(address, "/v2/models/net/infer", ASKED)[0] == 404
        assert call(address, "/v2/health/ready")[0] == 200
        until(lambda: versions.halves[2].closed)
        with pytest.raises(UnknownName):
            roster.find("net")
        (tmp_path / "away").rename(store.root / "models" / "net")
        until(lambda: roster.served("net") is not None)
        assert call(address, "/v2/models/net/infer", ASKED)[0] == 200


@pytest.mark.slow
def test_where_the_folder_of_all_models_is_away_what_is_loaded_goes_on(
    store: Store, versions: Versions, tmp_path: Path
) -> None:
    with serving(store) as (_, roster):
        (store.root / "models").rename(tmp_path / "away")
        for _ in range(3):
            roster.look()
        assert roster.served("net") is not None
        (tmp_path / "away").rename(store.root / "models")


@pytest.mark.slow
def test_a_model_that_two_renames_replace_is_served_without_a_gap(
    store: Store, versions: Versions, tmp_path: Path
) -> None:
    with serving(store) as (_, roster):
        roster._threads.clear()  # the looks are the test's own
        roster._stopping.set()
        (store.root / "models" / "net").rename(tmp_path / "away")
        roster._stopping.clear()
        roster.look()
        (tmp_path / "away").rename(store.root / "models" / "net")
        roster.look()
        roster.look()
        assert roster.served("net") is not None


@pytest.mark.slow
def test_a_folder_that_was_copied_under_another_name_is_one_model_of_that_name(
    store: Store, versions: Versions
) -> None:
    shutil.copytree(store.root / "models" / "net", store.root / "models" / "twin")
    with serving(store) as (address, _):
        for name in ("net", "twin"):
            status, answer = call(address, f"/v2/models/{name}/infer", ASKED)
            assert status == 200 and answer["model_name"] == name
        metrics = call(address, "/metrics")[1]
        counted = [line for line in metrics.splitlines() if line.startswith("nv_inference_count{")]
        assert len(counted) == len({line.split("}")[0] for line in counted}) == 2
        assert sum('model="twin"' in line for line in counted) == 1


def test_a_name_that_is_none_is_no_required_model() -> None:
    assert read_settings(require="a, b").required == ["a", "b"]
    with pytest.raises(BadSetting, match="is no model's name"):
        read_settings(require="a,../b")
