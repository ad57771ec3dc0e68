"""Fine-tuning for an application on Ray Serve: ``ray job submit … -- halfeven finetune NAME --data FILE --ray APP``.

Replicas do not train. The job, which Ray starts on a node with what it asks for, is a server of its own with a copy of
the model: it trains, converts, proves and judges there as every server does. What it made is then published in the
application's store, and its one writer makes it active where the version that was copied still is. Replicas take it up
as they take up every version.
"""

import logging
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import ray
from fsspec.implementations.local import LocalFileSystem
from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from ...models.errors import BadSetting, Conflict, DamagedFile, NotReady, UnknownName
from ...models.store.store import LIVE, Store, Version
from ...models.store.version_copy import copied_version
from ..access.client_key import VARIABLE
from ..access.keys import NAME_IN_STORE, SCOPES, KeyFile
from ..background_server import Server
from ..finetune.jobs.concluding import FINE_TUNING, by_hand
from ..finetune.jobs.records.job_types import STALE_PARENT
from ..settings import read_settings
from ..versions.loading.release import one_heap
from ..versions.store_copy import StoreCopy
from .one_writer import WRITER, RemoteWriter

_HERE = "127.0.0.1"
Facts = Mapping[str, Any]


@contextmanager
def connected(app: str) -> Iterator[RemoteWriter]:
    """The one writer of an application's store, by the application's name. Raises NotReady where there is no cluster,
    UnknownName where it has no such application."""
    if not os.environ.get("RAY_ADDRESS"):  # Ray would look for a cluster that ended long ago, for minutes
        raise NotReady(
            "--ray: the variable RAY_ADDRESS, which names the cluster, is not set: `ray job submit` sets it"
        )
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError) as error:
        raise NotReady(f"--ray: the cluster that RAY_ADDRESS names does not answer: {error}") from error
    try:
        yield RemoteWriter(_handle(app), lambda: None)
    finally:
        ray.shutdown()


def _handle(app: str) -> DeploymentHandle:
    try:
        return serve.get_deployment_handle(WRITER, app_name=app)
    except (RayServeException, KeyError) as error:
        raise UnknownName(
            f"--ray {app[:80]}: Ray Serve has no such application of halfeven; `serve status` names those that run"
        ) from error


@contextmanager
def own_server(writer: RemoteWriter, model: str) -> Iterator["OwnServer"]:
    """A server of this process over a copy of one model's versions; ``model``: NAME or NAME@VERSION. While it runs,
    clients in this process have its key.

    Raises NotReady as the writer, BadSetting for a store that is no folder, UnknownName, and DamagedFile where the
    active version cannot be copied.
    """
    url, name = writer.source(), model.partition("@")[0]
    fs, path = fsspec.core.url_to_fs(url)
    if not isinstance(fs, LocalFileSystem):
        raise BadSetting(
            f"--ray: the store of the application is {url}, and a job publishes into a folder that this node sees; "
            "train with `halfeven serve` and a store of its own, and copy the version into this one"
        )
    store = Store(Path(path))
    if not store.numbers(name):
        raise UnknownName(f"no model '{name[:80]}' in the store {path} as this node sees it: {store.names()}")
    with tempfile.TemporaryDirectory(prefix="halfeven-finetune-") as folder:
        copy = StoreCopy(url, Path(folder), only=name)
        copy.follow()
        over = copy.store.live_number(name)
        if over != store.live_number(name) and copy.faults():
            raise DamagedFile("; ".join(copy.faults()))
        with _serving(copy.store) as address:
            yield OwnServer(address, name, copy.store, store, over, writer)


class OwnServer:
    """``url``: where it listens, on loopback. ``over``: the version that was active when the store was copied."""

    def __init__(
        self, url: str, name: str, own: Store, store: Store, over: int | None, writer: RemoteWriter
    ) -> None:
        self.url, self._name, self._own, self._store = url, name, own, store
        self._over, self._writer = over, writer

    def published(self, facts: Facts) -> Facts:
        """Publish what a job made, and make it active where the job may. ``facts`` and what is returned: as
        `client.job_command.facts_of`, with the version's number in the application's store. Of a job that made no
        version, or one that the gate refused, nothing is published."""
        facts = {**facts, "page": None}  # it ends with this server
        made = self._made_by(facts["job"])
        if made is None or made.status != LIVE:
            return facts
        version = copied_version(made, self._store)
        facts = _renamed(facts, made, version)
        if facts["status"] != "succeeded" or facts["promotion"]["state"] != "promoted":
            return facts
        try:
            self._writer.promote_over(self._name, self._over, version.number, FINE_TUNING)
        except Conflict as error:
            return {**facts, **_stale(version, error)}
        self._over = version.number  # of a sweep the next one may take its place
        return facts

    def _made_by(self, job: str) -> Version | None:
        versions = (
            self._own.version(self._name, number) for number in reversed(self._own.numbers(self._name))
        )
        return next((one for one in versions if one.manifest["lineage"].get("job") == job), None)


def _renamed(value: Any, made: Version, version: Version) -> Any:
    """The facts of a job with the name of its version replaced by the version's name in the application's store, in
    sentences too."""
    if isinstance(value, Mapping):
        return {key: _renamed(one, made, version) for key, one in value.items()}
    if isinstance(value, str):
        return re.sub(
            rf"\b{re.escape(str(made))}\b", str(version), value.replace(by_hand(made), by_hand(version))
        )
    return value


def _stale(version: Version, why: Conflict) -> Facts:
    message = (
        f"{why}. It is published and not made active; fine-tune {version.name} again, or {by_hand(version)}"
    )
    refused = {"state": "refused", "code": STALE_PARENT, "message": message}
    return {"status": "failed", "error": {"code": STALE_PARENT, "message": message}, "promotion": refused}


@contextmanager
def _serving(store: Store) -> Iterator[str]:
    """Run a server in a thread, with a key that only this process has, and give the server's address."""
    one_heap()
    keys = KeyFile(store.root / NAME_IN_STORE)
    key, _ = keys.add("job", SCOPES)
    settings = read_settings(store=store.root, host=_HERE, port=0, key_file=keys.path)
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = key
    try:
        with Server(settings, store) as server:
            yield server.url
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before
