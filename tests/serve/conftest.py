"""A roster whose batchers answer at once (or when told to), and a real server around it in a thread."""

import asyncio
import json
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import uvicorn
from halfeven.models.engines.engine import Engine
from halfeven.models.errors import HalfevenError, NotReady, UnknownName
from halfeven.models.spec.spec import ModelSpec
from halfeven.serve.batching.counters import Counters
from halfeven.serve.batching.device import DeviceThread
from halfeven.serve.batching.interface import (
    NO_TERMS,
    Answer,
    IndexEntry,
    LoadConfig,
    PreparedVersion,
    Terms,
)
from halfeven.serve.batching.place import Place
from halfeven.serve.http.connection.hot_protocol import HotProtocol
from halfeven.serve.http.connection.polite_server import PoliteServer
from halfeven.serve.http.routes.app import History, build_app
from halfeven.serve.http.routes.infer import InferFront
from halfeven.serve.versions import roster as roster_file
from halfeven.serve.versions.loading import release

from tests.patience import PATIENCE_S
from tests.specs import tensor

DIGEST = "0123456789abcdef" * 4
# A good request of `double`, and the bytes of its body.
ASKED: dict[str, Any] = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
GOOD = json.dumps(ASKED).encode()


@pytest.fixture
def memory_is_given_back() -> None:
    """Switch `nothing_is_given_back` off, for a test that checks that the memory of a closed engine is freed."""


@pytest.fixture(autouse=True)
def nothing_is_given_back(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No server of a test's own process looks through its objects and its mapped files after a load.

    A server does so in 80 ms. In a test process, with pytest's millions of objects, it was a twentieth of a run's time.
    """
    if "memory_is_given_back" not in request.fixturenames:
        for module in (roster_file, release):
            for name in ("take_out_of_sight", "let_go_of_files"):
                monkeypatch.setattr(module, name, lambda: None)


@pytest.fixture
def place() -> Iterator[Place]:
    """The CPU as a place where versions load, with its thread."""
    thread = DeviceThread()
    thread.start()
    yield Place(torch.device("cpu"), thread)
    thread.stop(30)


class FakeEngine(Engine):
    form, precision, device = "torch", "fp16", "cpu"

    def warm_up(self, parts: Any) -> None: ...


@dataclass(eq=False)
class FakeServed:
    """A served model that is its own batcher. ``holding``: futures are kept in ``held`` instead of being answered."""

    spec: ModelSpec
    compute: Callable[..., list[np.ndarray]]
    prepared: PreparedVersion
    holding: bool = False
    refusal: HalfevenError | None = None
    held: list[asyncio.Future[Answer]] = field(default_factory=list)
    submitted: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)
    rows: list[int] = field(default_factory=list)
    terms: list[Terms] = field(default_factory=list)
    older: list["FakeServed"] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def batcher(self) -> "FakeServed":
        return self

    def submit(
        self, arrays: Sequence[np.ndarray], rows: int, terms: Terms = NO_TERMS
    ) -> asyncio.Future[Answer]:
        if self.refusal is not None:
            raise self.refusal
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.rows.append(rows)
        self.terms.append(terms)
        if self.holding:
            self.held.append(future)
            future.add_done_callback(lambda done: self.cancelled.set() if done.cancelled() else None)
        else:
            future.set_result(Answer(self.compute(*arrays), self.prepared, 1_500_000, 2_250_000, rows))
        self.submitted.set()
        return future

    def loaded_versions(self) -> list["FakeServed"]:
        return [self, *self.older]

    def counters(self) -> Counters:
        return Counters(
            self.prepared.version, len(self.rows), sum(self.rows), compute_ns=7, batches={2: (3, 9)}
        )


@dataclass(eq=False)
class FakeRoster:
    models: dict[str, FakeServed]
    reasons: list[str] = field(default_factory=list)
    unloaded: dict[str, FakeServed] = field(default_factory=dict)
    asked_to_load: list[tuple[str, LoadConfig | None]] = field(default_factory=list)
    load_fault: HalfevenError | None = None
    leaving: bool = False
    lost: str | None = None

    def load(self, name: str, config: LoadConfig | None = None) -> None:
        self.asked_to_load.append((name, config))
        if self.load_fault is not None:
            raise self.load_fault
        if name not in self.models and name not in self.unloaded:
            raise UnknownName(f"the store has no model '{name}'")
        served = self.models[name] = self.unloaded.pop(name, None) or self.models[name]
        if config and "max_batch_size" in config:
            served.spec = served.spec.with_max_batch_size(config["max_batch_size"])

    def unload(self, name: str) -> None:
        if name not in self.models:
            raise UnknownName(f"Request for unknown model: '{name}' is not found")
        self.unloaded[name] = self.models.pop(name)

    def index(self) -> list[IndexEntry]:
        gone = [
            (name, served.prepared.version, "UNAVAILABLE", "unloaded")
            for name, served in self.unloaded.items()
        ]
        return [
            *((name, served.prepared.version, "READY", "") for name, served in self.models.items()),
            *gone,
        ]

    def find(self, name: str, version: str | None = None) -> FakeServed:
        if name == "starting":
            raise NotReady("model 'starting' has no active version yet")
        if name not in self.models or version not in (None, self.models[name].prepared.version):
            raise UnknownName(f"Request for unknown model: '{name}' is not found")
        return self.models[name]

    def all(self) -> list[Any]:
        return list(self.models.values())

    @property
    def ready(self) -> bool:
        return not self.reasons

    def not_ready_reasons(self, reaches: Any = lambda _: True) -> list[str]:
        return self.reasons


def doubled(x: np.ndarray) -> list[np.ndarray]:
    return [x * 2]


def make_roster() -> FakeRoster:
    specs = (
        (ModelSpec("double", (tensor("x", "FP32", -1, 4),), (tensor("y", "FP32", -1, 4),), 8), doubled),
        (
            ModelSpec(
                "scores",
                (tensor("x", "FP32", -1, 3),),
                (tensor("logits", "FP32", -1, 3, kind="logits", labels=("ant", "bee", "cat")),),
                8,
            ),
            doubled,
        ),
        (
            ModelSpec(
                "pair",
                (tensor("ids", "INT64", -1, "length=1..6"), tensor("mask", "FP32", -1, "length=1..6")),
                (tensor("total", "FP32", -1), tensor("masked", "FP32", -1, "length=1..6")),
                8,
            ),
            lambda ids, mask: [(ids * mask).sum(1).astype(np.float32), (ids * mask).astype(np.float32)],
        ),
    )
    prepared = PreparedVersion("3", DIGEST, "fp16", FakeEngine(), "measured faster")
    return FakeRoster({spec.name: FakeServed(spec, compute, prepared) for spec, compute in specs})


def _known(model: str) -> None:
    if model != "double":
        raise UnknownName(f"no model '{model}' in the store")


def _versions(model: str) -> list[dict[str, Any]]:
    _known(model)
    return [{"version": 3, "status": "live"}, {"version": 2, "status": "refused"}]


HISTORY = History(
    versions=_versions,
    report=lambda model, version: f"<p>report of {model} {version}</p>",
    plan=lambda model, version: {"kept": [model, version]},
    lineage=lambda model, version: {"parent": None},
    rollback=lambda model: {"model": model, "live": 2},
)


def front_of(roster: FakeRoster, **more: Any) -> InferFront:
    """The whole application over the roster. ``more`` is for `InferFront`."""
    return InferFront(build_app(roster, lambda: b"", HISTORY), roster, **more)


@pytest.fixture(scope="session")
def serving() -> Iterator[tuple[FakeRoster, str]]:
    """The whole application as it is served, with a small body limit and a quick body time-out."""
    roster = make_roster()
    app = build_app(roster, lambda: b"halfeven_up 1\n", HISTORY, "triton", max_body_bytes=4096)
    with running(InferFront(app, roster, max_body_bytes=4096, body_timeout_s=0.2)) as address:
        yield roster, address


@pytest.fixture
def roster(serving: tuple[FakeRoster, str]) -> FakeRoster:
    """The served roster, as new."""
    vars(serving[0]).update(vars(make_roster()))
    return serving[0]


@pytest.fixture
def server(serving: tuple[FakeRoster, str], roster: FakeRoster) -> str:
    """``host:port`` of a real server around the roster."""
    return serving[1]


@contextmanager
def running(app: Any, seconds: int = 1) -> Iterator[str]:
    """A server in a thread, as uvicorn's own tests run it; ready when entered, gone when left: in so many seconds,
    whatever is still computed."""
    with started(app, seconds=seconds) as server:
        host, port = server.servers[0].sockets[0].getsockname()[:2]
        yield f"{host}:{port}"


@contextmanager
def started(
    app: Any, port: int = 0, seconds: int = 1, tls: ssl.SSLContext | None = None, **more: Any
) -> Iterator[PoliteServer]:
    """The server itself; ``more`` is for `PoliteServer`, which otherwise closes idle connections at once."""
    config = uvicorn.Config(
        app, port=port, http=HotProtocol, log_level="error", access_log=False, timeout_graceful_shutdown=seconds,
        proxy_headers=False, ws="none",
    )  # fmt: skip
    if tls is not None:
        config.load()
        config.ssl = tls
    server = PoliteServer(config, **{"quiet_s": 0.0, **more})
    is_up = threading.Event()
    startup = server.startup

    async def announced(*arguments: Any, **more: Any) -> None:
        await startup(*arguments, **more)
        is_up.set()

    server.startup = announced
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert is_up.wait(PATIENCE_S)
        yield server
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
