"""A bound on the requests that wait in a thread until the files of a job are read, which may take minutes each."""

from collections.abc import Iterator
from contextlib import contextmanager

from ....models.errors import Overloaded
from ...http.limits.request_limits import DEFAULTS

MOST = DEFAULTS.orders_being_read  # of the forty threads that all routes share (Starlette)
_RETRY_AFTER_S = 10.0


class WaitingRequests:
    """Counts the requests that wait. It has no lock: only the event loop's thread may use it."""

    def __init__(self, most: int = MOST) -> None:
        self._most, self._count = most, 0

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """Raises Overloaded where there are too many already."""
        if self._count >= self._most:
            raise Overloaded(
                f"{self._most} requests wait for the files of jobs to be read; ask again when some have been answered",
                _RETRY_AFTER_S,
            )
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
