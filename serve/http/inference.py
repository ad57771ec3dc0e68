"""The infer use case: from a model's name and a way to read a request to the future of its answer.

Four ways lead here: the infer route through ASGI (`routes/infer.py`) and from the HTTP parser
(`connection/hot_protocol.py`), ``:predict`` (`routes/predict.py`) and gRPC (`../grpc/calls.py`). They differ in how
bytes become a request and an answer becomes bytes. Which version is asked, what reads in a thread, and what is said
where the model changed or went meanwhile, is decided here alone.
"""

import asyncio
from collections.abc import Callable
from time import perf_counter_ns
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from ...models.errors import NotReady
from ..batching.counters import Phase
from ..batching.interface import Answer, Roster, Served, Terms
from .codecs.dialect import OURS, Dialect
from .codecs.infer import InferCodec, InferRequest
from .limits.worker_threads import WorkerThreads

Asked = tuple[str, str | None]  # a model's name, and the version that the URL names


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
    """The models of a roster as callers ask them. ``written``: the time of writing answers by model, for as long as the
    server lives."""

    def __init__(
        self, roster: Roster, dialect: Dialect = OURS, written: dict[str, Phase] | None = None
    ) -> None:
        self._roster, self.dialect = roster, dialect
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
        served = self.find(asked)  # another version may have become active meanwhile
        if self._codec(served) is not codec and served.spec.signature() != codec.spec.signature():
            raise NotReady(
                f"model '{served.name}' changed its inputs while the request was read; send it again"
            )
        return self._queued(served, codec, request, since_ns)

    def _queued(self, served: Served, codec: InferCodec, request: R, since_ns: int) -> Begun[R]:
        future = served.submit(request.arrays, request.rows, request.terms)
        return Begun(codec, request, future, since_ns, self._written[served.name])

    def _codec(self, served: Served) -> InferCodec:
        """The model's codec, made again where its spec has changed."""
        codec = self._codecs.get(served.name)
        if codec is None or codec.spec is not served.spec:
            codec = self._codecs[served.name] = InferCodec(served.spec, self.dialect)
            self._written.setdefault(served.name, Phase())
        return codec


def taken_away() -> NotReady:
    """The error of a request whose future the server has cancelled."""
    return NotReady("the model was taken away while the request waited; send it again")


def parameters_of(answer: Answer) -> dict[str, str]:
    """The parameters by which every answer of the V2 protocol describes its version."""
    return {"halfeven_precision": answer.precision, "halfeven_digest": answer.prepared.digest[:12]}
