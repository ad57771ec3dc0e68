"""The options that the operator gives when the application is started on Ray Serve."""

import hashlib
import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from ...models.errors import BadSetting
from ..settings import Settings, read_settings

# The proxies of Ray Serve listen where Ray was told to, which a replica cannot know: keys are needed, or a word.
_BEYOND = "0.0.0.0"
_OF_THE_SERVER = frozenset(
    (
        "store",
        "host",
        "port",
        "grpc_port",
        "models",
        "tls_cert",
        "tls_key",
        "log_level",
        "log_format",
        "access_log",
    )
)
# Options of `serve.deployment`. A batch is made of requests that wait in one replica: Ray's own default, 5 at once,
# forbids it.
_DEPLOYMENT = {
    "max_ongoing_requests": 256,
    "max_queued_requests": 1024,  # at each proxy; further requests get 503 with Retry-After
    "backpressure_config": {"status_code": 503, "retry_after_s": 1},
    "health_check_period_s": 5,
    "health_check_timeout_s": 30,
    # A line per request, as `halfeven serve` writes none by itself.
    "logging_config": {"enable_access_log": False},
}


class Options(BaseModel):
    """``store``: a folder that every node sees, or a URL that fsspec reads (``s3://…``, ``gs://…``, ``memory://…``).

    ``cache``: each node's copy of it (by default below ``~/.cache/halfeven``). ``settings``: those of `halfeven serve`
    (``{"parity_sample": 0.01}``). ``deployment``: options of `ray.serve.deployment` for the replicas, by Ray's names
    (``num_replicas``, ``autoscaling_config``, ``ray_actor_options``, …).
    """

    model_config = ConfigDict(extra="forbid")

    store: str
    cache: Path | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    deployment: dict[str, Any] = Field(default_factory=dict)

    @field_validator("store")
    @classmethod
    def _is_the_same_everywhere(cls, value: str) -> str:
        if "://" not in value and not value.startswith("/"):
            raise ValueError(
                "expected an absolute path or a URL: every node reads it from a folder of its own"
            )
        return value

    def folder(self) -> Path:
        """This node's copy of the store: one for each store, shared by the replicas of the node."""
        if self.cache is not None:
            return self.cache.expanduser().absolute()
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return base / "halfeven" / hashlib.sha256(self.store.encode()).hexdigest()[:16]

    def server_settings(self) -> Settings:
        """The settings of a replica. Raises BadSetting, also where no key is there and nobody said that none is
        needed; StoreUnusable or DamagedFile where the keys cannot be read."""
        if not_here := sorted(_OF_THE_SERVER & self.settings.keys()):
            raise BadSetting(
                f"settings: {', '.join(not_here)}: for `halfeven serve` alone; here Ray's proxies listen and Ray logs"
            )
        given = {**self.settings, "store": self.folder()}
        exposed = read_settings(
            **given, host="127.0.0.1"
        ).expose_without_auth  # "false" is a word for no, too
        asked = read_settings(**{**given, "host": _BEYOND, "expose_without_auth": True})
        asked = asked.model_copy(update={"expose_without_auth": exposed})
        if asked.needs_keys and asked.keys.read() is None:
            raise BadSetting(
                f"the proxies of Ray Serve may listen beyond this machine, and {self.store} has no key: "
                "`halfeven keys add NAME --store STORE` makes one; or give "
                'settings {"expose_without_auth": true} if a network keeps others out'
            )
        return asked

    def deployment_options(self) -> dict[str, Any]:
        """The arguments of `Deployment.options`: what was given, over the defaults. Raises BadSetting."""
        shutdown_s = read_settings(**self.settings).shutdown_seconds
        return {**_DEPLOYMENT, "graceful_shutdown_timeout_s": shutdown_s, **self.deployment}
