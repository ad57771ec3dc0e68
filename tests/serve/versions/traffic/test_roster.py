"""Load, unload, drain, swap: with real HTTP around, and versions that load at once."""

import asyncio
import gc
import json
import re
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from halfeven.models.errors import BadInput, EngineFailed, NotReady, UnknownName
from halfeven.models.store.store import REFUSED, Store, Version
from halfeven.serve.batching.interface import PreparedVersion
from halfeven.serve.batching.place import Place
from halfeven.serve.versions.loading.release import give_back
from halfeven.serve.versions.orders import record
from halfeven.serve.versions.traffic.loaded_version import LoadedVersion, drain
from torch.fx import graph_module

from tests.patience import PATIENCE_S, until
from tests.serve.versions.traffic.conftest import (
    Versions,
    attached,
    call,
    infer,
    publish,
    serving,
    spec,
    traffic,
)

THREADS = ["halfeven-choices", "halfeven-cpu", "halfeven-finetune", "halfeven-roster", "halfeven-watch"]


@pytest.mark.slow
def test_what_was_unloaded_refuses_with_words_and_comes_back_when_loaded(
    store: Store, versions: Versions
) -> None:
    with serving(store) as (address, roster):
        assert infer(address) == "1"
        roster.unload("net")
        assert versions.halves[1].closed and versions.originals[1].closed
        with pytest.raises(UnknownName, match="has no available versions: it was unloaded"):
            roster.find("net")
        assert roster.index() == [("net", "1", "UNAVAILABLE", "unloaded")]
        assert roster.ready, "what was unloaded on purpose does not make the server unready"
        roster.look()
        assert versions.loads[1] == 1, "looking at the store does not load it again"
        roster.unload("net")
        roster.load("net")
        assert infer(address) == "1"
        assert roster.index() == [("net", "1", "READY", "")]


def test_a_lost_device_is_named_where_readiness_is_asked(store: Store, versions: Versions) -> None:
    with serving(store) as (address, roster):
        roster.place.thread.lose("CUDA error: an illegal memory access was encountered")
        status, answer = call(address, "/v2/health/ready")
        assert status == 503 and "illegal memory access" in answer["error"]


@pytest.mark.slow
def test_an_unload_ends_when_the_store_says_something_new(store: Store, versions: Versions) -> None:
    with serving(store) as (address, roster):
        roster.unload("net")
        store.promote(store.version("net", 2))
        until(lambda: roster.active("net") == "2")
        assert infer(address) == "2"


@pytest.mark.slow
def test_unloading_answers_what_waits_before_it_closes(store: Store, versions: Versions) -> None:
    with serving(store) as (address, roster), ThreadPoolExecutor(8) as pool:
        thread = roster.place.thread
        thread.hold()
        batcher = roster.find("net").batcher
        waiting = [pool.submit(infer, address) for _ in range(4)]
        until(lambda: batcher.waiting == 4)
        unloading = pool.submit(roster.unload, "net")
        until(lambda: call(address, "/v2/models/net/infer", {})[0] in (400, 404))
        assert not versions.halves[1].closed
        thread.release()
        assert [one.result(PATIENCE_S) for one in waiting] == ["1"] * 4
        unloading.result(PATIENCE_S)
        assert versions.halves[1].closed


@pytest.mark.slow
def test_a_version_that_cannot_be_loaded_leaves_the_old_one_serving(store: Store, versions: Versions) -> None:
    versions.refuse[2] = EngineFailed("it does not run here")
    with serving(store) as (address, roster):
        store.promote(store.version("net", 2))
        with pytest.raises(EngineFailed, match="does not run here"):
            roster.load("net")
        assert infer(address) == "1"
        until(lambda: roster.fault("net", 2) is not None)
        del versions.refuse[2]
        roster.load("net")
        assert infer(address) == "2"
        assert roster.fault("net") is None


@pytest.mark.slow
def test_where_every_half_was_refused_the_original_of_a_version_that_waits_for_its_promotion_does_not_serve(
    tmp_path: Path, versions: Versions
) -> None:
    """Version 2 was learnt from version 1: nobody promoted it, and a restart does not either."""
    store = Store(tmp_path / "store")
    publish(store, REFUSED)
    publish(store, awaits_promotion=True, gate={"passed": True})
    publish(store, REFUSED, awaits_promotion=True)
    with serving(store) as (address, _):
        assert infer(address) == "1"


@pytest.mark.slow
def test_loading_what_is_loaded_does_nothing_and_a_config_loads_it_anew(
    store: Store, versions: Versions
) -> None:
    with serving(store) as (address, roster):
        roster.load("net")
        assert versions.loads[1] == 1
        first = versions.halves[1]
        roster.load("net", {"max_batch_size": 2, "max_queue_size": 7})
        assert first.closed
        assert roster.find("net").spec.max_batch_size == 2
        assert roster.find("net").spec.batching.max_queue_size == 7
        assert infer(address) == "1"
        with pytest.raises(BadInput, match="max_batch_size of 'net' was proven from 1 to 8, got 9"):
            roster.load("net", {"max_batch_size": 9})
        assert roster.find("net").spec.max_batch_size == 2
        roster.load("net")
        assert roster.find("net").spec.max_batch_size == 8, "what a load sets holds until the next"
        with pytest.raises(UnknownName):
            roster.load("nobody")
        with pytest.raises(UnknownName):
            roster.unload("nobody")


@pytest.mark.slow
def test_a_version_is_found_by_number_label_and_digest(store: Store, versions: Versions) -> None:
    with serving(store) as (address, roster):
        store.promote(store.version("net", 2))
        until(lambda: roster.active("net") == "2")
        digest = store.version("net", 1).digest
        for version in ("1", "previous", digest[:8], digest):
            assert infer(address, version=version) == "1"
        assert infer(address, version="stable") == "2"
        for version in ("3", "canary", digest[:7], "g" * 8):
            with pytest.raises(UnknownName, match=r"loaded are 2 \(stable\), 1 \(previous\)"):
                roster.find("net", version)
        assert roster.find("net", "1").spec is roster.find("net").spec, (
            "codecs are kept by the spec's identity"
        )
        assert roster.index() == [("net", "1", "READY", ""), ("net", "2", "READY", "")]


@pytest.mark.slow
def test_while_a_version_is_made_ready_the_index_says_loading_and_others_go_on(
    store: Store, versions: Versions
) -> None:
    other = publish(store, of=spec(name="other"))
    store.promote(other)
    with serving(store) as (address, roster):
        versions.gate = threading.Event()
        store.promote(store.version("net", 2))
        until(lambda: ("net", "2", "LOADING", "") in roster.index())
        assert ("net", "1", "READY", "") in roster.index()
        assert infer(address) == "1"
        roster.unload("other")
        assert ("other", "1", "UNAVAILABLE", "unloaded") in roster.index()
        versions.gate.set()
        until(lambda: roster.active("net") == "2")


@pytest.mark.slow
def test_a_model_that_is_published_while_another_is_made_ready_is_not_unknown_meanwhile(
    store: Store, versions: Versions
) -> None:
    with serving(store) as (_, roster):
        versions.gate = threading.Event()
        store.promote(store.version("net", 2))
        until(lambda: ("net", "2", "LOADING", "") in roster.index())
        store.promote(publish(store, of=spec(name="new")))
        with pytest.raises(NotReady, match="'new' is being made ready"):
            roster.find("new")
        versions.gate.set()
        until(lambda: roster.active("new") == "1")


@pytest.mark.slow
def test_an_alias_that_moved_on_while_its_version_was_made_ready_is_not_obeyed(
    store: Store, versions: Versions
) -> None:
    with serving(store) as (address, roster):
        versions.gate = threading.Event()
        store.promote(store.version("net", 2))
        until(lambda: ("net", "2", "LOADING", "") in roster.index())
        store.promote(store.version("net", 1))
        versions.gate.set()
        until(lambda: versions.loads[2] == 1 and versions.halves[2].closed)
        assert infer(address) == "1"
        assert versions.halves[2].runs == 0


@pytest.mark.slow
def test_swaps_rollbacks_loads_and_unloads_under_traffic_fail_nobody_and_leave_nothing(
    store: Store, versions: Versions, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "halfeven")  # a log that keeps its records must keep no version by that
    of_others = set(threading.enumerate())  # tests in this process before this one
    with serving(store, keep_previous_seconds=0.0) as (address, roster):
        kept = weakref.WeakSet[object]()
        other = publish(store, of=spec(name="other"))
        store.promote(other)
        with traffic(address) as callers:
            for _ in range(2):
                for step in ("promote", "rollback"):
                    kept.update(roster.find("net").loaded_versions())  # type: ignore[union-attr]
                    body = {"version": 2} if step == "promote" else {}
                    status, answer = call(address, f"/v1/models/net/{step}", body)
                    assert status == 200, answer
                    assert roster.active("net") == ("2" if step == "promote" else "1")
                before = callers.by_version["1"]
                until(lambda before=before: callers.by_version["1"] > before)
                roster.load("other")
                roster.unload("other")
        assert (callers.failed, callers.faults) == (0, [])
        assert callers.by_version["2"] > 0
        assert attached(roster) == 2, "the batcher active and the one that checks it"
        names = [thread.name for thread in threading.enumerate() if thread not in of_others]
        ours = sorted(name for name in names if name.startswith("halfeven"))
        assert ours in (THREADS, sorted([*THREADS, "halfeven-judge_0"])), "no thread per version"
        gc.unfreeze()
        gc.collect()
        assert not kept, "no version that was replaced is left"


def test_a_version_that_is_stuck_at_the_shutdown_holds_up_no_other_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def drained() -> None:
        other_is_drained = asyncio.Event()

        async def wait(_: str) -> None:
            await other_is_drained.wait()

        async def end(_: str) -> None:
            other_is_drained.set()

        stuck, other = SimpleNamespace(drain=wait), SimpleNamespace(drain=end)
        await drain(cast(list[LoadedVersion], [stuck, other]), 2.0)

    asyncio.run(drained())
    assert caplog.records == [], "nothing waited to its deadline"


def test_while_everything_shuts_down_new_requests_are_told_so(store: Store, versions: Versions) -> None:
    with serving(store) as (_, roster):
        served = roster.find("net")
    with pytest.raises(NotReady, match="the server is shutting down"):
        served.submit([np.zeros((1, 4), np.float32)], 1)


@pytest.mark.slow
def test_a_server_that_ends_while_a_version_is_made_ready_ends_that_and_blames_no_model(
    store: Store, versions: Versions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun = threading.Event()
    with serving(store) as (_, roster):

        def making(version: Version, place: Place, replaces: PreparedVersion | None) -> PreparedVersion:
            begun.set()
            assert roster._stopping.wait(PATIENCE_S)
            place.call(lambda: None)
            pytest.fail("the device thread was asked for more")

        monkeypatch.setattr("halfeven.serve.versions.roster.make_ready", making)
        store.promote(store.version("net", 2))
        assert begun.wait(PATIENCE_S)
        caplog.set_level("INFO")
    assert "'net' was not made ready: the server is shutting down" in caplog.text
    assert [one.message for one in caplog.records if one.levelname == "ERROR"] == []


def test_sources_that_torch_keeps_of_closed_programs_are_forgotten() -> None:
    graph = torch.fx.symbolic_trace(torch.nn.ReLU())
    kept = graph_module._loader.eval_cache
    assert kept
    give_back()
    assert not kept
    assert graph(torch.tensor(-1.0)) == 0.0, "what is still loaded runs on"


@pytest.mark.slow
def test_no_answer_says_where_the_store_lies(versions: Versions, tmp_path: Path) -> None:
    store = Store(tmp_path / "rooms of ann" / "her place")
    store.promote(publish(store))
    with serving(store) as (address, roster):
        published = publish(store)
        damaged = published.folder
        (damaged / "manifest.json").write_text("damaged")
        store.promote(published)
        record(store, "net", "made_up", f"{damaged} is damaged")
        until(lambda: roster.fault("net"))
        asked = {
            path: json.dumps(call(address, f"/v1/models/net{path}")[1])
            for path in ("", "/versions", f"/versions/{published.number}", "/events")
        }
    for path, answer in asked.items():
        assert "manifest.json" in answer or "is damaged" in answer, (path, answer)
        assert not {"rooms", "ann", "her", "place"} & {*re.findall(r"\w+", answer)}, (path, answer)


def test_no_request_lists_the_original_store(
    store: Store, versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store may have a thousand models: the thread that follows it visits each of their folders, requests do not."""
    listed, names = list[str](), Store.names

    def counted(of: Store) -> list[str]:
        listed.append(threading.current_thread().name)
        return names(of)

    monkeypatch.setattr(Store, "names", counted)
    with serving(store) as (address, _):
        for path in ("infer", "ready", "config"):
            status, answer = call(address, f"/v2/models/nett/{path}", {} if path == "infer" else None)
            assert status == 404 and "it has ['net']" in answer["error"], answer
        assert [one["id"] for one in call(address, "/v1/models", None)[1]["data"]] == ["net"]
        assert call(address, "/v1/models/net/versions/1/lineage", None)[0] == 200
        assert {*listed} <= {"halfeven-roster"}, listed
