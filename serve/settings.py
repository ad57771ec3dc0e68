"""The settings of the server: arguments win over the environment (HALFEVEN_…), that over the defaults."""

import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from ..models.errors import BadSetting
from ..models.files.home_folder import at_home
from ..models.folder.model_name import NAME
from ..models.nearest_name import nearest_name
from ..models.order.one_order import DEFAULT_BOUNDS
from ..models.order.order_settings import LEAST_MEMORY_MIB, LEAST_RUNS, MOST_MEMORY_MIB
from .access.access_control import AccessControl
from .access.certificates import Certificates
from .access.client_key import VARIABLE, VARIABLES
from .access.keys import NAME_IN_STORE, KeyFile
from .http.cross_origin import read_origins
from .http.limits.request_limits import DEFAULTS, RequestLimits
from .http.web_guard import WebGuard, is_loopback, read_names

_MIB = 2**20
_OTHER_VARIABLES = frozenset((VARIABLE,))  # of the commands that ask a server
_OF_TESTS = "HALFEVEN_TEST_"
# The processes of a conversion read them from the environment that they inherit (`models/order/order_settings.py`).
OF_CONVERSIONS = ("convert_seconds", "convert_memory_mib", "convert_runs")
_PATH = re.compile(r"(?:/[A-Za-z0-9._~-]+)+")


class Settings(BaseSettings):
    """Every value is checked once, here."""

    model_config = SettingsConfigDict(env_prefix=VARIABLES, extra="forbid")

    store: Path = Path("halfeven-store")
    models: Path | None = None
    # With it the store is only read; None: where it may not be written, a folder in the cache.
    state: Path | None = None
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    grpc_port: int | None = Field(None, ge=0, le=65535)  # None: no gRPC
    device: str = "auto"
    endpoints: str = ""  # FILE.py:CLASS, separated by commas
    endpoint_seconds: float = Field(10.0, gt=0, description="seconds of each call of an endpoint's code")
    endpoint_memory_mib: int = Field(2048, ge=64, le=2**24, description="MiB of an endpoint's private memory")
    compute_nice: int = Field(5, ge=0, le=19, description="niceness of the thread that computes, on a CPU")
    fallback: Literal["fp32", "none"] = "fp32"
    expose_without_auth: bool = False
    key_file: Path | None = None  # by default in the store
    tls_cert: Path | None = None
    tls_key: Path | None = None
    root_path: str = ""  # the path below which a proxy shows this server
    cors_origins: str = ""  # of pages that may ask, separated by commas
    require: str = ""  # models without which the server is not ready, separated by commas
    allowed_hosts: str = ""  # further names of this server, separated by commas
    triton_strict: bool = False
    server_name: str | None = Field(None, min_length=1, max_length=128)
    max_body_mib: int = Field(
        DEFAULTS.body_bytes // _MIB, ge=1, le=65536, description="MiB of a body, as sent and once unpacked"
    )
    max_upload_mib: int = Field(
        DEFAULTS.upload_bytes // _MIB, ge=1, le=2**20, description="MiB of a training file"
    )
    max_files_mib: int = Field(
        DEFAULTS.files_bytes // _MIB, ge=1, le=2**24, description="MiB of all training files together"
    )
    jobs: int = Field(1, ge=1, le=64)
    trainer_threads: int = Field(1, ge=1, le=1024, description="threads of each process of a trainer")
    trainer_processes: int = Field(
        1, ge=1, le=64, description="processes of a trainer; on CUDA one for each GPU"
    )
    trainer_priority: Literal["low", "idle"] = Field(
        "low", description="priority of a trainer's processes; both yield to serving"
    )
    trainer_memory_mib: int | None = Field(
        None,
        ge=1024,
        le=2**24,
        description="MiB of each trainer's private memory; by default most of what there is, divided among --jobs",
    )
    convert_seconds: float = Field(
        DEFAULT_BOUNDS.seconds, gt=0, description="seconds of a conversion, with all that it starts"
    )
    convert_memory_mib: int | None = Field(
        None,
        ge=LEAST_MEMORY_MIB,
        le=MOST_MEMORY_MIB,
        description="MiB of each conversion's memory; by default most of what there is, divided among --jobs",
    )
    convert_runs: int = Field(
        DEFAULT_BOUNDS.runs, ge=LEAST_RUNS, description="trial runs of one bare ONNX file"
    )
    body_seconds: float = Field(
        DEFAULTS.arrival_seconds,
        gt=0,
        description="seconds for a head to come, from the connection on, and for a body",
    )
    idle_seconds: int = Field(
        DEFAULTS.idle_seconds, ge=1, le=86400, description="seconds between two requests on a kept connection"
    )
    grpc_ping_seconds: int = Field(
        DEFAULTS.ping_seconds,
        ge=1,
        le=86400,
        description="seconds between two keepalive pings of a gRPC client",
    )
    max_in_flight_mib: int | None = Field(
        None,
        ge=1,
        le=2**20,
        description="MiB that all requests together may hold; by default a part of the memory",
    )
    max_connections: int | None = Field(
        None,
        ge=1,
        le=2**20,
        description="open connections; by default what the descriptors of the process allow",
    )
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    log_format: Literal["text", "json"] = "text"
    access_log: bool = False
    drain_seconds: float = Field(5.0, ge=0, le=3600)  # after SIGTERM, before the port is closed
    shutdown_seconds: float = Field(
        30.0, gt=0, description="seconds for the requests under way, once the port is closed"
    )
    rescue: bool = True
    parity_sample: float = Field(0.001, ge=0, le=1)
    keep_previous_seconds: float = Field(600.0, ge=0)
    watch_faults: int = Field(
        3,
        ge=1,
        description="faults of a new version, which the one before did not commit, that end its trial",
    )
    watch_fault_share: float = Field(
        0.01, ge=0, le=1, description="the least share of a new version's answers that such faults must be"
    )
    watch_slower: float = Field(
        3.0,
        gt=1,
        description="a new version's batches may take so many times as long as those of the version before",
    )
    keep_drifted: int = Field(0, ge=0, le=1000)
    drift_over: int = Field(
        5, ge=1, description="checked answers beyond the gate's limit at which a version counts as drifted"
    )
    drift_of: int = Field(
        50, ge=1, description="number of the last checked answers among which `HALFEVEN_DRIFT_OVER` counts"
    )

    @field_validator("store", "models", "state", "key_file", "tls_cert", "tls_key")
    @classmethod
    def _is_at_home(cls, value: Path | None) -> Path | None:
        return None if value is None else at_home(value)

    @field_validator("root_path")
    @classmethod
    def _is_a_path(cls, value: str) -> str:
        path = value.rstrip("/")
        if path and not _PATH.fullmatch(path):
            raise ValueError(
                "expected a path such as /models, of letters, digits and -._~ between its slashes"
            )
        return path

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, value: str) -> str:
        return ",".join(read_origins(value))

    @field_validator("allowed_hosts")
    @classmethod
    def _are_names(cls, value: str) -> str:
        return ",".join(read_names(value))

    @field_validator("require")
    @classmethod
    def _are_models(cls, value: str) -> str:
        names = [name.strip() for name in value.split(",") if name.strip()]
        if wrong := [name for name in names if not NAME.fullmatch(name)]:
            raise ValueError(f"{wrong[0][:80]!r} is no model's name: expected names separated by commas")
        return ",".join(names)

    @property
    def required(self) -> list[str]:
        """The models without which the server is not ready."""
        return self.require.split(",") if self.require else []

    @property
    def endpoint_places(self) -> list[str]:
        """FILE.py:CLASS of each endpoint."""
        return [str(at_home(Path(place.strip()))) for place in self.endpoints.split(",") if place.strip()]

    @property
    def guard(self) -> WebGuard:
        """The names that are this server's, and the pages that may ask it."""
        return WebGuard(self.host, read_names(self.allowed_hosts), read_origins(self.cors_origins))

    @property
    def certificates(self) -> Certificates | None:
        """The pair that the server shows; None: it speaks no TLS. Raises BadSetting."""
        if self.tls_cert is None or self.tls_key is None:
            if self.tls_cert is not self.tls_key:
                raise BadSetting(
                    "--tls-cert and --tls-key are needed together: a certificate, and its private key"
                )
            return None
        return Certificates(self.tls_cert, self.tls_key)

    @property
    def limits(self) -> RequestLimits:
        """Every limit on requests, the settable ones as they were set."""
        mib = self.max_in_flight_mib
        return RequestLimits(
            body_bytes=self.max_body_mib * _MIB,
            arrival_seconds=self.body_seconds,
            idle_seconds=self.idle_seconds,
            ping_seconds=self.grpc_ping_seconds,
            in_flight_bytes=None if mib is None else mib * _MIB,
            connections=self.max_connections,
            upload_bytes=self.max_upload_mib * _MIB,
            files_bytes=self.max_files_mib * _MIB,
        )

    @property
    def keys(self) -> KeyFile:
        """The file of the keys, which need not exist."""
        return KeyFile(self.key_file or self.store / NAME_IN_STORE)

    @property
    def needs_keys(self) -> bool:
        """True if requests are refused where there is no key file too."""
        return not is_loopback(self.host) and not self.expose_without_auth

    @property
    def access(self) -> AccessControl:
        """The control of who may ask. Raises BadSetting where a key file was named and is not there: without it the
        server would be open; StoreUnusable or DamagedFile where it cannot be read."""
        if self.key_file is not None and self.keys.read() is None:
            raise BadSetting(
                f"--key-file {self.key_file}: there is no such file; `halfeven keys add NAME --key-file "
                f"{self.key_file}` makes it with a first key. Without --key-file the keys are those of the store"
            )
        return AccessControl(self.keys, self.needs_keys or self.key_file is not None)

    @property
    def name_on_the_wire(self) -> str:
        """The server's name in GET /v2; Triton's own examples look for ``triton``."""
        return self.server_name or ("triton" if self.triton_strict else "halfeven")


def read_settings(**given: object) -> Settings:
    """Arguments that are None were not given. Raises BadSetting naming the option and what it expects; StoreUnusable
    or DamagedFile where there must be keys and their file cannot be read."""
    if here := [name for name in OF_CONVERSIONS if given.get(name) is not None]:
        raise BadSetting(
            f"{here[0]} = {given[here[0]]!r}: no argument, for the processes of a conversion read it from the "
            f"environment; set {VARIABLES}{here[0].upper()} there"
        )
    settings = _checked(**{key: value for key, value in given.items() if value is not None})
    if settings.port and settings.port == settings.grpc_port:
        raise BadSetting(
            f"--port and --grpc-port are both {settings.port}: expected two ports; gRPC has 8001 by custom"
        )
    keys = settings.keys.read() if settings.needs_keys else None
    if settings.needs_keys and (keys is None or not keys.by_id):
        raise BadSetting(
            f"--host {settings.host} listens beyond this machine, and there is no key in {settings.keys.path}: "
            "`halfeven keys add NAME` makes one. Give --expose-without-auth if a proxy or a network keeps others out"
        )
    return settings


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """A sentence for each variable of ours that is no setting, and so changes nothing."""
    known = {f"{VARIABLES}{name.upper()}" for name in Settings.model_fields} | _OTHER_VARIABLES
    sent = [name for name in environment if name.upper() not in known and _is_like(name.upper(), known)]
    return [
        f"the environment variable {name} is no setting and changes nothing: the nearest one is "
        f"{nearest_name(name.upper(), sorted(known))}"
        for name in sorted(sent)
        if not name.startswith(_OF_TESTS)
    ]


def _is_like(name: str, known: set[str]) -> bool:
    return name.startswith(VARIABLES.rstrip("_")) or bool(get_close_matches(name, known, 1, 0.9))


def largest_upload() -> int:
    """Bytes of the largest training file that a server with this environment takes. Raises BadSetting."""
    return _checked().limits.upload_bytes


def _checked(**given: object) -> Settings:
    try:
        return Settings(**given)  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors()[0]
        field = "_".join(map(str, first["loc"]))
        name = f"--{field.replace('_', '-')}" if field in given else f"{VARIABLES}{field.upper()}"
        if first["type"] == "extra_forbidden":
            near = nearest_name(field, Settings.model_fields).replace("_", "-")
            raise BadSetting(f"{name} is no setting: the nearest one is --{near}") from None
        raise BadSetting(
            f"{name} = {first['input']!r}: {first['msg'].removeprefix('Value error, ')}"
        ) from None
