"""The time that a test waits for what must come: far longer than it takes, as the machine may be busy otherwise."""

import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 600  # of a wait that ends as soon as that has come; only a test that fails waits so long


def until(holds: Callable[[], Any], seconds: float = PATIENCE_S, between_s: float = 0.05) -> Any:
    """Wait for another thread's or process's doing; gives what ``holds`` gives then."""
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(between_s)
    return found
