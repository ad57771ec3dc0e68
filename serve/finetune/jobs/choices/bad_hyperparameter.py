"""The error of a setting that cannot be used."""

from typing import Any

from .....models.errors import BadInput


class BadHyperparameter(BadInput):
    """One value out of its range; ``param`` is its name."""

    code = "bad_hyperparameter"
    param: str | None = None


def bad(name: str, fault: str) -> BadHyperparameter:
    error = BadHyperparameter(f"hyperparameters: {name}: {fault}")
    error.param = name
    return error


def shown(value: Any) -> str:
    """A value in a message, cut to 80 characters."""
    return repr(value)[:80]
