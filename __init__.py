"""halfeven: half precision, even answers.

The Python API (docs/python.md). Its names are imported when they are asked for: `import halfeven` imports no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# By its whole name: pytest imports this file by its path where the checkout's folder is no Python name (halfeven-main).
from halfeven.models.telemetry import switch_off
from halfeven.models.version import __version__

if TYPE_CHECKING:
    from halfeven.serve.endpoint.endpoint import Endpoint
    from halfeven.serve.python_api.client import AsyncClient, Client
    from halfeven.serve.python_api.converting import convert, load
    from halfeven.serve.python_api.half import Half
    from halfeven.serve.python_api.half_equality import assert_half_equal
    from halfeven.serve.python_api.half_files import fp16, prove
    from halfeven.serve.python_api.serving import serve

switch_off()

_PLACES = {
    "AsyncClient": "halfeven.serve.python_api.client",
    "Client": "halfeven.serve.python_api.client",
    "Endpoint": "halfeven.serve.endpoint.endpoint",
    "Half": "halfeven.serve.python_api.half",
    "assert_half_equal": "halfeven.serve.python_api.half_equality",
    "convert": "halfeven.serve.python_api.converting",
    "fp16": "halfeven.serve.python_api.half_files",
    "load": "halfeven.serve.python_api.converting",
    "prove": "halfeven.serve.python_api.half_files",
}
__all__ = [
    "AsyncClient",
    "Client",
    "Endpoint",
    "Half",
    "__version__",
    "assert_half_equal",
    "convert",
    "fp16",
    "load",
    "prove",
    "serve",
]


def __getattr__(name: str) -> Any:
    if name == "serve":
        return import_module("halfeven.serve")  # the package itself can be called
    if name not in _PLACES:
        raise AttributeError(f"module 'halfeven' has no attribute {name!r}")
    from halfeven.models.errors import packages_asked_for

    with packages_asked_for():
        return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
