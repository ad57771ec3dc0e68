"""The requests of the model repository extension, read and checked.

Source: Triton's model repository extension. ``load`` may override a model's configuration: of Triton's ModelConfig
the batch size and the queue are honoured, fields equal to the model's own are accepted, the others refused by name.
"""

from collections.abc import Mapping
from typing import Any

from ....models.errors import BadRequest
from ...batching.interface import LoadConfig
from .infer_parameters import parameters_of
from .json_numbers import parse, show

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
        text.encode("utf-8", "surrogatepass"), "the parameter 'config' must be a JSON object as text"
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


def _object(body: bytes, expected: str) -> dict[str, Any]:
    message = parse(body) if body.strip() else {}
    if not isinstance(message, dict):
        raise BadRequest(f"{expected}, got {show(message)}")
    return message
