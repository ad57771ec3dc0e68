"""The server's side of an endpoint: its process, which is started anew where it ended, and the calls to it."""

import asyncio
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from ...models.errors import (
    BadRequest,
    BadSetting,
    EndpointFailed,
    EndpointTimedOut,
    NotReady,
    TooLarge,
)
from ...models.order.one_order import bound_child
from ..http.limits.shared_places import SharedPlaces
from .messages import MOST_BYTES, Head, receive, send

_LOG = logging.getLogger("halfeven.endpoint")
_START_S = 60.0  # to import the operator's code and make its class
_MOST_CALLS = 256
_PATIENCE_S = 5.0  # for a process that was killed


def started(places: Iterable[str], seconds: float, memory_mib: int) -> dict[str, "EndpointProcess"]:
    """The endpoints by the names of their models. Raises BadSetting, where two have one model too."""
    found: dict[str, EndpointProcess] = {}
    try:
        for place in places:
            one = EndpointProcess(place, seconds, memory_mib * 2**20)
            if (other := found.setdefault(one.model, one)) is not one:
                one.close()
                raise BadSetting(
                    f"--endpoint {place}: the model '{one.model}' has the endpoint {other.name} already"
                )
    except BadSetting:
        close_all(found.values())
        raise
    return found


def close_all(endpoints: Iterable["EndpointProcess"]) -> None:
    for one in endpoints:
        one.close()


class TracebackOfTheCode(Exception):
    """The traceback of the operator's code as text, for the log."""


class EndpointProcess:
    """``place``: ``FILE.py:CLASS``; ``seconds`` and ``memory_bytes``: of each call, and of the process.

    ``timer``: what kills the process after its time; tests give their own. Raises BadSetting where the class cannot be
    made.
    """

    def __init__(
        self,
        place: str,
        seconds: float,
        memory_bytes: int,
        timer: Callable[[float, Callable[[], None]], threading.Timer] = threading.Timer,
    ) -> None:
        file, _, self.name = place.rpartition(":")
        self._file, self._seconds, self._memory_bytes, self._timer = Path(file), seconds, memory_bytes, timer
        self._ids = itertools.count()
        what = f"requests to the endpoint {self.name} are under way"
        self.places = SharedPlaces(_MOST_CALLS, what, "try again when some were answered", 1.0)
        self._first_id = 0  # of the calls that the process of now has
        self._process: subprocess.Popen[bytes] | None = None
        self._is_killed = False
        self._connection: socket.socket | None = None
        # One call after the other. The process ends with the thread that starts it, so it is always this one.
        self._thread = ThreadPoolExecutor(1, "halfeven-endpoint")
        if self._file.suffix != ".py" or not self._file.is_file() or not self.name.isidentifier():
            raise BadSetting(f"--endpoint {place}: expected FILE.py:CLASS, a class of a file that is there")
        try:
            self.model = self._thread.submit(self._start).result()
        except EndpointFailed as error:
            self.close()
            raise BadSetting(f"--endpoint {place}: {error}") from None
        if not self.model or not isinstance(self.model, str):
            self.close()
            raise BadSetting(f'--endpoint {place}: the class names no model; expected model = "NAME" in it')

    async def preprocess(
        self, body: bytes, is_json: bool, inputs: Mapping[str, str]
    ) -> tuple[int, bytes, str]:
        """The number of the call, and a request of the protocol V2 with the length of its head. ``inputs``: the
        datatypes of the model's inputs by name. A call that is cancelled before its turn is not run."""
        id = next(self._ids)
        call = {"call": "preprocess", "id": id, "json": is_json, "inputs": {**inputs}}
        try:
            head, given = await self._ask(call, body)
        except asyncio.CancelledError:
            self.forget(id)  # the call may have begun
            raise
        return id, given, head["length"]

    async def postprocess(self, id: int, answer: bytes, length: str | None) -> tuple[str, bytes]:
        """The content type and the body of the answer. ``answer``: of the protocol V2."""
        head, given = await self._ask({"call": "postprocess", "id": id, "length": length}, answer)
        return head["kind"], given

    def forget(self, id: int) -> None:
        """The model gave no answer to this call."""
        with suppress(RuntimeError):  # closed
            self._thread.submit(self._forget, id)

    def close(self) -> None:
        """A call under way is ended."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._kill()
        self._thread.shutdown(wait=True)
        self._end()

    async def _ask(self, head: Head, body: bytes) -> tuple[Head, bytes]:
        if len(body) > MOST_BYTES:
            raise TooLarge(f"{len(body)} bytes for the endpoint {self.name}: at most {MOST_BYTES} are taken")
        held = [body]
        del body  # the traceback of a call that failed keeps this frame
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._asked, head, held)
        except asyncio.CancelledError:
            held.clear()  # the executor keeps the arguments of a cancelled call until its turn
            raise

    def _asked(self, head: Head, held: list[bytes]) -> tuple[Head, bytes]:
        """``held``: the body, which is taken out of it; empty where the caller has gone.

        Raises BadRequest in the words of the code, EndpointFailed, EndpointTimedOut, NotReady.
        """
        if not held:
            raise NotReady("the caller has gone")
        body = held.pop()
        has_ended = self._process is None or self._process.poll() is not None
        if head["call"] == "postprocess" and (has_ended or head["id"] < self._first_id):
            raise NotReady(f"the endpoint {self.name} was started anew meanwhile; send the request again")
        if has_ended:
            self._start()
            self._first_id = head["id"]
        answer, given = self._answer_within(
            head["call"], self._seconds, lambda connection: send(connection, head, body)
        )
        if "refused" in answer:
            raise BadRequest(answer["refused"])
        if "failed" in answer:
            self._log(answer)
            raise EndpointFailed(f"{self.name}: {answer['failed']}; the server's log has the traceback")
        return answer, given

    def _start(self) -> str:
        self._end()
        self._connection, theirs = socket.socketpair()
        command = [
            sys.executable,
            "-PB",
            "-m",
            "halfeven.serve.endpoint.operator_code",
            self._file.resolve(),
            self.name,
        ]
        self._is_killed = False
        with theirs:
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=2, process_group=0)
        bound_child(self._process.pid, self._memory_bytes)
        answer, _ = self._answer_within("its start", _START_S, lambda _: None)
        if "failed" in answer:
            self._log(answer)
            self._end()
            raise EndpointFailed(answer["failed"])
        return answer["model"]

    def _log(self, answer: Head) -> None:
        traceback = TracebackOfTheCode(answer["traceback"])
        _LOG.error("the endpoint %s failed: %s", self.name, answer["failed"], exc_info=traceback)

    def _answer_within(
        self, what: str, seconds: float, send_call: Callable[[socket.socket], None]
    ) -> tuple[Head, bytes]:
        """Send a call, and wait for the answer; the process is killed where it is late."""
        assert self._process is not None and self._connection is not None
        late = threading.Event()

        def kill() -> None:
            late.set()
            self._kill()

        timer = self._timer(seconds, kill)
        timer.start()
        message, fault = None, "ended its process"
        try:
            send_call(self._connection)
            if (message := receive(self._connection)) is None:
                self._process.wait(_PATIENCE_S)  # the end of the connection comes before that of the process
        except (OSError, subprocess.TimeoutExpired):
            pass  # it has ended
        except ValueError as error:
            fault = f"gave no answer that can be read ({error})"
        finally:
            timer.cancel()
        if message is not None and not late.is_set():
            return message
        self._kill()
        status = self._process.wait(_PATIENCE_S)
        if late.is_set():
            advice = "" if seconds == _START_S else "; HALFEVEN_ENDPOINT_SECONDS allows more"
            raise EndpointTimedOut(
                f"{self.name}: {what} took longer than {seconds:g} s, and was ended{advice}"
            )
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
        raise EndpointFailed(f"{self.name}: {what} {fault} ({how}); it is started anew for the next request")

    def _forget(self, id: int) -> None:
        if self._connection is not None:
            with suppress(OSError):
                send(self._connection, {"call": "forget", "id": id}, b"")

    def _kill(self) -> None:
        """End the process and what its code has started, which may hold the other end of the connection."""
        process, connection = self._process, self._connection
        if (
            process is not None and not self._is_killed
        ):  # also where it ended by itself: what it started lives on
            self._is_killed = True
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        if connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _end(self) -> None:
        self._kill()
        if self._process is not None:
            self._process.wait(_PATIENCE_S)
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None
