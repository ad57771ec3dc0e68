"""``halfeven serve --http-workers N``: the parent process, which starts one engine process and N HTTP workers.

The parent has the port from before the first child to the end, answers no request and runs no model, so that it has
no reason to fail. A child that has ended is started again; one that ends at its start again and again is started less
and less often. Children are forks: a new one has nothing to import.

On SIGTERM the server is not ready any more (the engine process says so), the workers answer for the grace time and
then close their connections, and the engine process ends after them.
"""

import gc
import logging
import math
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from ...models import errors
from ...models.errors import BadSetting, EngineFailed, HalfevenError
from ...models.store import Store
from ...models.usable_cores import usable_cores
from ..access.access_control import LOOK_EVERY_S
from ..address import address
from ..finetune.training.parent_death import die_with_the_parent
from ..http.limits.connections import backlog_of, connection_limit
from ..http.limits.descriptors import raise_descriptor_limit
from ..server import Notify, notify_leaving, port_taken
from ..settings import Settings
from ..tracing.otel_environment import traces_wanted
from .channel import new_memory
from .control import Control, Said, read_packet, send_packet
from .engine_process import run_engine
from .http_worker import run_worker
from .shared_bounds import DESCRIPTORS_EACH, SharedCounts, shared_bounds

_QUICK_S = 2.0  # a child that ends sooner after it was up is started again later
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 8.0
_ENGINE = 0  # the place of the engine process; the workers have those from 1 on
_LOG = logging.getLogger("halfeven")


def serve_with_workers(settings: Settings, store: Store, notify: Notify) -> None:
    """Serve until a signal comes.

    Raises BadSetting where the address cannot be had or a setting does not go with workers, and what the engine process
    could not start with.
    """
    if not hasattr(os, "memfd_create"):
        raise BadSetting("--http-workers needs Linux (memfd_create): start the server without it")
    if traces_wanted(os.environ):
        raise BadSetting(
            "OTEL_… asks for traces, which a server with --http-workers does not write: start it without workers, or "
            "set OTEL_SDK_DISABLED=true"
        )
    settings.certificates  # noqa: B018 (a pair that cannot be used is refused here)
    raise_descriptor_limit()
    if settings.http_workers > (cores := usable_cores()):
        _LOG.warning(
            "--http-workers %d: there are %d cores for them and the models", settings.http_workers, cores
        )
    _Parent(settings, store, _bound(settings), notify).run()


def _bound(settings: Settings) -> socket.socket:
    """The listening socket. Raises BadSetting."""
    try:
        found = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listener = socket.socket(found[0][0], socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(found[0][4])
        listener.listen(backlog_of(connection_limit(settings.max_connections, DESCRIPTORS_EACH)))
    except OSError as error:
        raise port_taken(settings) from error
    return listener


@dataclass(slots=True, eq=False)
class _Child:
    """``pid`` 0: it does not run, and is to be started at ``start_s``. ``up_s``: since when it works (None: not yet).
    ``quick``: how often in a row it ended soon after its start. ``alone``: a worker that needs a channel."""

    place: int
    pid: int = 0
    wire: socket.socket | None = None
    start_s: float = 0.0
    up_s: float | None = None
    quick: int = 0
    alone: bool = False

    @property
    def title(self) -> str:
        """At most 15 characters (prctl(2), PR_SET_NAME)."""
        return "halfeven-engine" if self.place == _ENGINE else f"halfeven-http-{self.place}"

    def send(self, said: Said) -> None:
        if self.wire is not None:
            send_packet(self.wire, said)

    def kill(self) -> None:
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class _Parent:
    def __init__(self, settings: Settings, store: Store, listener: socket.socket, notify: Notify) -> None:
        self._settings, self._store, self._listener, self._notify = settings, store, listener, notify
        self._counts = SharedCounts(settings.http_workers + 1)
        self._children = [_Child(place) for place in range(settings.http_workers + 1)]
        self._engine, self._workers = self._children[_ENGINE], self._children[_ENGINE + 1 :]
        self._selector = selectors.DefaultSelector()
        self._signals, self._last_signal = 0, signal.SIGTERM
        self._leaving = False
        self._engine_starts = 0
        self._needs_keys = settings.needs_keys
        self._failure: HalfevenError | None = None

    def run(self) -> None:
        """Raises what the engine process could not start with. A third signal ends this process."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.setblocking(False)
            self._wakeup = (ours, theirs)
            self._selector.register(ours, selectors.EVENT_READ)
            signal.set_wakeup_fd(theirs.fileno())
            before = {
                number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)
            }
            gc.freeze()  # the collector would write to every object that the children share
            try:
                self._work()
            finally:
                self._kill_all()
                signal.set_wakeup_fd(-1)
                for number, handler in before.items():
                    signal.signal(number, handler)
        if self._signals > 2:
            signal.raise_signal(self._last_signal)
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        host, port = self._listener.getsockname()[:2]
        scheme = "http" if self._settings.tls_cert is None else "https"
        announced = False
        while not self._is_over():
            self._look_at_keys()
            if not self._leaving:
                self._start_what_is_due()
            self._connect()
            if not announced and all(worker.up_s is not None for worker in self._workers):
                announced = True
                self._notify(f"halfeven listens on {scheme}://{address(host, port)}")
            for key, _ in self._selector.select(self._pause_s()):
                if key.data is None:
                    with suppress(BlockingIOError):
                        self._wakeup[0].recv(64)
                elif isinstance(key.data, _Child):
                    self._hear(key.data)
            self._go_on_leaving()

    def _is_over(self) -> bool:
        return self._failure is not None or (self._leaving and not any(child.pid for child in self._children))

    def _pause_s(self) -> float:
        """Until a child is to be started, or the key file to be looked at again."""
        if self._leaving:
            return 1.0
        now_s = time.monotonic()
        starts = [child.start_s - now_s for child in self._children if not child.pid]
        return max(0.0, min([*starts, 1.0 if self._needs_keys else LOOK_EVERY_S]))

    def _look_at_keys(self) -> None:
        """From the moment that there is a key file, keys are needed: a child that starts later does not know of it."""
        if not self._needs_keys:
            with suppress(OSError, HalfevenError):
                self._needs_keys = self._settings.keys.stamp() is not None

    # Signals.

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Each signal goes one step further: leave, hurry, end at once."""
        self._signals, self._last_signal = self._signals + 1, signal.Signals(number)
        self._grace_s = 0.0 if number == signal.SIGINT else self._settings.drain_seconds

    def _go_on_leaving(self) -> None:
        if self._signals and not self._leaving:
            self._leaving = True
            if self._grace_s:
                notify_leaving(self._grace_s, self._notify)
            self._engine.send({"leave": True})
            for worker in self._workers:
                worker.send({"leave": self._grace_s})
            self._listener.close()  # the workers have it still, and accept what waits
        if self._signals > 1:
            for child in self._children:
                child.send({"hurry": True})
        if self._signals > 2:
            self._kill_all()
        if self._leaving and not any(worker.pid for worker in self._workers):
            if self._engine.up_s is None:
                self._engine.kill()  # it hears nothing before it is up, which may take hours
            else:
                self._engine.send({"end": True})

    # Children.

    def _start_what_is_due(self) -> None:
        for child in self._children:
            if not child.pid and time.monotonic() >= child.start_s:
                try:
                    self._start(child)
                except OSError as error:  # no memory or process is left: the others go on
                    _LOG.error("%s cannot be started now: %s", self._name(child), error)
                    child.start_s = time.monotonic() + _FIRST_PAUSE_S

    def _start(self, child: _Child) -> None:
        bounds = shared_bounds(self._settings.limits, self._counts, child.place)
        needs_keys = self._needs_keys
        if child is self._engine:
            self._engine_starts += 1
            self._fork(
                child,
                lambda control: run_engine(
                    self._settings,
                    self._store,
                    control,
                    bounds,
                    needs_keys,
                    self._engine_starts,
                    self._notify,
                ),
            )
        else:
            self._fork(
                child, lambda control: run_worker(self._settings, self._listener, control, bounds, needs_keys)
            )

    def _fork(self, child: _Child, run: Callable[[Control], None]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            raise
        if pid == 0:
            ours.close()
            self._become_child(child, theirs, run)
        theirs.close()
        ours.setblocking(False)
        child.pid, child.wire, child.up_s, child.alone = pid, ours, None, False
        self._selector.register(ours, selectors.EVENT_READ, child)

    def _become_child(self, child: _Child, wire: socket.socket, run: Callable[[Control], None]) -> None:
        """Run the child's work, and end the process."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            die_with_the_parent(wire.fileno())
            with suppress(OSError):  # as `top` and `ps` show it
                Path("/proc/self/comm").write_text(child.title)
            self._selector.close()
            for one in (*self._wakeup, *(other.wire for other in self._children if other.wire is not None)):
                one.close()
            if child is self._engine:
                self._listener.close()
            run(Control(wire))
            code = 0
        except HalfevenError as error:
            send_packet(wire, {"failed": type(error).__name__, "message": str(error)})
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except BaseException:
            _LOG.exception("a process of the server failed")
        finally:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
            os._exit(code)

    def _hear(self, child: _Child) -> None:
        assert child.wire is not None
        try:
            packet = read_packet(child.wire)
        except BlockingIOError:
            return
        if packet is None:
            self._ended(child)
            return
        said = packet[0]
        if "failed" in said:
            self._failed(child, said)
        if "up" in said:
            child.up_s = time.monotonic()
        child.alone = child.alone or "alone" in said

    def _failed(self, child: _Child, said: Said) -> None:
        """A child says why it cannot start."""
        if child is self._engine and self._engine_starts == 1:
            kind = getattr(errors, said["failed"], EngineFailed)
            self._failure = kind(said["message"])
        else:
            _LOG.error("%s cannot start: %s", self._name(child), said["message"])

    def _ended(self, child: _Child) -> None:
        assert child.wire is not None
        self._selector.unregister(child.wire)
        child.wire.close()
        _, status = os.waitpid(child.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        now_s = time.monotonic()
        is_quick = child.up_s is None or now_s - child.up_s < _QUICK_S
        child.quick = child.quick + 1 if is_quick else 0
        pause_s = min(_FIRST_PAUSE_S * 2 ** (child.quick - 2), _LONGEST_PAUSE_S) if child.quick > 1 else 0.0
        first = child is self._engine and self._engine_starts == 1 and child.up_s is None
        child.pid, child.wire, child.up_s, child.start_s = 0, None, None, now_s + pause_s
        self._counts.clear(child.place)
        if self._leaving:
            return
        how = f"by signal {-code}" if code < 0 else f"with status {code}"
        if first and self._failure is None:
            self._failure = EngineFailed(f"the engine process ended {how} at its start; the log says more")
        elif self._failure is None:
            again = f"in {math.ceil(pause_s)} s" if pause_s else "now"
            self._notify(f"{self._name(child)} ended {how}: it is started again {again}")

    def _name(self, child: _Child) -> str:
        return "the engine process" if child is self._engine else f"HTTP worker {child.place}"

    def _connect(self) -> None:
        """Give every worker that needs one a channel to the engine process, where that works."""
        engine = self._engine
        if engine.up_s is None or engine.wire is None:
            return
        for worker in self._workers:
            if worker.alone and worker.wire is not None:
                try:
                    _give_channel(engine.wire, worker.wire, worker.pid)
                except OSError as error:
                    _LOG.error("%s cannot be connected now: %s", self._name(worker), error)
                    return
                worker.alone = False

    def _kill_all(self) -> None:
        """End every child that is left, and wait for it."""
        for child in self._children:
            if child.pid:
                child.kill()
                os.waitpid(child.pid, 0)
                child.pid = 0
            if child.wire is not None:
                self._selector.unregister(child.wire)
                child.wire.close()
                child.wire = None


def _give_channel(engine: socket.socket, worker: socket.socket, pid: int) -> None:
    """Send both ends of a new channel. One that has just ended does not take its end: the other one then loses the
    channel, and asks for another. Raises OSError."""
    with ExitStack() as opened:
        memory = new_memory()
        opened.callback(os.close, memory)
        wires = [opened.enter_context(wire) for wire in socket.socketpair()]
        calls = [opened.enter_context(call) for call in socket.socketpair()]
        for child, wire, call in zip((engine, worker), wires, calls, strict=True):
            send_packet(child, {"connect": True, "pid": pid}, [wire.fileno(), call.fileno(), memory])
