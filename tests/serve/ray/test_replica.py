"""One replica without a cluster: what it answers, refuses and asks the one writer. Nothing runs in Ray."""

import asyncio
import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from halfeven.models.errors import BadSetting, NotReady
from halfeven.models.store.store import Store
from halfeven.serve.access.keys import NAME_IN_STORE, KeyFile
from halfeven.serve.server import alone_with

from tests.patience import until
from tests.serve.conftest import running
from tests.serve.ray.handle import Handle
from tests.serve.versions.traffic.conftest import call

pytestmark = [
    pytest.mark.slow,  # Ray takes seconds to import
    pytest.mark.filterwarnings("ignore"),  # Ray's own
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: halfeven[ray]"),
]
X = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}


@pytest.fixture
def source(converted: Path, tmp_path: Path) -> Store:
    return Store(shutil.copytree(converted, tmp_path / "store"))


@contextmanager
def replica(source: Store, **settings: Any) -> Iterator[tuple[str, Any]]:
    """The address of the replica's application, and the replica."""
    from halfeven.serve.ray import Options
    from halfeven.serve.ray.one_writer import OneWriter
    from halfeven.serve.ray.replica import Replica

    cache = source.root.with_name("copy")
    options = Options(store=str(source.root), cache=cache, settings={"device": "cpu", **settings})
    made, writer = object.__new__(Replica), OneWriter(options)
    try:
        asyncio.run(made.__init__(options, Handle(writer)))  # type: ignore[arg-type]
        with running(made._front, seconds=30) as address:
            yield address, made
    finally:
        writer._lock.close()


def test_a_replica_answers_and_its_orders_are_written_to_the_store(source: Store) -> None:
    with replica(source, expose_without_auth=True) as (address, made):
        made.check_health()
        assert call(address, "/v2/models/net/infer", X)[1]["model_version"] == "1"
        assert call(address, "/v1/models/net/promote", {"version": 2})[0] == 200
        assert call(address, "/v2/models/net/infer", X)[1]["model_version"] == "2"
        assert source.live_number("net") == 2
        assert call(address, "/v1/models/net/promote", {"version": 9})[0] == 404
        assert call(address, "/v1/models/net/rollback", {})[0] == 200 and source.live_number("net") == 1
        with pytest.raises(BadSetting, match="another server has the store"):
            alone_with(source)


def test_a_model_that_cannot_be_served_keeps_a_new_replica_from_callers_and_ends_no_old_one(
    source: Store,
) -> None:
    damaged = source.root / "models/net/1/half.pt2"
    original = damaged.read_bytes()
    damaged.write_bytes(original[:-1] + b"?")
    with (
        replica(source, expose_without_auth=True) as (_, made),
        pytest.raises(NotReady, match=r"net@1 cannot be copied .*half\.pt2 is damaged"),
    ):
        made.check_health()
    damaged.write_bytes(original)
    with replica(source, expose_without_auth=True) as (address, made):
        made.check_health()
        broken = source.root / "models/net/3"
        shutil.copytree(source.root / "models/net/2", broken)
        (broken / "half.pt2").write_bytes(b"?")
        until(lambda: made._copy.faults() != [])
        made.check_health()
        assert call(address, "/v2/models/net/infer", X)[0] == 200


def test_an_order_outlives_the_loss_of_the_writer_and_a_writer_that_stays_away_is_said() -> None:
    from halfeven.serve.ray.one_writer import RemoteWriter

    followed: list[None] = []
    asked: list[tuple[Any, ...]] = []

    def write(*given: Any) -> tuple[Any, None]:
        asked.append(given)
        return 7, None

    def remote(lost: int) -> RemoteWriter:
        handle: Any = Handle(SimpleNamespace(write=write), lost)
        return RemoteWriter(handle, lambda: followed.append(None))

    remote(lost=3).promote("net", 2)
    assert asked == [("promote", "net", (2,))] and followed == [None]
    remote(lost=3).promote_over("net", None, 2, "operator")
    assert asked.pop() == ("promote_over", "net", (None, 2, "operator"))
    with pytest.raises(NotReady, match="the store's writer does not answer"):
        remote(lost=4).promote("net", 1)
    with pytest.raises(NotReady, match="may have been carried out: GET /v1/models/net says so"):
        remote(lost=1).roll_back("net")  # sent twice it might go back twice
    assert len(asked) == 1


@pytest.mark.parametrize("word", ["false", "no", "0", False, None])
def test_a_word_for_no_opens_nothing(word: Any, source: Store, tmp_path: Path) -> None:
    from halfeven.serve.ray import Options

    options = Options(store=str(source.root), cache=tmp_path, settings={"expose_without_auth": word})
    with pytest.raises(BadSetting):
        options.server_settings()


def test_a_replica_needs_keys_or_a_word(source: Store) -> None:
    with (
        pytest.raises(BadSetting, match=r"may listen beyond this machine, and .* has no key"),
        replica(source),
    ):
        pass
    KeyFile(source.root / NAME_IN_STORE).add("first", ["infer"])
    with replica(source) as (address, _):
        assert call(address, "/v2/models/net/infer", X)[0] == 401


def test_options_that_are_not_those_of_a_replica_are_refused() -> None:
    from halfeven.serve.ray import Options, app

    with pytest.raises(ValueError, match="expected an absolute path or a URL"):
        Options(store="store")
    with pytest.raises(BadSetting, match="--parity-sample = 7"):
        app(Options(store="/store", settings={"parity_sample": 7}))
    with pytest.raises(BadSetting, match="settings: access_log, port: for `halfeven serve` alone"):
        Options(store="/store", settings={"port": 1, "access_log": True}).server_settings()


def test_the_file_of_the_page_is_taken_by_ray_serve() -> None:
    from halfeven.serve.ray import Options, app
    from ray.serve.schema import ServeDeploySchema

    page = (Path(__file__).parents[3] / "docs/ray.md").read_text()
    written = ServeDeploySchema(**yaml.safe_load(page.split("```yaml\n")[1].split("```")[0]))
    (one,) = written.applications
    assert one.import_path == f"{app.__module__.rpartition('.')[0]}:app"
    app(Options(**one.args))


@pytest.mark.parametrize(
    ("path", "way_out"),
    [
        ("/v1/files", "run `halfeven finetune NAME --data FILE --ray APP`"),
        ("/v1/fine_tuning/jobs", "run `halfeven finetune NAME --data FILE --ray APP`"),
        ("/v2/repository/models/net/load", "POST /v1/models/net/promote or /rollback"),
        ("/v2/repository/models/net/unload", "POST /v1/models/net/promote or /rollback"),
    ],
)
def test_what_one_process_alone_can_do_is_refused_with_the_way_out(
    path: str, way_out: str, source: Store
) -> None:
    with replica(source, expose_without_auth=True) as (address, _):
        status, answer = call(address, path, {})
        assert (status, way_out in str(answer)) == (501, True), answer
        assert call(address, "/v2/models/net/infer", X)[0] == 200
