"""The results of `halfeven tune` on a device, kept beside the versions and read when a version is made ready.

    <store>/models/<name>/tuned/<device>.json     the winner, and all measurements

They choose the form and its setup, never whether a half is equal: that is proven without them. A result that does
not fit (another digest, other libraries, another number of cores) is ignored.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ....exporters.on_device.environment import environment
from ....models.engines.cpu.setup import PLAIN, CpuSetup, usable_cores
from ....models.files.durable import replace_text
from ....models.files.stored_json import stored_json
from ....models.machine.processor import this_processor
from ....models.store.store import Version
from ...batching.interface import PreparedVersion

logger = logging.getLogger("halfeven.roster")


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a version."""

    form: str
    precision: str
    setup: CpuSetup

    @property
    def threads(self) -> int:
        """The threads within an operation; 0 on a GPU."""
        return self.setup.threads

    def __str__(self) -> str:
        return f"{self.form} {self.precision}" + (f", {self.setup}" if self.setup != PLAIN else "")


def way_of(prepared: PreparedVersion) -> Way:
    """The way in which a version is served now."""
    engine = prepared.engine
    return Way(engine.form, engine.precision, prepared.setup or PLAIN)


@dataclass(frozen=True, slots=True)
class Winner:
    """``threads`` and ``passes`` are a `CpuSetup`'s (0 threads on a GPU); ``useful_rows`` as in `PreparedVersion`.

    ``queue_delay_us`` is advice for ``batching.max_queue_delay_us``, which stays the operator's.
    """

    form: str
    precision: str
    threads: int
    useful_rows: int
    queue_delay_us: int
    rows_per_second: float
    passes: Sequence[str] = ()

    @classmethod
    def of(cls, way: Way, useful_rows: int, queue_delay_us: int, rows_per_second: float) -> "Winner":
        passes = sorted(way.setup.passes)
        return cls(way.form, way.precision, way.threads, useful_rows, queue_delay_us, rows_per_second, passes)

    @property
    def setup(self) -> CpuSetup:
        return CpuSetup(self.threads, frozenset(self.passes))

    def __str__(self) -> str:
        how = f", {self.setup}" if self.threads else ""
        rows = f" in batches of up to {self.useful_rows}" if self.useful_rows else ""
        return f"{self.form} {self.precision}{how}, {self.rows_per_second:,.0f} rows/s{rows}"


@dataclass(frozen=True, slots=True)
class Tuned:
    """A winner and the day it was found (ISO 8601). ``corrected``: the day on which what was served put it in the place
    of the tuning's own; empty where that one still holds."""

    winner: Winner
    date: str
    corrected: str = ""

    def __str__(self) -> str:
        corrected = f", corrected by what was served on {self.corrected}" if self.corrected else ""
        return f"tuned on {self.date}{corrected}: {self.winner}"


def conditions(device: torch.device) -> dict[str, Any]:
    """The conditions for which a measurement holds: device, libraries, processor, cores that this process may use."""
    host = {"processor": str(this_processor())} if device.type == "cpu" else {}
    return {**environment(device), **host, "cores": usable_cores()}


def tuned_path(version: Version, device: torch.device) -> Path:
    """``cpu-x86-64-avx512-2-cores.json``, in the folder of the model's tunings."""
    found = conditions(device)
    key = f"{found['device']} {found['cores']} cores" if device.type == "cpu" else found["device"]
    return version.folder.parent / "tuned" / (re.sub(r"[^a-z0-9]+", "-", key.lower()).strip("-") + ".json")


def save_tuned(
    version: Version, device: torch.device, winner: Winner, date: str, evidence: Mapping[str, Any]
) -> Path:
    """Write the file that `tuned_for` reads, whole or not at all; durable when this returns."""
    path = tuned_path(version, device)
    facts = {
        "model": version.name,
        "version": version.number,
        "digest": version.digest,
        "environment": conditions(device),
        "date": date,
        "winner": asdict(winner),
        **evidence,
    }
    path.parent.mkdir(exist_ok=True)
    replace_text(path, json.dumps(facts, indent=2, allow_nan=False))
    return path


def tuned_for(version: Version, device: torch.device) -> Tuned | None:
    """The result for exactly this version on this device under these libraries, or None.

    A file that cannot be read is logged and ignored: a tuning only concerns speed.
    """
    path = tuned_path(version, device)
    try:
        facts = stored_json(path)
        winner = Winner(**facts["winner"])
        _check(winner)
        tuned = Tuned(winner, str(facts["date"]), str(facts.get("corrected", {}).get("date", "")))
        bound = facts["digest"], facts["environment"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning(
            "%s is not a tuning (%s: %s); run `halfeven tune` again", path, type(error).__name__, error
        )
        return None
    if bound == (version.digest, conditions(device)):
        return tuned
    logger.info(
        "%s was made for another version or under other libraries; %s is measured instead", path, version
    )
    return None


def correct_tuned(version: Version, device: torch.device, winner: Winner, date: str, gain: float) -> None:
    """Put a winner that was measured while it served into the place of the tuning's, which stays in the file beside it.

    Without effect where no tuning holds here. Where the disk is full, the next start is tuned, and corrected, again.
    """
    if tuned_for(version, device) is None:
        return
    path = tuned_path(version, device)
    try:
        facts = stored_json(path)
        was = facts.get("corrected", {}).get("was", facts["winner"])
        facts |= {"winner": asdict(winner), "corrected": {"date": date, "gain": gain, "was": was}}
        replace_text(path, json.dumps(facts, indent=2, allow_nan=False))
    except OSError as error:
        logger.error("the corrected tuning of %s could not be kept in %s: %s", version, path, error.strerror)


def _check(winner: Winner) -> None:
    """Raises TypeError where a field has not the type that `save_tuned` writes."""
    integers = (winner.threads, winner.useful_rows, winner.queue_delay_us)
    words = (winner.form, winner.precision, *winner.passes)
    if not (
        all(type(one) is int for one in integers)
        and isinstance(winner.rows_per_second, int | float)
        and all(isinstance(one, str) for one in words)
    ):
        raise TypeError("its winner has fields of other types")
