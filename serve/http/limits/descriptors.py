"""File descriptors: how many this process may have, and how many it has."""

import resource
from pathlib import Path

_SHOWN_IN = Path("/proc/self/fd")


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
