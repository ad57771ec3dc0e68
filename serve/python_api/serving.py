"""``halfeven.serve``: a server beside the program that calls it."""

import os
import signal
import sys
import threading
from contextlib import suppress
from typing import Any
from weakref import WeakSet

from ...models.errors import BadSetting
from ..background_server import Server
from ..cli.console import notify
from ..endpoint.endpoint import Endpoint
from ..settings import read_settings
from .arrays_given import given_store
from .half import Half

_open: WeakSet[Server] = WeakSet()  # one that runs is held by its thread
# These options are the command's alone: a program has its own log, closes the server itself and calls `convert`.
_OF_THE_COMMAND = frozenset(("models", "log_level", "log_format", "access_log", "drain_seconds"))


def serve(
    model: Half | str | os.PathLike[str],
    *,
    port: int = 8000,
    endpoint: type[Endpoint] | str | None = None,
    **settings: Any,
) -> Server:
    """Serve a half, or every model of a store, and come back when the server is ready.

    ``with serve(half, port=0) as server`` ends the server at the end of the block. A script that only says
    ``serve(half, port=8000)`` serves on after its last line, until Ctrl-C or SIGTERM; so does every script that does
    not close its server, unless an error ends it. ``endpoint``: code before and behind a model, a class of a file that
    can be imported, or ``"FILE.py:CLASS"``. ``settings``: the options of ``halfeven serve`` with underscores
    (``host``, ``device``, ``grpc_port``, ``key_file``, …), without those of its log, ``models`` and ``drain_seconds``.
    Raises BadSetting for these and for a port that is taken, NotReady where a model cannot be served.
    """
    if not_here := sorted(_OF_THE_COMMAND & settings.keys()):
        raise BadSetting(
            f"{', '.join(not_here)}: for the command `halfeven serve` alone; here the program has the log (the logger "
            "halfeven), converts its models and closes its server"
        )
    store = model.store if isinstance(model, Half) else given_store(model)
    place = _place_of(endpoint) if isinstance(endpoint, type) else endpoint
    asked = read_settings(store=store.root, port=port, endpoints=place, **settings)
    server = Server(asked, store, kept=model).until_ready()
    _open.add(server)
    return server


def _place_of(endpoint: type[Endpoint]) -> str:
    """The file and name of the class: the process of the endpoint loads it from there."""
    file = getattr(sys.modules.get(endpoint.__module__), "__file__", None)
    if endpoint.__module__ == "__main__" or file is None or "." in endpoint.__qualname__:
        raise BadSetting(
            f"endpoint={endpoint.__name__}: expected a class of a file of its own, which runs in another "
            f"process: put it "
            f"into one, and import it from there or give endpoint='FILE.py:{endpoint.__name__}'"
        )
    return f"{file}:{endpoint.__name__}"


def _serve_on() -> None:
    """Wait, after the last line of a script, with the servers that it left open, until a signal comes. Where an error
    ended the script, or a person did, they are closed at once: their threads must not run while the interpreter
    ends."""
    failed, interactive = hasattr(sys, "last_value"), hasattr(sys, "ps1") or sys.flags.interactive
    still_open = [server for server in _open if server.is_open]
    if still_open and not failed and not interactive:
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        for server in still_open:
            notify(f"the script is at its end and serves on at {server.url}: Ctrl-C ends it")
        with suppress(KeyboardInterrupt):
            for server in still_open:
                server.until_it_ends()
    for server in still_open:
        server.close()


# `atexit` is too late: the interpreter has then closed the thread pools, with which a server reads large requests.
threading._register_atexit(_serve_on)  # type: ignore[attr-defined]
