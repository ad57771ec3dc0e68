"""``/v2/repository``: the index of the versions, and the verbs that load and unload a model."""

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.concurrency import run_in_threadpool

from ....models.errors import BadInput, BadRequest, HalfevenError
from ....models.folder.model_name import NAME
from ...batching.interface import ControlledRoster
from ..codecs.metadata import index_entry
from ..codecs.repository import read_index, read_load, read_unload
from ..error_mapping import LoadFailed, NotOffered, without_folders
from ..json_body import json_answer, read_order
from ..limits.request_limits import MORE_ROOM
from .v2 import config_of

_WAYS_OUT = {
    "/v2/repository/{repository}/index": "named repositories are not offered: POST /v2/repository/index",
    "/v2/systemsharedmemory/{rest:path}": "shared memory is not offered: send binary tensors in the body",
    "/v2/cudasharedmemory/{rest:path}": "shared memory is not offered: send binary tensors in the body",
    "/v2/trace/setting": "the trace extension is not offered: every answer carries Server-Timing",
    "/v2/models/{m}/trace/setting": "the trace extension is not offered: every answer carries Server-Timing",
    "/v2/logging": "the logging extension is not offered: the server's log level is an option of its start",
    "/v2/models/{m}/generate": "the generate extension is not offered: POST tensors to …/infer",
    "/v2/models/{m}/generate_stream": "the generate extension is not offered: POST tensors to …/infer",
}


def add_repository(
    app: FastAPI, roster: ControlledRoster, max_body_bytes: int, body_timeout_s: float
) -> None:
    # The roster's verbs touch the disk and the device: each runs in a thread.
    @app.post("/v2/repository/index", tags=["models"])
    async def index(request: Request) -> Response:
        """Every model in the store: its versions and their state; `{"ready": true}` leaves out what does not serve."""
        body = await read_order(request, timeout_s=body_timeout_s, needs_type=False)
        found = await run_in_threadpool(index_of, roster, read_index(body))
        return json_answer(found)

    @app.post("/v2/repository/models/{m}/load", tags=["models"])
    async def load(m: str, request: Request) -> Response:
        """Load a model's live version; answers when it is active. The version before serves until then."""
        body = await read_order(
            request, max_body_bytes, body_timeout_s, needs_type=False, more_room=MORE_ROOM
        )
        await run_in_threadpool(load_model, roster, m, body)
        return Response()

    @app.post("/v2/repository/models/{m}/unload", tags=["models"])
    async def unload(m: str, request: Request) -> Response:
        """Unload a model and free its memory; requests that were accepted are still answered."""
        body = await read_order(request, timeout_s=body_timeout_s, needs_type=False)
        read_unload(body)
        await run_in_threadpool(unload_model, roster, m)
        return Response()

    for path, way_out in _WAYS_OUT.items():
        app.add_api_route(path, _refusing(way_out), methods=["GET", "POST"], include_in_schema=False)


def index_of(roster: ControlledRoster, only_ready: bool) -> list[dict[str, str]]:
    """The repository's index. It touches the disk."""
    found = [index_entry(*entry[:3], without_folders(entry[3])) for entry in roster.index()]
    return [entry for entry in found if entry["state"] == "READY" or not only_ready]


def load_model(roster: ControlledRoster, name: str, body: bytes) -> None:
    """Load a model as the load request in ``body`` says. Raises what the roster does, in Triton's words: clients look
    for ``failed to load``."""
    try:
        _check_name(name)
        serving = [served for served in roster.all() if served.name == name]
        roster.load(name, read_load(body, config_of(serving[0], [serving[0]]) if serving else {}))
    except BadInput as error:
        raise type(error)(f"failed to load '{name[:128]}', {error}") from error
    except HalfevenError as error:
        raise LoadFailed(f"failed to load '{name[:128]}', {error}") from error


def unload_model(roster: ControlledRoster, name: str) -> None:
    """Raises BadRequest, UnknownName."""
    _check_name(name)
    roster.unload(name)


def _check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise BadRequest(
            f"invalid model name '{name[:128]}', model name must not contain path traversal characters: expected "
            "letters, digits and . _ - after a letter or digit, at most 128 in all"
        )


def _refusing(way_out: str) -> Callable[[], Any]:
    async def refuse() -> Response:
        raise NotOffered(way_out)

    return refuse
