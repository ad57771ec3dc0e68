"""The infer use case: from a model's name and a way to read a request to the future of its answer.

Four ways lead here: the infer route through ASGI (`routes/infer.py`) and from the HTTP parser
(`connection/hot_protocol.py`), ``:predict`` (`routes/predict.py`) and gRPC (`../grpc/calls.py`). They differ in how
bytes become a request and an answer becomes bytes. Which version is asked, what reads in a thread, and what is said
where the model changed or went meanwhile, is decided here alone.
"""

import asyncio
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter_ns
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from ...models.errors import NotReady, Overloaded
from ...models.machine.usable_cores import usable_cores
from ..batching.counters import Phase
from ..batching.interface import Answer, Roster, Served, Terms
from ..batching.scheduler import changed, same_signature
from .codecs.infer import InferCodec, InferRequest
from .limits.request_limits import DEFAULTS

Asked = tuple[str, str | None]  # a model's name, and the version that the URL names
T = TypeVar("T")
MOST_WAITING = DEFAULTS.bodies_waiting  # in memory
_NICE = 15  # behind the compute threads too (`batching/device.py`: 5): their callers sent small bodies


class Checked(Protocol):
    """A request that was read and checked against the spec."""

    @property
    def arrays(self) -> list[np.ndarray]: ...

    @property
    def rows(self) -> int: ...

    @property
    def terms(self) -> Terms: ...


R = TypeVar("R", bound=Checked)


class Begun(NamedTuple, Generic[R]):
    """A request on its way: its codec, the read request, the future of its answer, and when reading began."""

    codec: InferCodec
    request: R
    future: asyncio.Future[Answer]
    since_ns: int
    written: Phase  # the time of writing the answer is added here


class Inference:
    """The models of a roster as callers ask them. ``as_triton``: with ``--triton-strict``. ``written``: the time of
    writing answers by model, for as long as the server lives."""

    def __init__(
        self, roster: Roster, as_triton: bool = False, written: dict[str, Phase] | None = None
    ) -> None:
        self._roster, self.as_triton = roster, as_triton
        self._written = {} if written is None else written
        self._codecs: dict[str, InferCodec] = {}
        self.worker_threads = WorkerThreads()

    def find(self, asked: Asked) -> Served:
        """Raises UnknownName, NotReady."""
        return self._roster.find(*asked)

    def begin(self, served: Served, header_length: str | None, body: bytes) -> Begun[InferRequest]:
        """Read a whole body of the V2 protocol and queue the request. Raises BadRequest, Overloaded, NotReady."""
        since_ns = perf_counter_ns()
        codec = self._codec(served)
        return self._queued(served, codec, codec.read(body, header_length), since_ns)

    async def ask(self, asked: Asked, read: Callable[[InferCodec], R], aside: bool) -> Begun[R]:
        """Read the request with the codec of the model and queue it with the version that is active then.

        ``aside``: ``read`` runs in a thread, so that the event loop goes on. Raises as `find` and `begin`.
        """
        since_ns = perf_counter_ns()
        served = self.find(asked)
        codec = self._codec(served)
        if not aside:
            return self._queued(served, codec, read(codec), since_ns)
        request = await self.worker_threads.run(read, codec)
        # Another version may have become active meanwhile.
        return self._queued(self.find(asked), codec, request, since_ns)

    def _queued(self, served: Served, codec: InferCodec, request: R, since_ns: int) -> Begun[R]:
        """Queue the request. Raises NotReady where a version with other inputs or outputs became active since the codec
        was made: another thread makes versions active, also while this runs, so the spec is looked at once more."""
        _check_unchanged(served, codec)
        future = served.submit(request.arrays, request.rows, request.terms)
        try:
            _check_unchanged(served, codec)
        except NotReady:
            if not future.cancel():
                future.exception()  # read it, else asyncio warns
            raise
        return Begun(codec, request, future, since_ns, self._written[served.name])

    def _codec(self, served: Served) -> InferCodec:
        """The model's codec, made again where its spec has changed."""
        codec = self._codecs.get(served.name)
        if codec is None or codec.spec is not served.spec:
            codec = self._codecs[served.name] = InferCodec(served.spec, self.as_triton)
            self._written.setdefault(served.name, Phase())
        return codec


def _check_unchanged(served: Served, codec: InferCodec) -> None:
    """Raises NotReady where requests that the codec has read no longer fit the model."""
    if served.spec is not codec.spec and not same_signature(served.spec, codec.spec):
        raise changed(served.spec)


def taken_away() -> NotReady:
    """The error of a request whose future the server has cancelled."""
    return NotReady("the model was taken away while the request waited; send it again")


def parameters_of(answer: Answer) -> dict[str, str]:
    """The parameters by which every answer of the V2 protocol describes its version."""
    return {"halfeven_precision": answer.precision, "halfeven_digest": answer.prepared.digest[:12]}


class WorkerThreads:
    """A few threads that read large, compressed or picture bodies and write large answers, which would hold up the
    event loop. They are few, so that callers with such bodies leave most of the processor to the others.

    ``threads``: by default half the usable cores, two where there are two. They are `_NICE` steps of niceness behind
    the event loop.
    """

    def __init__(self, threads: int | None = None, most_waiting: int = MOST_WAITING) -> None:
        self._threads = threads or min(usable_cores(), max(2, usable_cores() // 2))
        self._pool = ThreadPoolExecutor(self._threads, "halfeven-predict", _stand_behind)
        self._most, self._waiting = self._threads + most_waiting, 0

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """The work's result, from a thread. Raises Overloaded where `MOST_WAITING` wait already."""
        if self._waiting >= self._most:
            raise Overloaded(
                f"{self._waiting} requests with pictures, or with large or compressed bodies or answers, wait for a "
                "thread; try again"
            )
        self._waiting += 1
        try:
            done = asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)
            done.add_done_callback(self._one_less)  # also where the caller has gone: the thread still works
        except BaseException:
            self._waiting -= 1
            raise
        try:
            return await asyncio.shield(done)
        finally:
            # The traceback of a failure refers to this frame. Did this refer to the failure, what the thread held would
            # stay until the collector runs: measured, 1.2 GB of refused bodies.
            del done

    def _one_less(self, done: asyncio.Future[Any]) -> None:
        self._waiting -= 1
        if not done.cancelled():
            done.exception()  # read it, else asyncio warns where the caller has gone


def _stand_behind() -> None:
    if sys.platform == "linux":  # where niceness is a thread's own, setpriority(2)
        os.setpriority(os.PRIO_PROCESS, 0, min(os.getpriority(os.PRIO_PROCESS, 0) + _NICE, 19))
