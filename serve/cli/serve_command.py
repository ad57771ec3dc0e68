"""``halfeven serve``: its options. Each is a setting too, as its help says; `serve/settings.py` has the rest."""

import inspect
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..access.client_key import VARIABLES
from ..logs import announce, make_all_stderr_json, set_up
from .console import Ended, command, notify

if TYPE_CHECKING:
    from ..settings import Settings


def _option(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help)


Store = Annotated[Path | None, _option("The folder of the store; default halfeven-store.")]
State = Annotated[
    Path | None,
    _option("Only read the store, and keep state here; default, where it may not be written: in the cache."),
]
Models = Annotated[Path | None, _option("Also convert the model folders found here.")]
Host = Annotated[str | None, _option("The address to listen on; default 127.0.0.1, this machine alone.")]
Port = Annotated[int | None, _option("The port; default 8000. 0 takes a free one.")]
GrpcPort = Annotated[int | None, _option("Speak gRPC too, at this port (8001 by custom); default not.")]
HttpWorkers = Annotated[
    str | None, typer.Option(hidden=True)
]  # refused by the settings, with what replaced it
Device = Annotated[str | None, _option("auto, cpu or cuda:N; default auto.")]
Fallback = Annotated[str | None, _option("fp32 or none, where a half is refused; default fp32.")]
Endpoints = Annotated[
    list[str] | None,
    _option("Your own code before and behind a model: FILE.py:CLASS. Repeatable.", "--endpoint"),
]
KeyFile = Annotated[Path | None, _option("The file of the keys; default: in the store (`halfeven keys`).")]
Certificate = Annotated[Path | None, _option("Speak TLS: a PEM file with the certificate and its chain.")]
PrivateKey = Annotated[Path | None, _option("The certificate's private key, a PEM file, not encrypted.")]
Exposed = Annotated[bool | None, _option("Listen beyond this machine without keys.", "--expose-without-auth")]
Hosts = Annotated[str | None, _option("Further names of this server: models.example.com,*.lan or *.")]
RootPath = Annotated[str | None, _option("The path below which a proxy shows this server: /models.")]
Origins = Annotated[
    str | None, _option("Origins of web pages that may ask: https://app.example.com,… or *; default none.")
]
Required = Annotated[
    list[str] | None, _option("Not ready without this model; default: those ready at the start. Repeatable.")
]
Jobs = Annotated[
    int | None, _option("Fine-tuning jobs that run at once, at most as many as the cores hold; default 1.")
]
Strict = Annotated[bool | None, _option("Answer as Triton does where halfeven differs.", "--triton-strict")]
ServerName = Annotated[str | None, _option("The server's name in GET /v2; default halfeven.")]
Sample = Annotated[
    float | None, _option("Share of a half's requests that its FP32 original checks; default 0.001.")
]
Kept = Annotated[
    float | None,
    _option("Seconds that a replaced version stays loaded and the new one is on trial; default 600."),
]
Rescue = Annotated[
    bool | None, _option("Keep the FP32 original loaded beside a half; default yes.", "--rescue/--no-rescue")
]
Drain = Annotated[
    float | None, _option("Seconds after SIGTERM in which the server is not ready but answers; default 5.")
]
LogLevel = Annotated[str | None, _option("debug, info, warning or error; default warning.")]
LogFormat = Annotated[str | None, _option("text, or json: one object a line; default text.")]
AccessLog = Annotated[bool | None, _option("Log every infer request.", "--access-log")]


@command
def serve(
    store: Store = None,
    models: Models = None,
    state: State = None,
    host: Host = None,
    port: Port = None,
    grpc_port: GrpcPort = None,
    http_workers: HttpWorkers = None,
    device: Device = None,
    fallback: Fallback = None,
    endpoints: Endpoints = None,
    key_file: KeyFile = None,
    tls_cert: Certificate = None,
    tls_key: PrivateKey = None,
    expose_without_auth: Exposed = None,
    allowed_hosts: Hosts = None,
    root_path: RootPath = None,
    cors_origins: Origins = None,
    require: Required = None,
    jobs: Jobs = None,
    triton_strict: Strict = None,
    server_name: ServerName = None,
    parity_sample: Sample = None,
    keep_previous_seconds: Kept = None,
    rescue: Rescue = None,
    drain_seconds: Drain = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
    access_log: AccessLog = None,
) -> Ended:
    """Serve every live version in the store, and follow the store."""
    as_objects = (log_format or os.environ.get("HALFEVEN_LOG_FORMAT")) == "json"
    if as_objects:
        make_all_stderr_json()  # before any library that writes to stderr is imported
    from ..settings import read_settings

    settings = read_settings(
        store=store, models=models, state=state,
        host=host, port=port, grpc_port=grpc_port, http_workers=http_workers,
        device=device, fallback=fallback, key_file=key_file, tls_cert=tls_cert, tls_key=tls_key,
        expose_without_auth=expose_without_auth, allowed_hosts=allowed_hosts,
        root_path=root_path, cors_origins=cors_origins,
        require=",".join(require) if require else None,
        endpoints=",".join(endpoints) if endpoints else None, jobs=jobs,
        triton_strict=triton_strict, server_name=server_name, parity_sample=parity_sample,
        keep_previous_seconds=keep_previous_seconds, rescue=rescue, drain_seconds=drain_seconds,
        log_level=log_level, log_format=log_format, access_log=access_log,
    )  # fmt: skip
    _serve(settings, announce if as_objects else notify)
    return {"status": "stopped"}, None, 0


for _name, _parameter in inspect.signature(serve).parameters.items():
    if _name not in ("http_workers", "as_json"):
        _parameter.annotation.__metadata__[0].help += f" [{VARIABLES}{_name.upper()}]"


def _serve(settings: "Settings", notify: Callable[[str], None]) -> None:
    """Serve until a signal comes."""
    from ..access.access_control import AccessControl
    from ..server import serve
    from ..settings import unknown_variables
    from ..versions.versions_in_store import store_at

    set_up(settings.log_level, settings.log_format, settings.access_log)
    for sentence in unknown_variables(os.environ):
        logging.getLogger("halfeven").warning("%s", sentence)
    # A store that may not be written is only read.
    opened = store_at(settings.store, "the version of each model folder" if settings.models else "")
    if (said := AccessControl(settings.keys, settings.needs_keys).notice) is not None:
        notify(said)
    serve(settings, opened, notify)
