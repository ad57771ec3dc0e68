"""The settings of an order's bounds, from the environment (HALFEVEN_CONVERT_…). The installation for ONNX files alone
reads them too, and has no pydantic: the server's settings (`serve/settings.py`) name the same limits."""

import os
from collections.abc import Mapping

from ..errors import BadSetting
from .one_order import DEFAULT_BOUNDS, MEMORY_SETTING, RUNS_SETTING, SECONDS_SETTING, OrderBounds

LEAST_MEMORY_MIB, MOST_MEMORY_MIB, LEAST_RUNS = 256, 2**24, 1


def order_bounds(at_once: int = 1, environment: Mapping[str, str] = os.environ) -> OrderBounds:
    """The bounds of a conversion with this environment, of which so many run beside each other. Raises BadSetting."""
    given = {name.upper(): text for name, text in environment.items()}
    seconds, memory, runs = DEFAULT_BOUNDS.seconds, DEFAULT_BOUNDS.memory_bytes, DEFAULT_BOUNDS.runs
    if (text := given.get(SECONDS_SETTING)) is not None:
        seconds = _seconds(text)
    if (text := given.get(MEMORY_SETTING)) is not None:
        memory = _whole(MEMORY_SETTING, text, LEAST_MEMORY_MIB, MOST_MEMORY_MIB) * 2**20
    if (text := given.get(RUNS_SETTING)) is not None:
        runs = _whole(RUNS_SETTING, text, LEAST_RUNS)
    return OrderBounds(seconds, memory, runs, at_once)


def _seconds(text: str) -> float:
    try:
        if (seconds := float(text)) > 0:
            return seconds
    except ValueError:
        pass
    raise BadSetting(f"{SECONDS_SETTING} = {text[:80]!r}: expected a number of seconds above 0")


def _whole(name: str, text: str, least: int, most: int | None = None) -> int:
    try:
        if (number := int(text)) >= least and (most is None or number <= most):
            return number
    except ValueError:
        pass
    upwards = f"from {least} on" if most is None else f"from {least} to {most}"
    raise BadSetting(f"{name} = {text[:80]!r}: expected a whole number {upwards}")
