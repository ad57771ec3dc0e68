"""The routes, and nothing but the routes. Infer is answered in front of this (`infer_asgi.py`).

Bodies are read raw: V2 clients send no content type, and a stranger's one must not decide anything.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version as installed_version
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse
from starlette.exceptions import HTTPException

from ..models.errors import BadRequest, HalfevenError, UnknownName
from .border import NotOffered, body_for, body_of, retry_after_of, status_of
from .caller import CallerLeft, answer_or_leave, read_body
from .duty import Roster, Served
from .infer_asgi import MAX_BODY_BYTES, answer_headers
from .metrics import CONTENT_TYPE
from .pages import docs_page, front_page, with_infer
from .protocol.json_numbers import parse
from .protocol.metadata import index_entry, model_config, model_metadata, model_statistics, server_metadata
from .protocol.predict import read_predict, write_predict

_VERSION = installed_version("halfeven")
_SMALL_BODY = 2**20
_OPEN = "halfeven convert FOLDER publishes a model and a running server takes it within seconds; "
_WAYS_OUT = {
    "/v2/repository/models/{m}/load": f"loading over HTTP is not offered: {_OPEN}no load call is needed",
    "/v2/repository/models/{m}/unload": "unloading over HTTP is not offered: see halfeven rollback NAME",
    "/v2/repository/{repository}/index": "named repositories are not offered: POST /v2/repository/index",
    "/v2/systemsharedmemory/{rest:path}": "shared memory is not offered: send binary tensors in the body",
    "/v2/cudasharedmemory/{rest:path}": "shared memory is not offered: send binary tensors in the body",
    "/v2/trace/setting": "the trace extension is not offered: every answer carries Server-Timing",
    "/v2/logging": "the logging extension is not offered: the server's log level is an option of its start",
    "/v2/models/{m}/generate": "the generate extension is not offered: POST tensors to …/infer",
    "/v2/models/{m}/generate_stream": "the generate extension is not offered: POST tensors to …/infer",
}


@dataclass(frozen=True, slots=True)
class History:
    """What the store knows, given from outside. Each raises UnknownName for a name or version it has not.

    They may block (they run in a thread): ``versions(model)`` gives one JSON object per version, each with
    its ``version``; ``report`` HTML; ``plan`` and ``lineage`` JSON; ``rollback(model)`` what is live now.
    """

    versions: Callable[[str], Sequence[Mapping[str, Any]]]
    report: Callable[[str, str], str]
    plan: Callable[[str, str], Any]
    lineage: Callable[[str, str], Any]
    rollback: Callable[[str], Mapping[str, Any]]


def build_app(
    roster: Roster,
    metrics_text: Callable[[], bytes],
    history: History,
    server_name: str = "halfeven",
    max_body_bytes: int = MAX_BODY_BYTES,
    body_timeout_s: float = 30.0,
) -> FastAPI:
    """Every route but infer. ``server_name`` is what /v2 says (Triton's own example asks for ``triton``)."""
    app = FastAPI(title="halfeven", version=_VERSION, docs_url=None, redoc_url=None, redirect_slashes=False)
    _add_errors(app)
    _add_health(app, roster, server_name)
    _add_models(app, roster)
    _add_repository(app, roster)
    _add_predict(app, roster, max_body_bytes, body_timeout_s)
    _add_history(app, roster, history)
    _add_pages(app, roster, metrics_text)
    return app


def _json(value: object, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


def _add_errors(app: FastAPI) -> None:
    async def ours(request: Request, error: Exception) -> Response:
        body, kind = body_of(error, request.url.path)
        seconds = retry_after_of(error)
        headers = None if seconds is None else {"retry-after": str(seconds)}
        return Response(body, status_of(error), headers, kind)

    async def nobody_s(request: Request, error: Exception) -> Response:
        response = await ours(request, error)
        response.headers["connection"] = (
            "close"  # Starlette raises it again for the log, and uvicorn hangs up
        )
        return response

    async def of_the_framework(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = error.detail.lower().replace(" ", "_")
        body, kind = body_for(request.url.path, error.status_code, code, error.detail)
        return Response(body, error.status_code, error.headers, kind)

    async def of_validation(request: Request, error: Exception) -> Response:
        return await ours(request, BadRequest(f"the request's path or query does not fit: {error}"))

    async def nobody_there(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nginx's number; nobody reads it

    app.add_exception_handler(HalfevenError, ours)  # the root: Starlette walks the error's ancestry
    app.add_exception_handler(HTTPException, of_the_framework)
    app.add_exception_handler(RequestValidationError, of_validation)
    app.add_exception_handler(CallerLeft, nobody_there)
    app.add_exception_handler(Exception, nobody_s)


def _add_health(app: FastAPI, roster: Roster, server_name: str) -> None:
    @app.get("/v2", tags=["server"])
    async def server() -> Response:
        """Name, version and the protocol extensions that are really offered."""
        return _json(server_metadata(server_name, _VERSION))

    @app.get("/v2/health/live", tags=["server"])
    async def live() -> Response:
        """The process answers."""
        return _json({"live": True})

    @app.get("/v2/health/ready", tags=["server"])
    async def ready() -> Response:
        """Every model has a version on duty; 503 and the reasons otherwise."""
        if roster.ready:
            return _json({"ready": True})
        reasons = roster.not_ready_reasons()
        return _json({"ready": False, "reasons": reasons, "error": "not ready: " + "; ".join(reasons)}, 503)

    @app.get("/healthz", tags=["server"])
    async def healthz() -> Response:
        """Liveness for orchestrators."""
        return _json({"status": "ok"})


def _add_models(app: FastAPI, roster: Roster) -> None:
    @app.get("/v2/models/stats", tags=["models"])
    async def all_statistics() -> Response:
        """The counters of every model on duty."""
        return _json({"model_stats": [_statistics(served) for served in roster.all()]})

    @app.get("/v2/models/{m}/versions/{v}", tags=["models"])
    @app.get("/v2/models/{m}", tags=["models"])
    async def metadata(m: str, v: str | None = None) -> Response:
        """Inputs, outputs, the version on duty, its precision and why it is that one."""
        return _json(_metadata(roster.find(m, v)))

    @app.get("/v2/models/{m}/versions/{v}/ready", tags=["models"])
    @app.get("/v2/models/{m}/ready", tags=["models"])
    async def model_ready(m: str, v: str | None = None) -> Response:
        """200 where this model answers, 503 where it does not yet."""
        return _json({"name": roster.find(m, v).name, "ready": True})

    @app.get("/v2/models/{m}/versions/{v}/config", tags=["models"])
    @app.get("/v2/models/{m}/config", tags=["models"])
    async def config(m: str, v: str | None = None) -> Response:
        """Triton's ModelConfig, as perf_analyzer reads it."""
        served = roster.find(m, v)
        return _json(model_config(served.spec, served.duty.engine.form, served.duty.engine.device))

    @app.get("/v2/models/{m}/versions/{v}/stats", tags=["models"])
    @app.get("/v2/models/{m}/stats", tags=["models"])
    async def statistics(m: str, v: str | None = None) -> Response:
        """The counters of one model."""
        return _json({"model_stats": [_statistics(roster.find(m, v))]})


def _statistics(served: Served) -> dict[str, Any]:
    return model_statistics(served.name, served.duty.version, served.statistics())


def _metadata(served: Served) -> dict[str, Any]:
    duty = served.duty
    properties = {
        "halfeven_precision": duty.precision,
        "halfeven_digest": duty.digest,
        "halfeven_reason": duty.reason,
        "halfeven_device": duty.engine.device,
    }
    return model_metadata(served.spec, [duty.version], duty.engine.form, properties)


def _add_repository(app: FastAPI, roster: Roster) -> None:
    @app.post("/v2/repository/index", tags=["models"])
    async def index(request: Request) -> Response:
        """The models on duty."""
        body = await read_body(request.scope["headers"], request.receive, _SMALL_BODY)
        asked = parse(body) if body.strip() else {}
        if not isinstance(asked, dict):
            raise BadRequest('expected an empty body, {} or {"ready": true}')
        if not isinstance(asked.get("ready", False), bool):
            raise BadRequest("Invalid value for 'ready': expected a boolean")
        return _json([index_entry(served.name, served.duty.version) for served in roster.all()])

    for path, way_out in _WAYS_OUT.items():
        app.add_api_route(path, _refusing(way_out), methods=["GET", "POST"], include_in_schema=False)


def _refusing(way_out: str) -> Callable[[], Any]:
    async def refuse() -> Response:
        raise NotOffered(way_out)

    return refuse


def _add_predict(app: FastAPI, roster: Roster, max_body_bytes: int, body_timeout_s: float) -> None:
    @app.post("/v1/models/{m}/versions/{v}:predict", tags=["predict"])
    @app.post("/v1/models/{m}:predict", tags=["predict"])
    async def predict(m: str, request: Request, v: str | None = None) -> Response:
        """`{"instances": [...]}` → `{"predictions": [...]}`."""
        served = roster.find(m, v)
        body = await read_body(request.scope["headers"], request.receive, max_body_bytes, body_timeout_s)
        asked = read_predict(served.spec, body)
        answer = await answer_or_leave(served.submit(asked.arrays, asked.rows), request.receive)
        response = Response(write_predict(served.spec, answer.outputs), media_type="application/json")
        response.raw_headers.extend(answer_headers(answer))
        return response


def _add_history(app: FastAPI, roster: Roster, history: History) -> None:
    # Plain functions, not async ones: FastAPI runs them in a thread, and the store's disk may be slow.
    @app.get("/v1/models", tags=["versions"])
    def models() -> Response:
        """Every model on duty, in short."""
        return _json({"models": [_in_short(served) for served in roster.all()]})

    @app.get("/v1/models/{m}/versions", tags=["versions"])
    def versions(m: str) -> Response:
        """Every version in the store."""
        return _json({"model": m, "versions": list(history.versions(m))})

    @app.get("/v1/models/{m}/versions/{v}", tags=["versions"])
    def version(m: str, v: str) -> Response:
        """One version in the store."""
        for item in history.versions(m):
            if str(item["version"]) == v:
                return _json(item)
        raise UnknownName(f"model '{m}' has no version '{v}'; GET /v1/models/{m}/versions lists them")

    @app.get("/v1/models/{m}/versions/{v}/report", tags=["versions"])
    def report(m: str, v: str) -> Response:
        """The parity report, for people."""
        return HTMLResponse(history.report(m, v))

    @app.get("/v1/models/{m}/versions/{v}/plan", tags=["versions"])
    def plan(m: str, v: str) -> Response:
        """The precision plan: which nodes stay FP32, and why."""
        return _json(history.plan(m, v))

    @app.get("/v1/models/{m}/versions/{v}/lineage", tags=["versions"])
    def lineage(m: str, v: str) -> Response:
        """Where the version comes from."""
        return _json(history.lineage(m, v))

    @app.post("/v1/models/{m}/rollback", tags=["versions"])
    def rollback(m: str) -> Response:
        """Put the previous live version back on duty."""
        return _json(history.rollback(m))


def _in_short(served: Served) -> dict[str, str]:
    duty = served.duty
    return {
        "name": served.name,
        "version": duty.version,
        "digest": duty.digest,
        "precision": duty.precision,
        "reason": duty.reason,
        "form": duty.engine.form,
        "device": duty.engine.device,
    }


def _add_pages(app: FastAPI, roster: Roster, metrics_text: Callable[[], bytes]) -> None:
    app.openapi = with_infer(app.openapi)

    @app.get("/metrics", tags=["server"])
    async def metrics() -> Response:
        """Prometheus text."""
        return Response(metrics_text(), media_type=CONTENT_TYPE)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(docs_page(app.openapi()))

    @app.get("/", include_in_schema=False)
    async def front() -> Response:
        return HTMLResponse(front_page([_in_short(served) for served in roster.all()]))
