"""The routes of versions and traffic: promote, canary, shadow, figures and decisions; and what they tell of the store.

Orders run in a thread, for loading a version takes long. Orders need a JSON content type.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from ....exporters.on_device.device_proofs import proofs_of
from ....exporters.report.stored_page import served_page
from ....models.errors import BadInput
from ....models.store.store import Store, Version
from ...versions.director import Director
from ...versions.versions_in_store import versions_of
from ..caller import json_answer, read_order
from ..codecs.json_numbers import parse
from ..error_mapping import for_callers
from .app import History

_SMALL_BODY = 2**16
_VERSION = {"type": "integer", "minimum": 1}
_PERCENT = {"type": "number", "minimum": 0, "maximum": 100}
Limit = Annotated[int, Query(ge=1, le=1000)]


def router(director: Director) -> APIRouter:
    """Every answer is JSON; errors are answered by the application (`app.py`)."""
    routes = APIRouter(prefix="/v1/models", tags=["versions"])
    _add_orders(routes, director)
    _add_reading(routes, director)
    return routes


def _add_orders(routes: APIRouter, director: Director) -> None:
    @routes.post("/{m}/promote", openapi_extra=_body({"version": _VERSION}, ["version"]))
    async def promote(m: str, request: Request) -> Response:
        """Make a version the active one; at once where it is the canary or the previous version."""
        asked = await _asked(request, ("version",))
        if asked.get("version") is None:
            raise BadInput('expected {"version": NUMBER}: which version is to become active')
        return await _answer(lambda: director.promote(m, version_number(asked["version"])))

    @routes.post("/{m}/canary", openapi_extra=_body({"version": _VERSION, "percent": _PERCENT}))
    async def canary(m: str, request: Request) -> Response:
        """Give a version a share of the requests, always the same ids; no version, or 0, ends it."""
        asked = await _asked(request, ("version", "percent"))
        return await _answer(lambda: director.canary(m, *_share(asked)))

    @routes.post("/{m}/shadow", openapi_extra=_body({"version": _VERSION, "percent": _PERCENT}))
    async def shadow(m: str, request: Request) -> Response:
        """Put a share of the answered requests to a version too, and compare; no version, or 0, ends it."""
        asked = await _asked(request, ("version", "percent"))
        return await _answer(lambda: director.shadow(m, *_share(asked)))


def _add_reading(routes: APIRouter, director: Director) -> None:
    @routes.get("/{m}")
    def model(m: str) -> Response:
        """The loaded versions with label, share of the traffic and trial; `id`, `object` are for OpenAI's clients."""
        openai = {"id": m, "object": "model", "created": director.created(m), "owned_by": "halfeven"}
        return json_answer(for_callers(director.describe(m)) | openai)

    @routes.get("/{m}/events")
    def events(m: str, limit: Limit = 100) -> Response:
        """Orders and decisions, the newest first, with their numbers."""
        return json_answer({"model": m, "events": for_callers(director.events(m, limit))})

    @routes.get("/{m}/drift")
    def drift(m: str) -> Response:
        """The distance of the halves' live answers from their FP32 originals', as histograms in units of u·S."""
        return json_answer(director.drift(m))


async def _asked(request: Request, known: tuple[str, ...]) -> Mapping[str, Any]:
    body = await read_order(request, _SMALL_BODY)
    asked = parse(body) if body.strip() else {}
    if not isinstance(asked, dict) or not asked.keys() <= set(known):
        raise BadInput(f"expected a JSON object with the keys {', '.join(known)}, got {str(asked)[:200]}")
    return asked


def version_number(asked: object) -> int:
    """The number that an order names, as a number or as text. Raises BadInput."""
    version = asked
    if isinstance(version, str) and version.isascii() and version.isdigit() and len(version) < 19:
        version = int(version)
    if not isinstance(version, int) or isinstance(version, bool) or not 1 <= version < 2**63:
        raise BadInput(f"version = {asked!r:.80}: expected a version's number")
    return version


def _share(asked: Mapping[str, Any]) -> tuple[int | None, float]:
    percent = asked.get("percent", 0)
    # Beside NaN, which `parse` takes, whole numbers of any length come: they are no float.
    if not isinstance(percent, int | float) or isinstance(percent, bool) or not 0 <= percent <= 100:
        raise BadInput(f"percent = {percent!r:.80}: expected a number from 0 to 100")
    if asked.get("version") is None:
        return None, 0.0
    if "percent" not in asked:
        raise BadInput("a version needs its percent: the share of the requests, above 0 to 100")
    return version_number(asked["version"]), float(percent)


async def _answer(work: Callable[[], Any]) -> Response:
    return json_answer(for_callers(await run_in_threadpool(work)))


def _body(properties: Mapping[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    schema = {"type": "object", "properties": dict(properties), "additionalProperties": False}
    if required:
        schema["required"] = required
    return {"requestBody": {"content": {"application/json": {"schema": schema}}}}


def history_of(store: Store, roll_back: Callable[[str], Mapping[str, Any]]) -> History:
    """The store behind ``/v1/models/{m}/versions…``; ``roll_back`` changes it."""
    return History(
        versions=lambda model: for_callers(versions_of(store, model)),
        report=lambda model, number: _report(store.numbered(model, number)),
        plan=lambda model, number: store.numbered(model, number).json("precision.json"),
        lineage=lambda model, number: _lineage(store, store.numbered(model, number)),
        rollback=lambda model: for_callers(roll_back(model)),
    )


def _report(version: Version) -> str:
    """The page of the conversion, with the way back and what the gate found on other devices since."""
    return served_page(version, proofs_of(version))


def _lineage(store: Store, version: Version) -> dict[str, Any]:
    keys = ("parent", "lineage", "environment", "created", "fingerprint", "files")
    facts = {"model": version.name, "version": version.number, "digest": version.digest}
    return (
        facts | {key: version.manifest.get(key) for key in keys} | {"promotions": _promotions(store, version)}
    )


def _promotions(store: Store, version: Version) -> list[dict[str, Any]]:
    """The first and the last time that the version was made active: by whose order, in place of which version.
    ``stale_parent`` is the version that it was made from, where that was not the active one any more."""
    found = store.promotions(version.name).get(version.number, {})
    active_times = [dict(found[key]) for key in ("first", "last") if key in found]
    parent = version.manifest.get("parent")
    if active_times and version.awaits_promotion and active_times[0]["over"] not in (None, parent):
        active_times[0]["stale_parent"] = parent
    return active_times[:1] if len(active_times) == 2 and found["first"] == found["last"] else active_times
