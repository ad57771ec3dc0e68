"""The web pages for people (home, a page for each model, a timeline of events, the routes) and what their forms order.

Pages are written by the server and work without a script; `page.js` only puts in what has moved. Links are relative: a
proxy may show the server below a path. A form is taken from the server's own pages alone (`http/web_guard.py`). Every
page names only models that the request's key may know of, and offers only what it may do (`http/route_scopes.py`).
"""

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qs, quote

from fastapi import APIRouter, FastAPI, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from ...models.errors import BadInput, HalfevenError
from ..access.access_control import Permit
from ..http.caller import answer_or_leave, lease_of, read_body
from ..http.codecs.infer import InferCodec
from ..http.codecs.predict import PredictRequest
from ..http.error_mapping import headers_of, message_of, status_of
from ..http.inference import Inference
from ..http.page_headers import own_page
from ..http.route_scopes import TO_COUNT, TO_INFER, TO_INSPECT, TO_MANAGE, TO_TRAIN, permit_of
from ..http.routes.versions import version_number
from ..http.web_guard import WebGuard
from . import examples
from .examples import read_typed
from .facts import Behind, answer_facts, cards, drift_bars, model_facts, server_facts, timeline, version_rows

REFRESH_S = 5
_FORM_BYTES = 4096
_HERE = Path(__file__).parent
_KINDS = {TO_INFER: "infer", TO_COUNT: "count", TO_INSPECT: "inspect", TO_TRAIN: "train", TO_MANAGE: "manage"}
Shown = Annotated[int, Query(ge=1, le=1000)]
Schema = Mapping[str, Any]
_PLACES = {"m": "MODEL", "v": "VERSION", "id": "ID"}


def add_pages(
    app: FastAPI, behind: Behind, inference: Inference, max_body_bytes: int, body_timeout_s: float
) -> None:
    routes = APIRouter(include_in_schema=False)
    _add_home(routes, app, behind)
    _add_model(routes, behind)
    _add_orders(routes, behind, body_timeout_s)
    _add_trying(routes, behind, inference, max_body_bytes, body_timeout_s)
    app.include_router(routes)


def _add_home(routes: APIRouter, app: FastAPI, behind: Behind) -> None:
    # Plain functions: FastAPI runs them in a thread, for the store's disk may be slow.
    @routes.get("/")
    def home(request: Request) -> Response:
        reaches = permit_of(request.scope).reaches
        listed, server = cards(behind.roster, reaches), server_facts(behind, reaches)
        # Below a path of a proxy the page is shown with and without the slash at its end: links relative to it would
        # lead to two places.
        root, empty = f"{behind.root_path}/" if behind.root_path else "./", not behind.roster.store.names()
        return _page(request, "home.html", root=root, cards=listed, server=server, store=empty)

    @routes.get("/events")
    def events(request: Request, model: str | None = None, limit: Shown = 200) -> Response:
        permit = permit_of(request.scope)
        names = [name for name in behind.roster.store.names() if permit.reaches(name)]
        if model is not None:
            permit.check(TO_INSPECT, model)
            behind.director.describe(model)  # raises UnknownName
        jobs = behind.jobs(permit.owners) if permit.allows(TO_TRAIN) else ()
        found = timeline(behind, names if model is None else [model], jobs, limit)
        return _page(request, "events.html", events=found, names=names, chosen=model)

    @routes.get("/docs")
    def docs(request: Request) -> Response:
        found = documented_routes(app.openapi(), server_url(request, behind.root_path), behind.access.needed)
        return _page(request, "docs.html", groups=found)

    @routes.get("/page.js")
    def script() -> Response:
        return Response(_script(), media_type="text/javascript", headers={"cache-control": "no-cache"})


def _add_model(routes: APIRouter, behind: Behind) -> None:
    @routes.get("/models/{m}")
    def model(m: str, request: Request) -> Response:
        return model_page(behind, request, m)


def _add_orders(routes: APIRouter, behind: Behind, body_timeout_s: float) -> None:
    director = behind.director

    def carry_out(order: str, name: str, asked: Mapping[str, str]) -> object:
        match order:
            case "promote":
                return director.promote(name, version_number(asked.get("version", "")))
            case "rollback":
                return director.roll_back(name)
            case _:
                share = director.canary if order == "canary" else director.shadow
                if "end" in asked:
                    return share(name, None, 0.0)
                return share(name, version_number(asked.get("version", "")), _percent(asked))

    async def ordered(order: str, m: str, request: Request) -> Response:
        WebGuard.check_own_form(request.scope["headers"])
        body = await read_body(request.scope, request.receive, _FORM_BYTES, body_timeout_s, more_room="")
        asked = {key: values[0] for key, values in parse_qs(body.decode("latin-1")).items()}
        await run_in_threadpool(carry_out, order, m, asked)
        return Response(status_code=303, headers={"location": f"../{quote(m, safe='')}"})

    for order in ("promote", "rollback", "canary", "shadow"):
        # As an argument with a default, ``order`` would be a parameter that the caller may give.
        routes.post(f"/models/{{m}}/{order}")(partial(ordered, order))


def _percent(asked: Mapping[str, str]) -> float:
    try:
        return float(asked.get("percent", ""))
    except ValueError:
        raise BadInput(
            f"percent = {asked.get('percent', '')[:40]!r}: expected a number from 0 to 100"
        ) from None


def _add_trying(
    routes: APIRouter, behind: Behind, inference: Inference, max_body_bytes: int, body_timeout_s: float
) -> None:
    @routes.post("/models/{m}/try")
    async def trying(m: str, request: Request) -> Response:
        WebGuard.check_own_form(request.scope["headers"])
        inference.find((m, None))  # refuse an unknown model before its body is read
        body = await read_body(request.scope, request.receive, max_body_bytes, body_timeout_s)
        kind, lease = request.headers.get("content-type", ""), lease_of(request.scope)

        def read(codec: InferCodec) -> PredictRequest:
            return read_typed(codec.spec, kind, body, lease)

        try:
            begun = await inference.ask((m, None), read, aside=True)
            answer = await answer_or_leave(begun.future, request.receive)
            tried = partial(answer_facts, begun.codec.spec, answer)
        except HalfevenError as error:
            refusal = {"refused": message_of(error, permit_of(request.scope).reaches)}
            page = partial(model_page, behind, request, m, refusal, status_of(error), headers_of(error))
            return await run_in_threadpool(page)
        return await run_in_threadpool(lambda: model_page(behind, request, m, tried()))


def model_page(
    behind: Behind,
    request: Request,
    name: str,
    tried: Mapping[str, Any] | None = None,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """``tried``: the answer to a request of its form, or why it was refused."""
    facts, needs_key = model_facts(behind, name), behind.access.needed
    more: dict[str, Any] = {}
    if (spec := facts["spec"]) is not None:
        server = server_url(request, behind.root_path)
        more |= {"curl": examples.curl(spec, server, needs_key), "python": examples.python(spec, server)}
    if permit_of(request.scope).allows(TO_INSPECT):
        more["versions"] = version_rows(behind, name)
        more["drift"] = list(drift_bars(behind.director.drift(name))) if spec is not None else []
    root = "../" * (2 if request.method == "POST" else 1)
    return _page(request, "model.html", status, headers, root, **facts, **more, tried=tried)


def server_url(request: Request, root_path: str) -> str:
    """The URL at which the browser found the server; a proxy that ends TLS is not seen."""
    return f"{request.url.scheme}://{request.headers.get('host', 'localhost')}{root_path}"


def _page(
    request: Request, template: str, status: int = 200, headers: Mapping[str, str] | None = None, root: str = "./",
    **facts: Any,
) -> Response:  # fmt: skip
    may = _allowed(permit_of(request.scope))
    text = _environment().get_template(template).render(root=root, may=may, REFRESH_S=REFRESH_S, **facts)
    return own_page(text, status, headers)


def _allowed(permit: Permit) -> dict[str, bool]:
    return {name: permit.allows(scopes) for scopes, name in _KINDS.items()}


@cache
def _script() -> bytes:
    return (_HERE / "page.js").read_bytes()


@cache
def _environment() -> Any:
    from ...exporters.report.page import number_text, pages_of, size_text  # brings jinja2: 7 MB

    environment = pages_of(_HERE)
    environment.filters.update(number=number_text, size=size_text, rate=_rate, path=partial(quote, safe=""))
    environment.globals.update(
        example=_as_text(examples.example),
        is_written=examples.is_written,
        example_shape=examples.example_shape,
    )
    return environment


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _as_text(example: Callable[..., Any]) -> Callable[..., str]:
    return lambda *of: str(example(*of)).replace("True", "true")


def documented_routes(document: Schema, server: str, needs_key: bool) -> dict[str, list[dict[str, Any]]]:
    """The operations by group, in the document's order."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for path, methods in document["paths"].items():
        for method, one in methods.items():
            groups.setdefault(one["tags"][0], []).append(
                {
                    "method": method.upper(),
                    "path": path,
                    "sentence": one.get("description") or one.get("summary", ""),
                    "parameters": list(_parameters(one)),
                    "bodies": list(_bodies(one)),
                    "curl": _curl(method.upper(), path, one, server, needs_key),
                }
            )
    return groups


def _parameters(one: Schema) -> Iterator[dict[str, Any]]:
    for parameter in one.get("parameters", ()):
        schema = parameter.get("schema", {})
        yield {
            "name": parameter["name"],
            "place": parameter["in"],
            "type": _type(schema),
            "required": parameter.get("required", False),
            "default": schema.get("default"),
            "text": parameter.get("description", ""),
        }


def _type(schema: Schema) -> str:
    kinds = [schema, *schema.get("anyOf", ())]
    named = [str(kind["type"]) for kind in kinds if kind.get("type") not in (None, "null")]
    values = [json.dumps(value) for kind in kinds for value in kind.get("enum", ())]
    ends = [
        f"{word} {schema[key]}" for key, word in (("minimum", "from"), ("maximum", "to")) if key in schema
    ]
    return " ".join([" or ".join(values or named), *ends])


def _bodies(one: Schema) -> Iterator[dict[str, Any]]:
    for kind, content in one.get("requestBody", {}).get("content", {}).items():
        schema = content.get("schema", {})
        needed = schema.get("required", ())
        fields = [
            {
                "name": name,
                "type": _type(field),
                "required": name in needed,
                "text": field.get("description", ""),
            }
            for name, field in schema.get("properties", {}).items()
        ]
        example = content.get("example")
        yield {
            "kind": kind,
            "fields": fields,
            "text": schema.get("description", ""),
            "example": json.dumps(example, indent=2) if example is not None else None,
        }


def _curl(method: str, path: str, one: Schema, server: str, needs_key: bool) -> str:
    """A command that sends the operation; names in capitals are to be replaced."""
    filled = re.sub(r"\{(\w+)\}", lambda found: _PLACES.get(found[1], found[1].upper()), path)
    parts = ["curl"]
    if needs_key:
        parts.append('-H "Authorization: Bearer $HALFEVEN_API_KEY"')
    content = one.get("requestBody", {}).get("content", {})
    example = content.get("application/json", {}).get("example")
    form = content.get("multipart/form-data", {}).get("example")
    if example is not None:
        parts.append(f"--json {shlex.quote(json.dumps(example))}")
    elif form is not None:
        parts += [f"-F {shlex.quote(f'{name}={value}')}" for name, value in form.items()]
    elif method != "GET":
        parts.append(f"-X {method}")
    return " ".join([*parts, shlex.quote(server + filled)])
