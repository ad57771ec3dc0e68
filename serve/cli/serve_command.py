"""``halfeven serve``: its options by the names of the settings that they give (`serve/settings.py`, where further ones
are)."""

import inspect
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..access.client_key import VARIABLES
from ..logs import announce, set_up
from .console import Ended, command, notify

if TYPE_CHECKING:
    from ..settings import Settings


def _option(kind: Any, help: str, *names: str) -> Any:
    return Annotated[kind | None, typer.Option(*names, help=help)]


_OPTIONS: Mapping[str, Any] = {
    "store": _option(Path, "The folder of the store; default halfeven-store."),
    "models": _option(Path, "Also convert the model folders found here."),
    "state": _option(
        Path, "Only read the store, and keep state here; default, where it may not be written: in the cache."
    ),
    "host": _option(str, "The address to listen on; default 127.0.0.1, this machine alone."),
    "port": _option(int, "The port; default 8000. 0 takes a free one."),
    "grpc_port": _option(int, "Speak gRPC too, at this port (8001 by custom); default not."),
    "device": _option(str, "auto, cpu or cuda:N; default auto."),
    "fallback": _option(str, "fp32 or none, where a half is refused; default fp32."),
    "endpoints": _option(
        list[str], "Your own code before and behind a model: FILE.py:CLASS. Repeatable.", "--endpoint"
    ),
    "key_file": _option(Path, "The file of the keys; default: in the store (`halfeven keys`)."),
    "tls_cert": _option(Path, "Speak TLS: a PEM file with the certificate and its chain."),
    "tls_key": _option(Path, "The certificate's private key, a PEM file, not encrypted."),
    "expose_without_auth": _option(bool, "Listen beyond this machine without keys.", "--expose-without-auth"),
    "allowed_hosts": _option(str, "Further names of this server: models.example.com,*.lan or *."),
    "root_path": _option(str, "The path below which a proxy shows this server: /models."),
    "cors_origins": _option(
        str, "Origins of web pages that may ask: https://app.example.com,… or *; default none."
    ),
    "require": _option(
        list[str], "Not ready without this model; default: those ready at the start. Repeatable."
    ),
    "jobs": _option(int, "Fine-tuning jobs that run at once, at most as many as the cores hold; default 1."),
    "triton_strict": _option(bool, "Answer as Triton does where halfeven differs.", "--triton-strict"),
    "server_name": _option(str, "The server's name in GET /v2; default halfeven."),
    "parity_sample": _option(
        float, "Share of a half's requests that its FP32 original checks; default 0.001."
    ),
    "keep_drifted": _option(
        int, "Inputs on which a half drifts that are kept, on disk, for the next conversion; default 0."
    ),
    "keep_previous_seconds": _option(
        float, "Seconds that a replaced version stays loaded and the new one is on trial; default 600."
    ),
    "rescue": _option(
        bool, "Keep the FP32 original loaded beside a half; default yes.", "--rescue/--no-rescue"
    ),
    "drain_seconds": _option(
        float, "Seconds after SIGTERM in which the server is not ready but answers; default 5."
    ),
    "log_level": _option(str, "debug, info, warning or error; default warning."),
    "log_format": _option(str, "text, or json: one object a line; default text."),
    "access_log": _option(bool, "Log every infer request.", "--access-log"),
}


def _work(**given: Any) -> Ended:
    """Serve the active version of every model in the store, and follow the store."""
    from ..settings import read_settings

    joined = {name: ",".join(value) for name, value in given.items() if isinstance(value, list) and value}
    settings = read_settings(**given | joined)
    _serve(settings, announce if settings.log_format == "json" else notify)
    return {"status": "stopped"}, None, 0


for _name, _of in _OPTIONS.items():
    _of.__metadata__[0].help += f" [{VARIABLES}{_name.upper()}]"
_PARAMETERS = [
    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=of)
    for name, of in _OPTIONS.items()
]
_work.__signature__ = inspect.Signature(_PARAMETERS)  # type: ignore[attr-defined]
serve = command(_work)
serve.__name__ = "serve"


def _serve(settings: "Settings", notify: Callable[[str], None]) -> None:
    """Serve until a signal comes."""
    from ..server import serve
    from ..settings import unknown_variables
    from ..versions.versions_in_store import store_at

    set_up(settings.log_level, settings.log_format, settings.access_log)
    for sentence in unknown_variables(os.environ):
        logging.getLogger("halfeven").warning("%s", sentence)
    # A store that may not be written is only read.
    opened = store_at(settings.store, "the version of each model folder" if settings.models else "")
    if (said := settings.access.notice) is not None:
        notify(said)
    serve(settings, opened, notify)
