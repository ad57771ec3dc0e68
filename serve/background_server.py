"""A server in a thread of this process: for a program that serves beside its own work."""

import socket
import threading
from collections.abc import Sequence
from types import TracebackType

from ..models.engines.cpu.openmp import end_openmp_threads
from ..models.errors import HalfevenError, NotReady
from ..models.store.store import Store
from .address import address
from .http.connection.listening import cannot_listen, listeners_at
from .http.connection.polite_server import PoliteServer
from .server import build, grpc_beside, grpc_server, http_config
from .settings import Settings

_LOOK_S = 0.2
_BACKLOG = 2048  # connections that wait in the kernel until they are accepted


class Server:
    """Listens from its creation on, until `close`. ``url``: where; port 0 of the settings takes a free one. ``kept``:
    an object that must live as long as the server.

    Raises BadSetting where the port is taken or another server has the store.
    """

    def __init__(self, settings: Settings, store: Store, kept: object = None) -> None:
        self.kept = kept
        certificates = settings.certificates
        if settings.grpc_port is not None:
            grpc_server()  # while nothing is open yet
        end_openmp_threads()  # those of the calling thread would slow what serves
        try:
            listeners = listeners_at(settings.host, settings.port, _BACKLOG)
        except OSError as error:
            raise cannot_listen(settings.host, settings.port, error) from error
        try:
            app, self._roster = build(settings, store)
            beside = grpc_beside(settings, app, self._roster, certificates)
        except BaseException:
            for listener in listeners:
                listener.close()
            raise
        self._server = PoliteServer(
            http_config(settings, app, certificates), on_leaving=self._roster.leave, beside=beside
        )
        host, port = listeners[0].getsockname()[:2]
        self.url = f"{'http' if certificates is None else 'https'}://{address(host, port)}"
        self._ended = threading.Event()
        self._fault: HalfevenError | None = None
        self._thread = threading.Thread(
            target=self._run, args=(listeners,), name="halfeven-server", daemon=True
        )
        self._thread.start()

    def _run(self, listeners: Sequence[socket.socket]) -> None:
        try:
            self._server.run([*listeners])
        except HalfevenError as error:  # gRPC's port is taken, for example
            self._fault = error
        finally:
            for listener in listeners:
                listener.close()
            self._ended.set()

    @property
    def grpc_port(self) -> int | None:
        """The port on which it listens for gRPC; None without gRPC."""
        return None if self._server.beside is None else self._server.beside.port

    def until_ready(self) -> "Server":
        """Wait until the models of the store are loaded. Raises NotReady, and closes, where one cannot be; BadSetting
        where the port for gRPC is taken."""
        while not self._server.started:
            if not self._thread.is_alive():
                raise self._fault or NotReady(
                    f"the server at {self.url} ended while it started; its log says why"
                )
            self._ended.wait(_LOOK_S / 10)
        self._roster.wait()
        if reasons := self._roster.not_ready_reasons():
            self.close()
            raise NotReady("; ".join(reasons))
        return self

    def wait(self) -> None:
        """Serve until Ctrl-C, or until another thread closes the server."""
        try:
            self.until_it_ends()
        except KeyboardInterrupt:
            pass
        finally:
            self.close()

    @property
    def is_open(self) -> bool:
        """False in a process that was forked from this one, too."""
        return self._thread.is_alive()

    def until_it_ends(self) -> None:
        # `join` is not used: a KeyboardInterrupt in it marks a thread that still runs as ended (seen with Python 3.11),
        # and `close` would not wait for it.
        while self.is_open:
            self._ended.wait(_LOOK_S)

    def close(self) -> None:
        """Answer the requests under way, and end."""
        self._server.should_exit = True
        self._thread.join()

    def __enter__(self) -> "Server":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
