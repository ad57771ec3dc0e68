"""The routes of ``/v2`` that say what the server and its models are. Infer is answered in `routes/infer.py`."""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request, Response

from ....models.errors import NotReady
from ....models.version import __version__
from ...batching.interface import Roster, Served
from ..caller import json_answer
from ..codecs.metadata import model_config, model_metadata, model_statistics, server_metadata
from ..error_mapping import Unready, status_of, without_folders
from ..route_scopes import permit_of


def add_v2(app: FastAPI, roster: Roster, server_name: str, as_triton: bool) -> None:
    _add_server(app, roster, server_name, as_triton)
    _add_models(app, roster)


def _add_server(app: FastAPI, roster: Roster, server_name: str, as_triton: bool) -> None:
    @app.get("/v2/", include_in_schema=False)  # as the standard's own OpenAPI writes it
    @app.get("/v2", tags=["server"])
    async def server() -> Response:
        """Name, version and the protocol extensions that are really offered."""
        return json_answer(server_metadata(server_name, __version__))

    @app.get("/v2/health/live", tags=["server"])
    async def live() -> Response:
        """Liveness: true if the process can answer, false where only a new process can answer again."""
        alive = roster.lost is None
        return json_answer({"live": alive}, 200 if alive else 503)

    @app.get("/v2/health/ready", tags=["server"])
    async def ready(request: Request) -> Response:
        """Every model that was ready at the start or is required is ready; the reasons otherwise, where the server has
        keys only with one."""
        if roster.ready:
            return json_answer({"ready": True})
        reasons = ["a key of this server is needed to read why"]
        permit = permit_of(request.scope)
        if permit.known:
            reasons = [without_folders(one) for one in roster.not_ready_reasons(permit.reaches)]
        fault = Unready("not ready: " + "; ".join(reasons))
        said = {"ready": False, "reasons": reasons, "error": str(fault)}
        return json_answer(said, status_of(fault, as_triton))


def _add_models(app: FastAPI, roster: Roster) -> None:
    @app.get("/v2/models/stats", tags=["models"])
    async def all_statistics() -> Response:
        """The counters of every version that is loaded."""
        return json_answer(statistics_of(roster))

    @app.get("/v2/models/{m}/versions/{v}", tags=["models"])
    @app.get("/v2/models/{m}", tags=["models"])
    async def metadata(m: str, v: str | None = None) -> Response:
        """Inputs, outputs, the versions that are loaded, the precision and why it is that one."""
        return json_answer(metadata_of(roster, m, v))

    @app.get("/v2/models/{m}/versions/{v}/ready", tags=["models"])
    @app.get("/v2/models/{m}/ready", tags=["models"])
    async def model_ready(m: str, v: str | None = None) -> Response:
        """Readiness of this model: true if it answers, else an error with the reason."""
        try:
            name = roster.find(m, v).name
            if roster.leaving:
                raise NotReady("the server is shutting down; ask another one")
            return json_answer({"name": name, "ready": True})
        except NotReady as error:
            raise Unready(str(error)) from error

    @app.get("/v2/models/{m}/versions/{v}/config", tags=["models"])
    @app.get("/v2/models/{m}/config", tags=["models"])
    async def config(m: str, v: str | None = None) -> Response:
        """Triton's ModelConfig, as perf_analyzer reads it."""
        return json_answer(configuration_of(roster, m, v))

    @app.get("/v2/models/{m}/versions/{v}/stats", tags=["models"])
    @app.get("/v2/models/{m}/stats", tags=["models"])
    async def statistics(m: str, v: str | None = None) -> Response:
        """The counters of one version, or of every one of a model that is loaded."""
        return json_answer(statistics_of(roster, m, v))


def _loaded_versions(roster: Roster, name: str) -> list[Served]:
    """Every version of the name that is loaded, the oldest first."""
    loaded_versions = [
        loaded for served in roster.all() if served.name == name for loaded in served.loaded_versions()
    ]
    return sorted(loaded_versions, key=_age)


def _age(loaded: Served) -> tuple[int, str]:
    version = loaded.prepared.version
    return (int(version) if version.isdecimal() else 0, version)


def statistics_of(roster: Roster, name: str | None = None, version: str | None = None) -> dict[str, Any]:
    """The counters of one version, of every loaded one of a name, or of every loaded one. Raises as `Roster.find`."""
    if name is None:
        found = [loaded for served in roster.all() for loaded in served.loaded_versions()]
    else:
        served = roster.find(name, version)
        found = _loaded_versions(roster, name) if version is None else [served]
    each = [model_statistics(one.name, one.prepared.version, one.counters()) for one in found]
    return {"model_stats": each}


def configuration_of(roster: Roster, name: str, version: str | None = None) -> dict[str, Any]:
    """The ModelConfig of a version. Raises as `Roster.find`."""
    return config_of(roster.find(name, version), _loaded_versions(roster, name))


def config_of(served: Served, loaded_versions: Sequence[Served]) -> dict[str, Any]:
    """The ModelConfig of a served version; ``loaded_versions`` are all versions of its name that are loaded."""
    engine = served.prepared.engine
    return model_config(
        served.spec, engine.form, engine.device, [loaded.prepared.version for loaded in loaded_versions]
    )


def metadata_of(roster: Roster, name: str, version: str | None = None) -> dict[str, Any]:
    """The metadata of a version. Raises as `Roster.find`."""
    served, loaded_versions = roster.find(name, version), _loaded_versions(roster, name)
    prepared = served.prepared
    properties = {
        "halfeven_precision": prepared.precision,
        "halfeven_digest": prepared.digest,
        "halfeven_reason": without_folders(prepared.reason),
        "halfeven_device": prepared.engine.device,
        "halfeven_batch_invariance": prepared.invariance,
    }
    if provider := prepared.engine.provider:
        properties["halfeven_provider"] = provider
    versions = [loaded.prepared.version for loaded in loaded_versions]
    return model_metadata(served.spec, versions, prepared.engine.form, properties)
