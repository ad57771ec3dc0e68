"""The results of `cpu_choice` for a model on a processor, kept beside its versions and read at the next load.

    <store>/models/<name>/tuned/setups-<device>.json     by version, form and precision

A retrained version takes its parent's: the program is the same. An entry that does not fit (another processor, other
libraries, another number of cores, another model under the same number) is measured again. What is served measures
every entry again, and replaces it where it was wrong (`serve/versions/choices/`); ``rounds`` counts the measurements in
a row that confirmed it.
"""

import json
import logging
import statistics
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ....models.engines.cpu.setup import CpuSetup
from ....models.errors import DamagedFile
from ....models.files.durable import replace_text
from ....models.files.stored_json import stored_json
from ....models.store.manifest import read_manifest
from ....models.store.store import Version
from .candidate_forms import VersionHere
from .cpu_choice import TimedSetup, choose_setup
from .tuned import conditions, tuned_path

logger = logging.getLogger("halfeven.roster")
MOST_KEPT = 32  # the newest


@dataclass(frozen=True, slots=True)
class KeptSetup:
    """A setup with the shortest seconds of a batch in it, by rows (empty: not measured in this setup), how many rounds
    in a row confirmed it while it served, and the most rows that a batch had then, in the mean (0: not known)."""

    setup: CpuSetup
    seconds: Mapping[int, float] = field(default_factory=dict)
    rounds: int = 0
    rows: float = 0.0


def measured_setup(here: VersionHere, form: str, precision: str) -> CpuSetup:
    """The setup in which a form of a version runs best on this CPU: as measured before, or measured now.

    A result that other programs disturbed holds for this load and for versions trained from this one, and is measured
    again at the next load. Errors of loading or running the plain program are raised.
    """
    version, spec, call = here.version, here.spec, here.place.call
    if (kept := kept_setup(version, form, precision, here.place.device)) is not None:
        return kept.setup
    load = partial(here.engine, form, precision)
    most = spec.max_batch_size if spec.batched else 0
    choice = choose_setup(lambda setup: call(partial(load, setup)), here.batch, most, call)
    found = choice.setup
    keep_setup(version, form, precision, here.place.device, found, choice.measured, crowded=choice.crowded)
    return found


def kept_setup(version: Version, form: str, precision: str, device: torch.device) -> KeptSetup | None:
    """The stored setup for a form of this version or of its parent that holds on this device; None where none does."""
    entries = _read(_path(version, device))
    for number, digest in _with_parent(version):
        entry = entries.get(_key(number, form, precision))
        if entry is None or entry["conditions"] != conditions(device) or entry.get("digest") != digest:
            continue
        if number != version.number or not entry.get("crowded"):
            setup = CpuSetup(entry["threads"], frozenset(entry["passes"]))
            rounds, rows = entry.get("rounds", 0), entry.get("rows", 0.0)
            rounds = rounds if isinstance(rounds, int) else 0
            rows = rows if isinstance(rows, int | float) else 0.0
            return KeptSetup(setup, _seconds_in(entry, setup), rounds, rows)
    return None


def _with_parent(version: Version) -> Iterator[tuple[int, str]]:
    """The numbers and digests of the version and its parent, where that is there. A store that is made anew has other
    versions under the same numbers, and a server's state and a node's copy outlive it."""
    yield version.number, version.digest
    if isinstance(parent := version.manifest.get("parent"), int):
        with suppress(DamagedFile):
            yield parent, read_manifest(version.folder.parent / str(parent) / "manifest.json")["digest"]


def _seconds_in(entry: Mapping[str, Any], setup: CpuSetup) -> dict[int, float]:
    """The shortest seconds by rows of the entry's measurements in the setup; those that cannot be read are left out."""
    found: dict[int, float] = {}
    measured = entry.get("measured")
    for row in measured if isinstance(measured, list) else []:
        try:
            if CpuSetup(row["threads"], frozenset(row["passes"])) == setup and row["seconds"] > 0:
                found[int(row["rows"])] = float(row["seconds"])
        except (KeyError, TypeError, ValueError):
            continue
    return found


def keep_setup(
    version: Version,
    form: str,
    precision: str,
    device: torch.device,
    setup: CpuSetup,
    measured: Iterable[TimedSetup],
    crowded: bool = False,
    rounds: int = 0,
    rows: float = 0.0,
) -> None:
    """Keep a setup with its measurements. Where the disk is full or read-only, the next load measures again."""
    path = _path(version, device)
    entry = {
        "digest": version.digest,
        "conditions": conditions(device),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "crowded": crowded,
        "rounds": rounds,
        "rows": rows,
        **setup.to_json(),
        "measured": [
            {**timed.setup.to_json(), "rows": rows, **_spread(seconds, timed.runs.get(rows, [seconds]))}
            for timed in measured
            for rows, seconds in timed.seconds.items()
        ],
    }
    key = _key(version.number, form, precision)
    entries = {name: kept for name, kept in _read(path).items() if name != key} | {key: entry}
    try:
        path.parent.mkdir(exist_ok=True)
        replace_text(path, json.dumps(dict(list(entries.items())[-MOST_KEPT:]), indent=2, allow_nan=False))
    except OSError as error:
        logger.error("the setup of %s could not be kept in %s: %s", version, path, error.strerror)


def _spread(seconds: float, runs: list[float]) -> dict[str, float]:
    """The shortest run, and how far the others were from it."""
    return {"seconds": seconds, "median": statistics.median(runs), "longest": max(runs), "runs": len(runs)}


def _path(version: Version, device: torch.device) -> Path:
    path = tuned_path(version, device)
    return path.with_name(f"setups-{path.name}")


def _key(number: object, form: str, precision: str) -> str:
    return f"{number} {form} {precision}"


def _read(path: Path) -> dict[str, Any]:
    try:
        found = stored_json(path)
        return {
            key: entry
            for key, entry in found.items()
            if isinstance(entry["threads"], int)
            and "conditions" in entry
            and all(isinstance(name, str) for name in entry["passes"])
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        logger.warning("%s is not a file of setups and is left aside: %s", path, error)
        return {}
