"""How many connections may be open at once, and which one is closed for a new one."""

import resource
from itertools import islice
from typing import Protocol

from ....models.errors import BadSetting

_MOST = 1024  # without a setting
_LOOKED_AT = 16  # connections; so that each of many new connections costs a fixed time


class Connection(Protocol):
    """An open connection."""

    def is_idle(self) -> bool:
        """Whether no request is under way, and none was for a second."""
        ...

    def close_idle(self) -> None: ...


class Connections:
    """The open connections. Beyond ``limit`` an idle one is closed for a new one; where none is idle, the new one is
    refused."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._open: dict[Connection, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, connection: Connection) -> bool:
        """Whether the connection may stay."""
        if len(self) >= self.limit and not self._close_one():
            return False
        self._open[connection] = None
        return True

    def leave(self, connection: Connection) -> None:
        self._open.pop(connection, None)

    def _close_one(self) -> bool:
        """Close one idle connection among the next `_LOOKED_AT`; whether one was found."""
        for connection in list(islice(self._open, _LOOKED_AT)):
            del self._open[connection]
            if connection.is_idle():
                connection.close_idle()
                return True
            self._open[connection] = None
        return False


def connection_limit(setting: int | None) -> int:
    """The setting, or the default; three quarters of the descriptors at most: models and files need some too.

    Raises BadSetting for a setting above that.
    """
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if descriptors == resource.RLIM_INFINITY:
        return setting or _MOST
    most = max(descriptors * 3 // 4, 1)
    if setting is not None and setting > most:
        raise BadSetting(
            f"HALFEVEN_MAX_CONNECTIONS = {setting}: this process may open {descriptors} files, so at most {most} "
            "connections; raise the limit first (ulimit -n)"
        )
    return setting or min(_MOST, most)


def backlog_of(limit: int) -> int:
    """How many connections may wait to be accepted: they are accepted in one go, above the limit for a moment."""
    return max(min(limit // 6, 2048), 16)
