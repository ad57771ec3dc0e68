"""The FastAPI application with every route but infer, which is answered in front of it (`routes/infer.py`), and the web
pages (`dashboard/routes.py`).

Bodies are read as bytes: V2 clients send no content type, and the content type of a request decides nothing.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches
from http import HTTPMethod
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match

from ....models.errors import BadRequest, HalfevenError, StoreError, UnknownName
from ....models.machine.processor import this_processor
from ....models.version import __version__
from ...batching.interface import Roster, Served
from ...endpoint.endpoint_process import EndpointProcess
from ..caller import CallerLeft, json_answer
from ..error_mapping import body_for, body_of, headers_of, of_the_disk, status_of, without_folders
from ..inference import Inference
from ..route_scopes import permit_of
from .infer import MAX_BODY_BYTES
from .metrics import CONTENT_TYPE
from .openapi import with_infer
from .predict import POST_ONLY, add_endpoints, add_predict
from .repository import add_repository
from .v2 import add_v2

_LOG = logging.getLogger(__name__)
_QUOTED = 80  # characters of a request's path or parameter that a message quotes
# Newer versions of FastAPI send spans, metrics and errors where FASTAPI_OTEL_AUTO_CONFIGURE says so; older ones take
# the argument and do nothing. Traces of ours are in `serve/tracing/`.
_NO_TELEMETRY: Any = {"auto_configure": False, "tracing": False, "metrics": False, "logs": False}


@dataclass(frozen=True, slots=True)
class History:
    """Functions over the store. Each raises UnknownName for a name or version that the store does not have.

    They may block (they run in a thread): ``versions(model)`` gives one JSON object per version, each with its
    ``version``; ``report`` HTML; ``plan`` and ``lineage`` JSON; ``rollback(model)`` the facts of the active version.
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
    as_triton: bool = False,
    root_path: str = "",
    inference: Inference | None = None,
    endpoints: Mapping[str, EndpointProcess] = MappingProxyType({}),
) -> FastAPI:
    """Every route but infer. ``server_name`` is what /v2 says (Triton's own example asks for ``triton``).

    ``root_path``: where a proxy shows the server, for those who read the OpenAPI document. ``inference``: that of the
    infer route in front; by default one of its own. ``endpoints``: by the names of their models.
    """
    app = FastAPI(
        title="halfeven",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        servers=[{"url": root_path}] if root_path else None,
        telemetry=_NO_TELEMETRY,
    )
    _add_errors(app, as_triton)
    _add_healthz(app, roster)
    add_v2(app, roster, server_name, as_triton)
    add_repository(app, roster, max_body_bytes, body_timeout_s)
    inference = inference or Inference(roster)
    add_predict(app, inference, max_body_bytes, body_timeout_s)
    add_endpoints(app, inference, endpoints, max_body_bytes, body_timeout_s)
    _add_history(app, roster, history)
    _add_metrics(app, metrics_text)
    app.openapi = with_infer(app.openapi)
    return app


def _add_errors(app: FastAPI, as_triton: bool) -> None:
    async def ours(request: Request, error: Exception) -> Response:
        path = request.url.path
        body, kind = body_of(error, path, permit_of(request.scope).reaches, request.headers.get("accept", ""))
        status = status_of(error, as_triton and path.startswith("/v2/"))
        if isinstance(error, StoreError | OSError):  # with the paths that the caller does not read
            _LOG.error("a request failed: %s", error)
        return Response(body, status, headers_of(error), kind)

    async def of_the_system(request: Request, error: Exception) -> Response:
        if isinstance(of_the_disk(error), HalfevenError):
            return await ours(request, error)
        raise error

    async def nobody_s(request: Request, error: Exception) -> Response:
        response = await ours(request, error)
        response.headers["connection"] = (
            "close"  # Starlette raises it again for the log, and uvicorn hangs up
        )
        return response

    async def of_the_framework(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = error.detail.lower().replace(" ", "_")
        accept = request.headers.get("accept", "")
        headers, said = error.headers, error.detail
        if error.status_code == 405:
            takes = _methods_of(request)
            headers, said = {"allow": ", ".join(takes)}, f"{said}: this route takes {' and '.join(takes)}"
        elif error.status_code == 404:
            said = _no_route(request)
        body, kind = body_for(request.url.path, error.status_code, code, said, accept=accept)
        return Response(body, error.status_code, headers, kind)

    async def of_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return await ours(request, BadRequest("; ".join(map(_unfit, error.errors()))))

    async def nobody_there(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nginx's number; the caller has gone

    app.add_exception_handler(HalfevenError, ours)  # the root: Starlette walks the error's ancestry
    app.add_exception_handler(OSError, of_the_system)
    app.add_exception_handler(HTTPException, of_the_framework)
    app.add_exception_handler(RequestValidationError, of_validation)
    app.add_exception_handler(CallerLeft, nobody_there)
    app.add_exception_handler(Exception, nobody_s)


def _no_route(request: Request) -> str:
    """The message for a path that is none of the server's: the nearest route, and where all are. What came is not said
    back: it may be anything."""
    near = get_close_matches(request.url.path[:_QUOTED], request.app.openapi()["paths"], 1, 0.6)
    meant = f"did you mean {near[0]}? " if near else ""
    return f"this server has no such route: {meant}GET /docs lists all routes"


def _unfit(fault: Mapping[str, Any]) -> str:
    """The fault of one parameter of a request, as pydantic found it: its name, what came, what was expected."""
    place, *names = fault["loc"]
    came = repr(fault.get("input"))[:_QUOTED]
    return f"{place} parameter {'.'.join(map(str, names))} = {came}: {fault['msg']}"


def _methods_of(request: Request) -> list[str]:
    """The methods that a request's path takes, of all its routes; the framework names those of one route."""
    takes = set[str]()
    for method in HTTPMethod:
        asked = {**request.scope, "method": method.value}
        found = next((one for one in request.app.routes if one.matches(asked)[0] is Match.FULL), None)
        if found is not None and getattr(found, "name", "") != POST_ONLY:
            takes |= {"GET", "HEAD"} if method is HTTPMethod.GET else {method.value}
    return sorted(takes)


def _add_healthz(app: FastAPI, roster: Roster) -> None:
    @app.get("/healthz", tags=["server"])
    async def healthz() -> Response:
        """Liveness for orchestrators: true while models load and while the server is shutting down."""
        if roster.lost is None:
            return json_answer({"status": "ok"})
        return json_answer({"status": "lost: restart the server"}, 503)


def _add_history(app: FastAPI, roster: Roster, history: History) -> None:
    # Plain functions, not async ones: FastAPI runs them in a thread, and the store's disk may be slow.
    @app.get("/v1/models", tags=["versions"])
    def models() -> Response:
        """Every active model, in short; `data` is OpenAI's list of models."""
        found = [_in_short(served) for served in roster.all()]
        listed = [_for_openai(history, one["name"], one["version"]) for one in found]
        return json_answer({"object": "list", "data": listed, "models": found})

    @app.get("/v1/models/{m}/versions", tags=["versions"])
    def versions(m: str) -> Response:
        """Every version in the store."""
        return json_answer({"model": m, "versions": list(history.versions(m))})

    @app.get("/v1/models/{m}/versions/{v}", tags=["versions"])
    def version(m: str, v: str) -> Response:
        """One version in the store."""
        for item in history.versions(m):
            if str(item["version"]) == v:
                return json_answer(item)
        raise UnknownName(f"model '{m}' has no version '{v}'; GET /v1/models/{m}/versions lists them")

    @app.get("/v1/models/{m}/versions/{v}/report", tags=["versions"])
    def report(m: str, v: str) -> Response:
        """The parity report as a web page."""
        return HTMLResponse(history.report(m, v))

    @app.get("/v1/models/{m}/versions/{v}/plan", tags=["versions"])
    def plan(m: str, v: str) -> Response:
        """The precision plan: which nodes stay FP32, and why."""
        return json_answer(history.plan(m, v))

    @app.get("/v1/models/{m}/versions/{v}/lineage", tags=["versions"])
    def lineage(m: str, v: str) -> Response:
        """The record of where the version comes from."""
        return json_answer(history.lineage(m, v))

    @app.post("/v1/models/{m}/rollback", tags=["versions"])
    def rollback(m: str) -> Response:
        """Make active the newest of the older versions that may serve."""
        return json_answer(history.rollback(m))


def _for_openai(history: History, name: str, version: str | None) -> dict[str, Any]:
    """A model as OpenAI's clients read it. ``created``: of the version, 0 where the store does not say."""
    created = 0
    with suppress(HalfevenError, KeyError, ValueError, TypeError):
        if version is not None:
            created = int(datetime.fromisoformat(history.lineage(name, version)["created"]).timestamp())
    return {"id": name, "object": "model", "created": created, "owned_by": "halfeven"}


def _in_short(served: Served) -> dict[str, Any]:
    prepared = served.prepared
    cpu = (
        {"cpu": {"processor": str(this_processor()), **prepared.setup.to_json()}}
        if prepared.setup is not None
        else {}
    )
    return {
        "name": served.name,
        "version": prepared.version,
        "digest": prepared.digest,
        "precision": prepared.precision,
        "reason": without_folders(prepared.reason),
        "form": prepared.engine.form,
        "device": prepared.engine.device,
        **({"provider": provider} if (provider := prepared.engine.provider) else {}),
        **cpu,
    }


def _add_metrics(app: FastAPI, metrics_text: Callable[[], bytes]) -> None:
    @app.get("/metrics", tags=["server"])
    def metrics() -> Response:  # in a thread: of 600 models it has 6 MB
        """Prometheus text."""
        return Response(metrics_text(), media_type=CONTENT_TYPE)
