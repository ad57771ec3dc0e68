"""Everything between a model and its callers. The package can be called as a function: ``halfeven.serve(half)``."""

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """`python_api.serving.serve` has the name of this package, and both are attributes of ``halfeven``."""

    def __call__(self, *given: Any, **named: Any) -> Any:
        from ..models.errors import packages_asked_for

        with packages_asked_for():
            from .python_api.serving import serve
        return serve(*given, **named)


sys.modules[__name__].__class__ = _Callable
