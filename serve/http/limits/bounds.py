"""The bounds that all connections of a server share: their number, their memory and their times."""

import logging
from dataclasses import dataclass, field

from .connections import Connections, connection_limit
from .memory_budget import MemoryBudget, default_limit
from .repeated_warnings import RepeatedWarning, WarningEachSecond
from .request_limits import DEFAULTS

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerBounds:
    """``seconds`` is the time for a head to come, and for a body."""

    seconds: float = DEFAULTS.arrival_seconds
    budget: MemoryBudget = field(default_factory=lambda: MemoryBudget(default_limit()))
    connections: Connections = field(default_factory=lambda: Connections(connection_limit(None)))
    malformed: RepeatedWarning = field(
        default_factory=lambda: RepeatedWarning(_LOG, "a request that is not HTTP/1.1 was refused")
    )
    refused: WarningEachSecond = field(
        default_factory=lambda: WarningEachSecond(_LOG, "a connection was refused")
    )
