"""The number of connections that may be open at once is bounded, also by the descriptors that this process may have; an
idle connection is closed for a new one.
"""

import resource
from itertools import islice
from pathlib import Path
from typing import Protocol

from ....models.errors import BadSetting

_MOST = 1024  # without a setting
# Descriptors at least. The event loop and the database open 16 after this is counted, 24 are for connections that are
# being refused, 8 for the files of a model and the pipes of a child process.
_KEPT = 48
_LOOKED_AT = 16  # connections; so that each of many new connections costs a fixed time
_SHOWN_IN = Path("/proc/self/fd")


class OpenConnection(Protocol):
    """An open connection."""

    def is_idle(self) -> bool:
        """True if no request is under way, and none was for a second."""
        ...

    def close_idle(self) -> None: ...


class Connections:
    """The open connections. Beyond ``limit`` an idle one is closed for a new one; where none is idle, the new one is
    refused."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._open: dict[OpenConnection, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, connection: OpenConnection) -> bool:
        """True if the connection may stay."""
        if not self.has_room():
            return False
        self._open[connection] = None
        return True

    def has_room(self, coming: int = 0) -> bool:
        """True if one more connection may stay beside ``coming`` new ones. An idle one is closed where needed."""
        return len(self) + coming < self.limit or self._close_one()

    def leave(self, connection: OpenConnection) -> None:
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


def connection_limit(setting: int | None, each: int = 1) -> int:
    """The setting, or the default; less where there are few descriptors. ``each``: how many a connection may take.

    Those that are open already are counted, and a quarter of the others is kept for models, files and child processes.
    Raises BadSetting for a setting above that, and where there is no descriptor for a connection.
    """
    limit = descriptor_limit()
    if limit is None:
        return setting or _MOST
    in_use = descriptors_in_use()
    free = limit - in_use
    most = (free - max(free // 4, _KEPT)) // each
    if most < 1 or (setting is not None and setting > most):
        asked = "no connection can be taken" if setting is None else f"HALFEVEN_MAX_CONNECTIONS = {setting}"
        raise BadSetting(
            f"{asked}: this process may open {limit} files, of which {in_use} are open already, so at most "
            f"{max(most, 0)} connections; raise the limit first (ulimit -n)"
        )
    return setting or min(_MOST, most)


def backlog_of(limit: int) -> int:
    """The number of connections that may wait in the kernel until they are accepted. These take no descriptor yet."""
    return max(min(limit, 2048), 128)


def raise_descriptor_limit() -> None:
    """Raise the soft limit to the hard one: the lower one is for programs that use select(2); this one does not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):  # macOS takes no unlimited number
            return


def descriptor_limit() -> int | None:
    """The number of descriptors that this process may have open; None: no limit."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def descriptors_in_use() -> int:
    """The number of descriptors that are open now; 3 where the system does not show them."""
    try:
        return len(list(_SHOWN_IN.iterdir())) - 1  # one is that of the listing
    except OSError:
        return 3
