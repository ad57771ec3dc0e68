"""``/v2/repository``: the index of the versions, and the verbs that load and unload a model.

Source: Triton's model repository extension. ``load`` may override a model's configuration: of Triton's ModelConfig
the batch size and the queue are honoured, fields equal to the model's own are accepted, the others refused by name.
"""

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.concurrency import run_in_threadpool

from ....models.errors import BadInput, BadRequest, HalfevenError, UnknownName
from ....models.folder.model_name import NAME
from ...batching.interface import LoadConfig, Roster
from ..caller import json_answer, read_order
from ..codecs.infer_parameters import parameters_of
from ..codecs.json_numbers import parse, show
from ..error_mapping import LoadFailed, NotOffered, without_folders
from ..limits.request_limits import MORE_ROOM
from .v2 import config_of

_INT32_MAX = 2**31 - 1


def read_index(body: bytes) -> bool:
    """True if the caller asks for ready versions only. Raises BadRequest."""
    ready = _object(body, 'expected an empty body, {} or {"ready": true}').get("ready", False)
    if not isinstance(ready, bool):
        raise BadRequest("Invalid value for 'ready': expected a boolean")
    return ready


def read_unload(body: bytes) -> None:
    """Check the body. No model depends on another here, so ``unload_dependents`` has no effect. Raises BadRequest."""
    parameters_of(_object(body, "expected an empty body or an object"), "the request")


def read_load(body: bytes, current: Mapping[str, Any]) -> LoadConfig | None:
    """The override, None where the body has none; ``current`` is the model's configuration ({} if it has none).

    Raises BadRequest naming the field that cannot be set.
    """
    message = _object(body, 'expected an empty body, {} or {"parameters": {"config": "…"}}')
    given = parameters_of(message, "the request")
    for key in given:
        if key.startswith("file:"):
            raise BadRequest(
                f"parameter '{key[:80]}': model files are not taken over HTTP, because they may hold code. Convert the "
                "model folder beside the server (halfeven convert FOLDER --store STORE); it is taken within seconds"
            )
    text = given.get("config")
    if text is None:
        return None
    if not isinstance(text, str):
        raise BadRequest(f"the parameter 'config' must be a JSON object as text, got {show(text)}")
    config = _object(
        text.encode("utf-8", "surrogatepass"),
        "the parameter 'config' must be a JSON object as text",
        "the parameter 'config'",
    )
    return _load_config(config, current)


def _load_config(config: Mapping[str, Any], current: Mapping[str, Any]) -> LoadConfig:
    asked = LoadConfig()
    if "max_batch_size" in config:
        asked["max_batch_size"] = _whole(config, "max_batch_size")
    queue = config.get("dynamic_batching", {})
    if not isinstance(queue, dict):
        raise BadRequest(f"'dynamic_batching' must be an object, got {show(queue)}")
    if "max_queue_delay_microseconds" in queue:
        asked["max_queue_delay_us"] = _whole(queue, "max_queue_delay_microseconds")
    policy = queue.get("default_queue_policy", {})
    if not isinstance(policy, dict):
        raise BadRequest(f"'default_queue_policy' must be an object, got {show(policy)}")
    if "max_queue_size" in policy:
        # 0 is Triton's word for no limit.
        asked["max_queue_size"] = _whole(policy, "max_queue_size") or _INT32_MAX
    now = current.get("dynamic_batching", {})
    _check_rest(config, current, ("max_batch_size", "dynamic_batching"))
    _check_rest(queue, now, ("max_queue_delay_microseconds", "default_queue_policy"))
    _check_rest(policy, now.get("default_queue_policy", {}), ("max_queue_size",))
    return asked


def _check_rest(asked: Mapping[str, Any], now: Mapping[str, Any], honoured: tuple[str, ...]) -> None:
    for key, value in asked.items():
        if key not in honoured and value != now.get(key, ...):
            raise BadRequest(
                f"the config's '{key[:80]}' cannot be set by loading: only max_batch_size and dynamic_batching's "
                "max_queue_delay_microseconds and default_queue_policy.max_queue_size can. Set it in the model folder "
                "and convert it again"
            )


def _whole(config: Mapping[str, Any], key: str) -> int:
    """A whole number, or the same as text: proto3's JSON writes 64-bit integers so."""
    value = config[key]
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 10:
        value = int(value)
    if type(value) is not int or not 0 <= value <= _INT32_MAX:
        raise BadRequest(f"'{key}' must be a whole number from 0 to {_INT32_MAX}, got {show(value)}")
    return value


def _object(body: bytes, expected: str, what: str = "the request") -> dict[str, Any]:
    message = parse(body, what) if body.strip() else {}
    if not isinstance(message, dict):
        raise BadRequest(f"{expected}, got {show(message)}")
    return message


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


def add_repository(app: FastAPI, roster: Roster, max_body_bytes: int, body_timeout_s: float) -> None:
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


def index_of(roster: Roster, only_ready: bool) -> list[dict[str, str]]:
    """The repository's index. It touches the disk."""
    return [
        {"name": name, "version": version, "state": state, "reason": without_folders(reason)}
        for name, version, state, reason in roster.index()
        if state == "READY" or not only_ready
    ]


def load_model(roster: Roster, name: str, body: bytes) -> None:
    """Load a model as the load request in ``body`` says. Raises what the roster does, in Triton's words: clients look
    for ``failed to load``."""
    try:
        _check_name(name)
        serving = [served for served in roster.all() if served.name == name]
        roster.load(name, read_load(body, config_of(serving[0], [serving[0]]) if serving else {}))
    except UnknownName as error:
        raise error.after(f"failed to load '{name[:128]}', ") from error
    except BadInput as error:
        raise type(error)(f"failed to load '{name[:128]}', {error}") from error
    except HalfevenError as error:
        raise LoadFailed(f"failed to load '{name[:128]}', {error}") from error


def unload_model(roster: Roster, name: str) -> None:
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
