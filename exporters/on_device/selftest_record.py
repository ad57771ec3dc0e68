"""The results of `halfeven selftest`, in the store: which features of the engines must not be used on a device.

    <store>/selftest.json     the newest result per environment

A result holds for one kind of device with one driver, one cuDNN and one set of libraries (`environment.py`). It is read
whenever a version is loaded, and the features that it names are switched off.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...models.engines.switched_off import DEVICE, FEATURES, switch_off
from ...models.files.durable import replace_text
from ...models.files.stored_json import stored_json
from ...models.store.store import Version
from .environment import environment

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("halfeven.roster")
MOST_KEPT = 32  # the newest


@dataclass(frozen=True, slots=True)
class SelftestRecord:
    """``off``: the features that must not be used, each with its reason; ``at``: ISO 8601."""

    environment: Mapping[str, Any]
    off: Mapping[str, str]
    at: str


def records_of(root: Path) -> Sequence[SelftestRecord]:
    """All that are kept in the store at ``root``, the newest last. Raises ValueError where they cannot be read."""
    path = _path(root)
    try:
        found = [SelftestRecord(**entry) for entry in stored_json(path)]
        if not all(_is_record(one) for one in found):
            raise ValueError("a result has no environment, no reasons or no date")
        return found
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}): expected what `halfeven selftest` writes; run it again"
        ) from error


def _is_record(found: SelftestRecord) -> bool:
    maps = isinstance(found.environment, dict) and isinstance(found.off, dict) and isinstance(found.at, str)
    return maps and all(isinstance(why, str) for why in found.off.values())


def record_here(root: Path, device: "torch.device") -> SelftestRecord | None:
    """The result that holds on this device as it is now; None where the selftest has not run. Raises ValueError."""
    if not (records := records_of(root)):
        return None
    here = environment(device)
    return next((one for one in reversed(records) if dict(one.environment) == here), None)


def keep_record(root: Path, device: "torch.device", off: Mapping[str, str]) -> SelftestRecord:
    """Put the result in the place of the one before. Durable when this returns. Raises OSError."""
    found = SelftestRecord(environment(device), dict(off), datetime.now(UTC).isoformat(timespec="seconds"))
    try:
        others = [one for one in records_of(root) if dict(one.environment) != dict(found.environment)]
    except ValueError as error:
        logger.warning("%s", error)
        others = []
    root.mkdir(parents=True, exist_ok=True)
    kept = [asdict(one) for one in (*others, found)][-MOST_KEPT:]
    replace_text(_path(root), json.dumps(kept, indent=2, allow_nan=False) + "\n")
    return found


def obey_selftest(version: Version, device: "torch.device") -> None:
    """Switch off in this process what the store of this version has as wrong on the device.

    Where that cannot be read, every feature is off that has a plain way.
    """
    try:
        record = record_here(version.folder.parents[2], device)
        off = record.off if record is not None else {}
        at = f"the selftest of {record.at}" if record is not None else ""
        switch_off(device, {name: f"{at}: {why}" for name, why in off.items()})
    except ValueError as error:
        switch_off(device, {name: str(error) for name in FEATURES if name != DEVICE})


def _path(root: Path) -> Path:
    return root / "selftest.json"
