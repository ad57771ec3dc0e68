"""What the operator may set: arguments win over the environment (HALFEVEN_…), that over the defaults."""

import ipaddress
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from ..models.errors import BadSetting


class Settings(BaseSettings):
    """Every value is checked once, here."""

    model_config = SettingsConfigDict(env_prefix="HALFEVEN_", extra="forbid")

    store: Path = Path("halfeven-store")
    models: Path | None = None
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    device: str = "auto"
    fallback: Literal["fp32", "none"] = "fp32"
    expose_without_auth: bool = False
    max_body_mib: int = Field(64, ge=1, le=65536)
    max_upload_mib: int = Field(1024, ge=1, le=2**20)
    trainer_threads: int = Field(1, ge=1, le=1024)
    body_seconds: float = Field(30.0, gt=0)
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    log_format: Literal["text", "json"] = "text"
    access_log: bool = False
    shutdown_seconds: float = Field(30.0, gt=0)


def read_settings(**given: object) -> Settings:
    """Arguments that are None were not given. Raises BadSetting naming the option and what it expects."""
    try:
        settings = Settings(**{key: value for key, value in given.items() if value is not None})  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors()[0]
        name = "--" + "-".join(str(part) for part in first["loc"]).replace("_", "-")
        raise BadSetting(f"{name} = {first['input']!r}: {first['msg']}") from None
    if not _is_loopback(settings.host) and not settings.expose_without_auth:
        raise BadSetting(
            f"--host {settings.host} listens beyond this machine, and there are no keys yet: anybody who reaches "
            "the port could use the models. Say --expose-without-auth if a proxy or a network keeps others out"
        )
    return settings


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
