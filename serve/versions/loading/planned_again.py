"""A half that this device has no kernels for is planned again by what the device says, in a process of its own.

    python -m halfeven.serve.versions.loading.planned_again STORE NAME NUMBER DEVICE

The new version is published, and the roster follows the store. A trial of kernels may end a CUDA context for good: it
has one of its own.
"""

import logging
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from ....models.store.store import FOR_DEVICE, Store, Version

logger = logging.getLogger("halfeven.roster")
# The last planner of each version on a device. A version that cannot serve is loaded again while its planner runs.
_PLANNERS: dict[tuple[str, ...], threading.Thread] = {}
_CHANGES = threading.Lock()


def plan_again(version: Version, device: torch.device) -> threading.Thread | None:
    """Plan the version again for the device, in the background, unless that is under way. None where it was made for a
    device already, or has no captured program."""
    made_for_one = version.manifest.get("lineage", {}).get("by") == FOR_DEVICE
    # A folder that is a link belongs to a store that is only read.
    if made_for_one or not version.has("original.pt2") or version.folder.is_symlink():
        return None
    store = version.folder.parents[2]
    of = (str(store), version.name, str(version.number), str(device))
    command = [sys.executable, "-P", "-m", __name__, *of]
    with _CHANGES:
        planner = _PLANNERS.get(of)
        if planner is None or not planner.is_alive():
            planner = threading.Thread(target=_run, args=(command, f"{version} for {device}"), daemon=True)
            _PLANNERS[of] = planner
            planner.start()
        return planner


def _run(command: Sequence[str], subject: str) -> None:
    logger.warning("planning %s again: it has no half kernel for a part of the half", subject)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        logger.error("%s could not be planned again: %s", subject, done.stderr[-800:])
    else:
        logger.info("%s was planned again: %s", subject, done.stdout.strip())


def main(arguments: Sequence[str]) -> None:
    """Print the new version with its status."""
    from ....exporters.conversion.for_device import planned_for

    root, name, number, device = arguments
    store = Store(Path(root))
    made = planned_for(store.version(name, int(number)), store, torch.device(device), lambda _: None)
    print(f"{made} is {made.status}")


if __name__ == "__main__":
    main(sys.argv[1:])
