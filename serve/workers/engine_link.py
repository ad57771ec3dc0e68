"""In a worker: the models of the engine process, and the requests that wait there for their answers.

A worker knows of each model its spec, to read requests and to write answers; nothing else. The engine process picks the
version for every request. Where the spec that a request was read with is not that of the version (`OTHER_SPEC`), the
whole request is handed over and answered there: what a worker knows may be old, what it answers may not.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import orjson

from ...models.errors import NotReady
from ...models.spec import ModelSpec
from ..batching.counters import Phase
from ..batching.interface import NO_TERMS, Answer, PreparedVersion, Terms
from ..http.error_mapping import EngineAway
from .channel import Channel
from .engine_app import AWAY, BROKEN_OFF
from .ring import Message
from .tensor_messages import (
    ANSWER,
    ASK,
    CANCEL,
    MODELS,
    OTHER_SPEC,
    REFUSE,
    WRITTEN,
    Ask,
    ask_parts,
    read_answer,
    read_refusal,
)

_ANSWERS = 2**40  # bytes of an answer: the engine process is believed


class AnsweredByEngine(Exception):
    """The engine process gave the whole answer: status, headers without the length, body. ``logged``: it has written
    the record of the request too."""

    def __init__(
        self, status: int, headers: list[tuple[bytes, bytes]], body: bytes, logged: bool = False
    ) -> None:
        super().__init__(f"status {status}")
        self.status, self.headers, self.body, self.logged = status, headers, body, logged


@dataclass(slots=True, eq=False)
class RemoteModel:
    """A model, or the version that a URL names, behind the interface of the infer route (`interface.Answering`).

    ``spec`` is the active version's, ``digest`` names it.
    """

    name: str
    spec: ModelSpec
    digest: str
    link: "EngineLink"
    version: str | None = None

    def submit(
        self, arrays: Sequence[np.ndarray], rows: int, terms: Terms = NO_TERMS
    ) -> asyncio.Future[Answer]:
        """As `Submit`, for a caller without a key; every refusal comes with the future."""
        return self.ask(arrays, rows, terms, None, None)

    def ask(
        self,
        arrays: Sequence[np.ndarray],
        rows: int,
        terms: Terms,
        authorization: str | None,
        otherwise: "Otherwise | None",
    ) -> asyncio.Future[Answer]:
        """``otherwise`` answers where the version has another spec; without it the request is refused then."""
        ask = Ask(self.name, self.version, self.digest, authorization, rows, arrays, terms)
        return self.link.ask(ask, otherwise)


Otherwise = Callable[[], "asyncio.Future[Answer]"]


class EngineLink:
    """The models by name, and the channel; without one while the engine process is away. ``starting``: its models are
    still being made ready. ``written`` has for each model the time of writing answers; `flush` sends what is new."""

    def __init__(self, lost: Callable[[], None]) -> None:
        self.starting = True
        self.written: dict[str, Phase] = {}
        self.calls: socket.socket | None = None
        self._lost = lost
        self._channel: Channel | None = None
        self._models: dict[str, RemoteModel] = {}
        self._waiting: dict[int, tuple[asyncio.Future[Answer], Otherwise | None]] = {}
        self._number = 0
        self._sent: dict[str, Phase] = {}

    def connect(self, wire: socket.socket, calls: socket.socket, descriptor: int) -> None:
        """Ask the engine process behind these from now on. Raises OSError as `Channel`: then they are closed."""
        self._end()
        calls.setblocking(False)
        try:
            self._channel = Channel(wire, descriptor, True, _ANSWERS, self._received, self._on_lost)
        except OSError:
            calls.close()
            raise
        self.calls = calls

    @property
    def waiting(self) -> int:
        """Requests that wait for their answers."""
        return len(self._waiting)

    def knows(self, name: str) -> bool:
        return name in self._models

    def find(self, name: str, version: str | None = None) -> RemoteModel:
        """Raises NotReady for a model that the engine process does not serve as far as is known here, EngineAway while
        it is away or its models are being made ready."""
        if (model := self._models.get(name)) is None:
            if self.starting:
                raise EngineAway(AWAY)
            raise NotReady(f"model '{name}' is not served now; send the request again")
        return model if version is None else RemoteModel(name, model.spec, model.digest, self, version)

    def ask(self, ask: Ask, otherwise: Otherwise | None) -> asyncio.Future[Answer]:
        """Raises EngineAway."""
        if self._channel is None:
            raise EngineAway(AWAY)
        parts = ask_parts(ask)
        number = self._number = (self._number + 1) & 0xFFFFFFFF
        while number in self._waiting:
            number = self._number = (self._number + 1) & 0xFFFFFFFF
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future, otherwise
        self._channel.send(ASK, number, parts)
        future.add_done_callback(lambda done: self._cancel(number) if done.cancelled() else None)
        return future

    def flush(self) -> None:
        """Send how long answers took to write since the last time."""
        if self._channel is None:
            return
        new: dict[str, Any] = {}
        for name, phase in self.written.items():
            before = self._sent.setdefault(name, Phase())
            if phase.buckets != before.buckets:
                counts = [now - then for now, then in zip(phase.buckets, before.buckets, strict=True)]
                new[name] = counts, phase.spent_ns - before.spent_ns
                before.buckets, before.spent_ns = list(phase.buckets), phase.spent_ns
        if new:
            self._channel.send(WRITTEN, 0, [orjson.dumps(new)])

    def close(self) -> None:
        self._end()

    def _cancel(self, number: int) -> None:
        """The caller has gone, and with it the memory that its request may take."""
        if self._waiting.pop(number, None) is None or self._channel is None:
            return
        if not self._channel.take_back(ASK, number):
            self._channel.send(CANCEL, number, ())

    def _received(self, message: Message) -> None:
        if message.kind == MODELS:
            self._take_models(orjson.loads(message.data))
            return
        future, otherwise = self._waiting.pop(message.number, (None, None))
        if future is None or future.done():  # its caller has gone
            return
        if message.kind == ANSWER:
            future.set_result(_answer_of(message))
        elif message.kind == REFUSE:
            future.set_exception(AnsweredByEngine(*read_refusal(message.data)))
        elif message.kind == OTHER_SPEC and otherwise is not None:
            _follow(future, otherwise())
        else:
            future.set_exception(NotReady("the model has changed its inputs; send the request again"))

    def _take_models(self, said: Any) -> None:
        self.starting = said["starting"]
        models: dict[str, RemoteModel] = {}
        for name, (digest, text) in said["models"].items():
            known = self._models.get(name)
            if known is None or known.digest != digest:
                known = RemoteModel(name, ModelSpec.from_json(text), digest, self)
            models[name] = known
        self._models = models

    def _on_lost(self) -> None:
        self._end()
        self._lost()

    def _end(self) -> None:
        """Refuse what waits, and forget the models: another engine process may have others."""
        if self._channel is not None:
            self._channel.close()
        if self.calls is not None:
            self.calls.close()
        self._channel = self.calls = None
        self._models, self.starting = {}, True
        waiting, self._waiting = self._waiting, {}
        for future, _ in waiting.values():
            if not future.done():
                future.set_exception(EngineAway(BROKEN_OFF))


def _follow(future: asyncio.Future[Answer], other: asyncio.Future[Answer]) -> None:
    """Give the future what the other one gives; cancel the other one with it."""

    def done(other: asyncio.Future[Answer]) -> None:
        if future.done():
            if not other.cancelled():
                other.exception()  # read it, or asyncio warns
        elif other.cancelled():
            future.cancel()
        elif (error := other.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(other.result())

    other.add_done_callback(done)
    future.add_done_callback(lambda future: other.cancel() if future.cancelled() else None)


def _answer_of(message: Message) -> Answer:
    head, outputs = read_answer(message.data)
    queue_ns, compute_ns, assemble_ns = head["times"]
    rows, rescued = head["rows"]
    return Answer(outputs, _prepared(*head["by"]), queue_ns, compute_ns, rows, assemble_ns, rescued)


@lru_cache(maxsize=256)
def _prepared(version: str, digest: str, precision: str) -> PreparedVersion:
    return PreparedVersion(version, digest, precision, _Elsewhere())


class _Elsewhere:
    """The engine of a version that another process has: an answer names the version, and nothing here runs it."""

    form = precision = device = ""

    def warm_up(self, parts: Sequence[Sequence[np.ndarray]]) -> None:
        raise NotImplementedError

    def run(self, parts: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
        raise NotImplementedError

    def close(self) -> None:
        return
