"""A stand-in for the handle of a Ray Serve deployment."""

from types import SimpleNamespace
from typing import Any


class Handle:
    """A deployment's handle, whose calls run here; the first ``lost`` of them are lost."""

    def __init__(self, writer: Any, lost: int = 0) -> None:
        self._writer, self._lost = writer, lost
        self.write = SimpleNamespace(remote=self._remote)

    def _remote(self, *given: Any) -> Any:
        from ray.exceptions import ActorDiedError

        def result(timeout_s: float) -> Any:
            if self._lost:
                self._lost -= 1
                raise ActorDiedError()
            return self._writer.write(*given)

        return SimpleNamespace(result=result)
