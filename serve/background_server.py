"""A server in a thread of this process: for a program that serves beside its own work."""

import socket
import threading
from types import TracebackType

from ..models.engines.cpu.openmp import end_openmp_threads
from ..models.errors import NotReady
from ..models.store.store import Store
from .address import address
from .http.connection.listening import cannot_listen
from .http.connection.polite_server import PoliteServer
from .server import build, http_config
from .settings import Settings

_LOOK_S = 0.2


class BackgroundServer:
    """Listens from its creation on, until `close`. ``url``: where; port 0 of the settings takes a free one.

    Raises BadSetting where the port is taken or another server has the store.
    """

    def __init__(self, settings: Settings, store: Store) -> None:
        certificates = settings.certificates
        end_openmp_threads()  # those of the calling thread would slow what serves
        try:
            listener = socket.create_server((settings.host, settings.port))
        except OSError as error:
            raise cannot_listen(settings.host, settings.port, error) from error
        try:
            app, self._roster = build(settings, store)
        except BaseException:
            listener.close()
            raise
        self._server = PoliteServer(http_config(settings, app, certificates), on_leaving=self._roster.leave)
        host, port = listener.getsockname()[:2]
        self.url = f"{'http' if certificates is None else 'https'}://{address(host, port)}"
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(listener,), name="halfeven-server", daemon=True
        )
        self._thread.start()

    def _run(self, listener: socket.socket) -> None:
        try:
            self._server.run([listener])
        finally:
            self._ended.set()

    def until_ready(self) -> "BackgroundServer":
        """Wait until the models of the store are loaded. Raises NotReady, and closes, where one cannot be."""
        while not self._server.started:
            if not self._thread.is_alive():
                raise NotReady(f"the server at {self.url} ended while it started; its log says why")
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

    def __enter__(self) -> "BackgroundServer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
