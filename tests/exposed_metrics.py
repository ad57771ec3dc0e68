"""The port and the metrics that a server of the container exposes."""

import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
from halfeven.models.store.store import Store
from halfeven.serve.server import build
from halfeven.serve.settings import Settings, read_settings

from tests.serve.conftest import running

PORT = str(Settings.model_fields["port"].default)


@cache
def exposed() -> set[str]:
    """Every sample name that the server writes at /metrics: the families of a server with an empty store."""
    with TemporaryDirectory() as folder:
        app, _ = build(read_settings(store=Path(folder), device="cpu"), Store(Path(folder)))
        with running(app) as address:
            text = httpx.get(f"http://{address}/metrics").text
    names: set[str] = set()
    for name, kind in re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE):
        names |= {f"{name}_{end}" for end in ("bucket", "count", "sum")} if kind == "histogram" else {name}
    return names
