"""``halfeven.serve``: a server beside the program that calls it."""

import os
from pathlib import Path
from typing import Any

from ..background_server import BackgroundServer
from ..settings import read_settings
from ..versions.versions_in_store import store_at
from .half import Half


class Server(BackgroundServer):
    """``half`` is held, so that its temporary store lives as long as the server."""

    half: Half | None = None

    def __enter__(self) -> "Server":
        return self


def serve(model: Half | str | os.PathLike[str], *, port: int = 8000, **settings: Any) -> Server:
    """Serve a half, or every model of a store, and come back when the server is ready.

    ``with serve(half, port=0) as server`` ends the server at the end of the block; a script that only serves says
    ``serve(half, port=8000).wait()``, which ends with Ctrl-C. ``settings``: the options of ``halfeven serve`` with
    underscores (``host``, ``device``, ``key_file``, …). Raises BadSetting for a port that is taken, NotReady where a
    model cannot be served.
    """
    store = model.store if isinstance(model, Half) else store_at(Path(model))
    asked = read_settings(store=store.root, port=port, **settings)
    server = Server(asked, store)
    server.half = model if isinstance(model, Half) else None
    server.until_ready()
    return server
