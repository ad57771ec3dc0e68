"""In the engine process: one worker's end of a channel. Its requests are submitted as those of any other caller."""

import asyncio
import hashlib
import logging
import socket
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import orjson

from ...models.errors import BadRequest, NotReady
from ...models.spec import ModelSpec
from ..access.access_control import OPEN, Permit
from ..batching.counters import Phase
from ..batching.interface import Answer, Answering, Roster
from ..http.route_scopes import TO_INFER
from ..http.routes.infer import InferFront
from .channel import Channel
from .engine_calls import answer_call
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
    answer_parts,
    models_parts,
    read_ask,
    refusal_parts,
)

_LOOK_EVERY_S = 0.25  # a worker hands over requests for a model that it does not know yet
_LARGER = 8  # numbers in JSON take at most so many times their text
_MORE = 2**20
_LOG = logging.getLogger("halfeven")
Run = Callable[[Coroutine[Any, Any, None]], None]


class EngineSide:
    """``starting``: whether models of the store are still being made ready. ``run`` takes the tasks of calls that are
    handed over; ``gone`` is called once when the worker has gone. Raises OSError as `Channel`: then the sockets are
    closed."""

    def __init__(
        self,
        front: InferFront,
        roster: Roster,
        wire: socket.socket,
        calls: socket.socket,
        descriptor: int,
        starting: Callable[[], bool],
        run: Run,
        gone: Callable[["EngineSide"], None],
    ) -> None:
        self._front, self._roster, self._starting, self._run, self._gone = front, roster, starting, run, gone
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._calls = calls
        calls.setblocking(False)
        most = front.max_body_bytes * _LARGER + _MORE
        try:
            self._channel = Channel(wire, descriptor, False, most, self._received, self._on_lost)
        except OSError:
            calls.close()
            raise
        self._under_way: dict[int, asyncio.Future[Answer]] = {}
        self._digests: dict[int, tuple[ModelSpec, str]] = {}
        self._said: tuple[dict[str, str], bool] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._loop.add_reader(calls.fileno(), self._take_calls)
        self._look()

    def close(self) -> None:
        """Cancel what the worker waits for: its callers have gone with it."""
        if self._closed:
            return
        self._closed = True
        self._channel.close()
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._calls.fileno())
        self._calls.close()
        under_way, self._under_way = self._under_way, {}
        for future in under_way.values():
            future.cancel()

    def _on_lost(self) -> None:
        self.close()
        self._gone(self)

    # The models.

    def _look(self) -> None:
        """Send the models where they have changed, now and from time to time."""
        self._timer = self._loop.call_later(_LOOK_EVERY_S, self._look)
        models = {served.name: (self._digest(served.spec), served.spec) for served in self._roster.all()}
        said = {name: digest for name, (digest, _) in models.items()}, self._starting()
        if said != self._said:
            self._said = said
            self._digests = {id(spec): (spec, digest) for digest, spec in models.values()}
            self._channel.send(MODELS, 0, models_parts(models, said[1]))

    def _digest(self, spec: ModelSpec) -> str:
        known = self._digests.get(id(spec))
        if known is None:
            text = orjson.dumps(spec.to_json())
            known = self._digests[id(spec)] = spec, hashlib.sha256(text).hexdigest()
        return known[1]

    # Requests.

    def _received(self, message: Message) -> None:
        if message.kind == ASK:
            self._ask(message.number, read_ask(message.data))
        elif message.kind == CANCEL:
            if (future := self._under_way.pop(message.number, None)) is not None:
                future.cancel()
        elif message.kind == WRITTEN:
            self._add_written(orjson.loads(message.data))

    def _ask(self, number: int, ask: Ask) -> None:
        try:
            served = self._front.find((ask.name, ask.version))
            same = self._digest(served.spec) == ask.digest
        except Exception:  # handed over whole, it is refused by the infer route
            same, served = False, None
        if not same or served is None:
            self._channel.send(OTHER_SPEC, number, ())
            return
        permit = OPEN
        try:
            permit = self._front.access.admit(ask.authorization, TO_INFER, ask.name)
            future = _submitted(served, ask)
        except Exception as error:
            permit.close()
            self._refuse(number, error)
            return
        self._under_way[number] = future
        if future.done():  # its batch was run at once
            self._answered(number, permit, future)
        else:
            future.add_done_callback(partial(self._answered, number, permit))

    def _answered(self, number: int, permit: Permit, future: asyncio.Future[Answer]) -> None:
        permit.close()
        if self._under_way.get(number) is not future:  # the worker has cancelled it, or has gone
            if not future.cancelled():
                future.exception()  # read it, or asyncio warns
            return
        del self._under_way[number]
        if future.cancelled():
            self._refuse(number, NotReady("the model was taken away while the request waited; send it again"))
        elif (error := future.exception()) is not None:
            self._refuse(number, error)
        else:
            try:
                parts = answer_parts(future.result())
            except Exception as error:
                self._refuse(number, error)
            else:
                self._channel.send(ANSWER, number, parts)

    def _refuse(self, number: int, error: BaseException) -> None:
        assert isinstance(error, Exception)
        self._channel.send(REFUSE, number, refusal_parts(*self._front.refused(error)))

    def _add_written(self, new: dict[str, tuple[list[int], int]]) -> None:
        """Add the worker's times of writing answers to those of the server."""
        for name, (counts, spent_ns) in new.items():
            phase = self._front.written.setdefault(name, Phase())
            phase.buckets = [now + more for now, more in zip(phase.buckets, counts, strict=True)]
            phase.spent_ns += spent_ns

    # Calls.

    def _take_calls(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._calls, 1, 1)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data, descriptors = b"", []
        for descriptor in descriptors:
            self._run(answer_call(self._front, socket.socket(fileno=descriptor)))
        if not data:  # the channel ends too, and says so
            self._loop.remove_reader(self._calls.fileno())


def _submitted(served: Answering, ask: Ask) -> asyncio.Future[Answer]:
    dtypes = [tensor.type.numpy for tensor in served.spec.inputs]
    if [array.dtype for array in ask.arrays] != dtypes:
        raise BadRequest(f"the inputs of '{ask.name}' are not of its datatypes; a mistake of halfeven")
    return served.submit(ask.arrays, ask.rows, ask.terms)
