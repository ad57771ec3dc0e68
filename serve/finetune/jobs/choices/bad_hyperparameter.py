"""The error of a setting that cannot be used."""

from typing import Any

from .....models.errors import BadInput


class BadHyperparameter(BadInput):
    """A setting of a job is out of its range. ``param`` is its name, the message has the range."""

    code = "bad_hyperparameter"
    param: str | None = None


def bad(name: str, fault: str) -> BadHyperparameter:
    error = BadHyperparameter(f"hyperparameters: {name}: {fault}")
    error.param = name
    return error


def shown(value: Any) -> str:
    """A value in a message, cut to 80 characters."""
    return repr(value)[:80]
