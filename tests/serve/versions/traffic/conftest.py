"""Versions that load at once: a store of small files, engines that a test holds in its hand, real HTTP around."""

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from halfeven.models.engines import engine
from halfeven.models.errors import HalfevenError
from halfeven.models.spec.spec import Dim, ModelSpec, TensorSpec
from halfeven.models.store.store import LIVE, REFUSED, Store, Version
from halfeven.serve.batching.interface import PreparedVersion
from halfeven.serve.batching.place import Place
from halfeven.serve.bench.callers import BenchTraffic
from halfeven.serve.server import build
from halfeven.serve.settings import Settings
from halfeven.serve.versions import roster as roster_file
from halfeven.serve.versions.orders import events
from halfeven.serve.versions.roster import Roster

from tests.patience import PATIENCE_S
from tests.serve.conftest import running
from tests.serve.plain_request import get


def spec(rows: int = 8, name: str = "net", width: int = 4) -> ModelSpec:
    x = TensorSpec("x", "FP32", (Dim(), Dim(width, width)))
    y = TensorSpec("y", "FP32", (Dim(), Dim(width, width)), "logits")
    return ModelSpec(name, (x,), (y,), rows)


@dataclass(eq=False)
class Engine(engine.Engine):
    """y = x, after ``change`` had its way with it; ``fault`` is raised instead. Remembers versions per batch."""

    number: int
    precision: str = "fp16"
    form: str = "torch"
    device: str = "cpu"
    change: Callable[[np.ndarray], np.ndarray] = lambda y: y
    fault: Exception | None = None
    seconds: float = 0.0
    runs: int = 0
    rows: int = 0
    closed: bool = False

    def warm_up(self, parts: Any) -> None: ...

    def run(self, parts: Any) -> list[np.ndarray]:
        assert not self.closed, "run after close"
        joined = np.concatenate(parts[0])
        self.runs += 1
        self.rows += len(joined)
        if self.fault is not None:
            raise self.fault
        if self.seconds:
            time.sleep(self.seconds)
        return [self.change(joined.copy())]

    def close(self) -> None:
        self.closed = True


@dataclass(eq=False)
class Versions:
    """The engines that ``make_ready`` gives: ``halves[n]`` is the newest engine of version n, ``originals[n]`` its
    original.

    ``prepare[n]`` changes an engine before it serves; ``refuse[n]`` is raised; ``gate`` holds loading.
    """

    halves: dict[int, Engine] = field(default_factory=dict)
    originals: dict[int, Engine] = field(default_factory=dict)
    prepare: dict[int, Callable[[Engine], object]] = field(default_factory=dict)
    refuse: dict[int, HalfevenError] = field(default_factory=dict)
    loads: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    gate: threading.Event | None = None

    def make_ready(
        self, version: Version, place: Place, replaces: PreparedVersion | None = None
    ) -> PreparedVersion:
        number = version.number
        if self.gate is not None:
            assert self.gate.wait(PATIENCE_S)
        if number in self.refuse:
            raise self.refuse[number]
        self.loads[number] += 1
        half, original = Engine(number), Engine(number, "fp32")
        self.prepare.get(number, lambda engine: None)(half)
        self.halves[number], self.originals[number] = half, original
        digest, probe = version.manifest["digest"], [np.ones((1, 4), np.float32)]
        return PreparedVersion(str(number), digest, "fp16", half, "made up", original, probe=probe)


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> Versions:
    made = Versions()
    monkeypatch.setattr(roster_file, "make_ready", made.make_ready)
    return made


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """One model, ``net``, with versions 1 (active), 2 and 3."""
    made = Store(tmp_path / "store")
    for _ in range(3):
        publish(made)
    made.promote(made.version("net", 1))
    return made


def publish(
    store: Store, status: str = LIVE, of: ModelSpec | None = None, report: str = "", **more: Any
) -> Version:
    own = of or spec()
    output = {"name": "y", "scale": 1.0, "tied": 0}
    forms = {"torch": {"passed": status != REFUSED, "digest": "0" * 64}}
    with store.draft(own.name) as draft:
        draft.write_json("spec.json", own.to_json())
        draft.write_json("parity.json", {"forms": {"torch": {"outputs": [output]}}})
        if report:
            (draft.folder / "report.html").write_text(report)
        draft.write_json("nonce.json", {"number": len(store.numbers(own.name))})
        facts = {"half": "fp16", "forms": forms, "reason": "made up", "notes": [], "created": "today"}
        return draft.publish(status, facts | more)


ROWS = {"x": np.linspace(0.1, 0.9, 32, dtype=np.float32).reshape(8, 4)}


def traffic(address: str, connections: int = 3, rows: dict[str, np.ndarray] = ROWS) -> BenchTraffic:
    return BenchTraffic(int(address.rpartition(":")[2]), "net", rows, connections)


def decided(store: Store) -> list[Mapping[str, Any]]:
    """The events of decisions, the newest first; what became active or was let go by them is told in
    `test_recorded_changes.py`."""
    return [event for event in events(store, "net") if event["kind"] not in ("activated", "retired")]


def kinds(store: Store) -> list[str]:
    return [event["kind"] for event in decided(store)]


@contextmanager
def serving(store: Store, **settings: Any) -> Iterator[tuple[str, Roster]]:
    app, roster = build(Settings(store=store.root, device="cpu", **settings), store)
    with running(app, seconds=30) as address:
        roster.wait(PATIENCE_S)
        yield address, roster


def call(address: str, path: str, asked: Any = None) -> tuple[int, Any]:
    """(status, JSON or text) of a GET, or of a POST where something is asked."""
    body = None if asked is None else json.dumps(asked).encode()
    status, _, answer = get(address, path, body)
    return status, answer


def infer(address: str, value: float = 0.5, id: str | None = None, version: str | None = None) -> str:
    """The version that answered one request; the answer itself is held against what it must be."""
    data = [value * (1 - 0.02 * place) for place in range(4)]
    asked: dict[str, Any] = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": data}]}
    asked |= {"id": id} if id else {}
    part = f"/versions/{version}" if version else ""
    status, answer = call(address, f"/v2/models/net{part}/infer", asked)
    assert status == 200, answer
    assert np.allclose(answer["outputs"][0]["data"], data, atol=1e-3), answer
    return answer["model_version"]


def attached(roster: Roster) -> int:
    """The number of queues that the device thread looks at."""
    thread = roster.place.thread
    return len(thread._attached) + len(thread._background)
