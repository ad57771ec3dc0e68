"""The types between the HTTP routes, the batcher and the roster: prepared versions, terms, answers.

Types only. `batcher.py` answers requests, `versions/roster.py` finds the version for a request, and the routes
(`http/routes/infer.py`, `http/routes/app.py`) use both.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypedDict

import numpy as np

from ...models.engines.cpu.setup import CpuSetup
from ...models.engines.engine import Engine
from ...models.spec.spec import ModelSpec
from .ceiling import Ceiling
from .counters import Counters


@dataclass(frozen=True, slots=True, eq=False)
class ServableForm:
    """A form of a version that may serve on this CPU, a half only where it is proven here.

    ``load`` gives its engine in a setup, as it serves. ``digest`` and ``nbytes`` are those of its file.
    """

    form: str
    precision: str
    digest: str
    nbytes: int
    load: Callable[[CpuSetup], Engine]


@dataclass(slots=True, eq=False)
class PreparedVersion:
    """One version, loaded, proven on this device and warm.

    ``precision`` is ``fp32``, ``fp16`` or ``bf16``; ``reason`` says why it is that one.
    ``original`` is the FP32 original beside a half: it answers again where a half's row is not finite, and checks
    samples of live traffic. ``useful_rows`` is the batch size above which more rows bring no more throughput here, or
    need more memory than the device has (0: not measured). ``ceiling`` remembers out of memory (None: while loaded).
    ``invariance`` says how much an answer depends on the size of its batch (empty: not measured). ``probe`` is one
    request of one row that it answers: an engine that fails on it fails on everything. ``setup`` is how its engine
    uses the CPU. ``forms`` are all that may serve in its place, its own too, where the choice among them is
    measured again by what is served (empty: it is not).
    """

    version: str
    digest: str
    precision: str
    engine: Engine
    reason: str = ""
    original: Engine | None = None
    useful_rows: int = 0
    ceiling: Ceiling | None = None
    invariance: str = ""
    probe: Sequence[np.ndarray] | None = None
    setup: CpuSetup | None = None
    forms: Sequence[ServableForm] = ()


@dataclass(slots=True, eq=False, frozen=True)
class Terms:
    """Options of one request. Most have none: `NO_TERMS`.

    ``priority`` 1 is served before 2 (0: the server's default, which is 2). ``timeout_ns``: how long the request
    may wait before its batch begins (0: no limit). ``deterministic``: the answer may not depend on the other requests
    of the batch. ``key`` (the request's id) keeps one caller on one version while a canary runs.
    """

    priority: int = 0
    timeout_ns: int = 0
    deterministic: bool = False
    key: str | None = None


NO_TERMS = Terms()


@dataclass(slots=True, eq=False)
class Answer:
    """One request's share of a batch: outputs in the spec's order, the version that gave them, and the times.

    ``queue_ns`` is the wait before the batch began, ``assemble_ns`` the time to join the batch's inputs (where
    the engine tells it apart), ``compute_ns`` the batch's run, ``batch_rows`` its rows (padding left out).
    ``rescued`` is how many of this request's rows the FP32 original had to answer.
    """

    outputs: list[np.ndarray]
    prepared: PreparedVersion
    queue_ns: int
    compute_ns: int
    batch_rows: int
    assemble_ns: int = 0
    rescued: int = 0

    @property
    def precision(self) -> str:
        """The precision that the answer's headers show."""
        return "fp32-rescued" if self.rescued else self.prepared.precision


class Submit(Protocol):
    """The batcher as its callers see it."""

    def submit(
        self, arrays: Sequence[np.ndarray], rows: int, terms: Terms = NO_TERMS
    ) -> asyncio.Future[Answer]:
        """Queue one checked request (arrays in the spec's order). A caller that leaves cancels the future.

        Raises Overloaded where it would wait too long, NotReady where nothing is active or the server drains.
        """
        ...


class Served(Submit, Protocol):
    """A model that has an active version. `submit` queues one checked request with the version that is to answer it
    (active, or a canary). The spec is the same for all versions under one name."""

    @property
    def name(self) -> str: ...

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def batcher(self) -> Submit: ...

    @property
    def prepared(self) -> PreparedVersion: ...

    def counters(self) -> Counters:
        """A copy of the active version's counters."""
        ...


class ServedName(Served, Protocol):
    """A name with all its versions."""

    def loaded_versions(self) -> Sequence[Served]:
        """Every version that is loaded now, each to be asked alone."""
        ...


class LoadConfig(TypedDict, total=False):
    """Settings of one load that replace the model's own; a missing key is as in the spec."""

    max_batch_size: int
    max_queue_delay_us: int
    max_queue_size: int


# A name's version, one of READY, LOADING, UNLOADING, UNAVAILABLE, and why it is not READY ("" where it is).
IndexEntry = tuple[str, str, str, str]


class Roster(Protocol):
    """The loaded versions by name, with the verbs of the model repository extension: `versions/roster.py` says what
    they do. `load` and `unload` block until done: call them in a thread.

    `find` raises UnknownName, or NotReady where the name has no version. ``lost`` is the reason why nothing is answered
    until the process is started anew. ``leaving``: the server is to end; nothing is ready, though all is answered.
    """

    def find(self, name: str, version: str | None = None) -> Served: ...

    def all(self) -> Sequence[ServedName]: ...

    @property
    def ready(self) -> bool: ...

    @property
    def lost(self) -> str | None: ...

    @property
    def leaving(self) -> bool: ...

    def not_ready_reasons(self, reaches: Callable[[str], bool] = ...) -> list[str]: ...

    def load(self, name: str, config: LoadConfig | None = None) -> None: ...

    def unload(self, name: str) -> None: ...

    def index(self) -> Sequence[IndexEntry]: ...
