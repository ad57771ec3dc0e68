"""The ``parameters`` objects of an infer request: what a caller may ask for beside its tensors.

Source: Open Inference Protocol "Inference Request JSON Object"; Triton's schedule policy extension (``priority``,
``timeout``). ``deterministic`` and ``nan_as`` are ours. Unknown keys are the caller's own: accepted, not read.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ....models.errors import BadRequest
from ...batching.interface import NO_TERMS, Terms

_MOST_PRIORITY = 2**31
_LONGEST_NS = 2**62  # a timeout beyond it (146 years) waits as long
NAN_AS = ("token", "null", "string")


class Wishes(NamedTuple):
    """``nan_as``: how JSON answers write non-finite numbers: bare ``token`` (NaN, as Triton), ``null``, ``string``."""

    terms: Terms = NO_TERMS
    nan_as: str = "token"


_NO_WISHES = Wishes()


def read_wishes(message: Mapping[str, Any], id: str | None) -> Wishes:
    """The request's own parameters, read and checked. Raises BadRequest naming the parameter."""
    given = parameters_of(message, "the request")
    if not given:
        return _NO_WISHES if id is None else Wishes(Terms(key=id))
    _refuse_unoffered(given)
    priority = _whole(given, "priority", _MOST_PRIORITY)
    timeout_ns = min(_whole(given, "timeout", 2**64 - 1, "microseconds") * 1000, _LONGEST_NS)
    deterministic = flag(given, "deterministic", False)
    terms = NO_TERMS
    if priority or timeout_ns or deterministic or id is not None:
        terms = Terms(priority, timeout_ns, deterministic, id)
    return Wishes(terms, _nan_as(given))


def parameters_of(entry: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    """The ``parameters`` of the request or of one tensor: flat, {} where absent. Raises BadRequest."""
    parameters = entry.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise BadRequest(f"Unable to parse 'parameters': those of {place} must be an object")
    for key, value in parameters.items():
        if isinstance(value, list | dict):
            raise BadRequest(
                f"Unable to parse 'parameters': '{key[:60]}' of {place} must be a string, number or bool"
            )
    return parameters


def flag(parameters: Mapping[str, Any], key: str, default: bool) -> bool:
    value = parameters.get(key, default)
    if not isinstance(value, bool):
        raise BadRequest(f"Unable to parse '{key}': expected true or false, got {str(value)[:40]!r}")
    return value


def _whole(parameters: Mapping[str, Any], key: str, most: int, unit: str = "") -> int:
    """A whole number from 0 to ``most``, or the same as text (clients write 64-bit numbers so); 0 where absent."""
    value = parameters.get(key, 0)
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 20:
        value = int(value)
    if type(value) is not int or not 0 <= value <= most:
        raise BadRequest(
            f"Unable to parse '{key}': expected a whole number of {unit or 'at least 0'} (0 to {most}), "
            f"got {str(value)[:40]!r}"
        )
    return value


def _nan_as(parameters: Mapping[str, Any]) -> str:
    value = parameters.get("nan_as", "token")
    if value not in NAN_AS:
        raise BadRequest(f"Unable to parse 'nan_as': expected one of {NAN_AS}, got {str(value)[:40]!r}")
    return value


def _refuse_unoffered(parameters: Mapping[str, Any]) -> None:
    """Refuse what would change the meaning of the request and is not offered."""
    for key in parameters:
        if key.startswith("triton_"):
            raise BadRequest(
                f"parameter '{key[:60]}' is reserved: parameters beginning with 'triton_' are refused"
            )
        if key.startswith("sequence_"):
            raise BadRequest(
                f"parameter '{key[:60]}': sequences are not offered. Models here keep no state between requests: "
                "send the state as an input and read it back as an output"
            )
