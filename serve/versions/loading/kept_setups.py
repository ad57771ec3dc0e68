"""The results of `cpu_choice` for a model on a processor, kept beside its versions and read at the next load.

    <store>/models/<name>/tuned/setups-<device>.json     by version, form and precision

A retrained version takes its parent's: the program is the same. An entry that does not fit (another processor, other
libraries, another number of cores) is measured again.
"""

import json
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ....models.durable import replace_text
from ....models.engines.cpu.setup import CpuSetup
from ....models.engines.engine import Engine
from ....models.spec import ModelSpec
from ....models.store import Version
from ....models.stored_json import stored_json
from ...batching.place import Place
from .cpu_choice import CpuChoice, Parts, choose_setup
from .tuned import conditions, tuned_path

logger = logging.getLogger("halfeven.roster")
MOST_KEPT = 32  # the newest


def measured_setup(
    version: Version,
    form: str,
    precision: str,
    load: Callable[[CpuSetup], Engine],
    spec: ModelSpec,
    batch_of: Callable[[int], Parts],
    place: Place,
) -> CpuSetup:
    """The setup in which a form of a version runs best on this CPU: as measured before, or measured now.

    ``load`` gives its engine in a setup; ``batch_of`` gives that many rows. A result that other programs disturbed
    holds for this load and for versions trained from this one, and is measured again at the next load. Errors of
    loading or running the plain program are raised.
    """
    kept = _kept(version, form, precision, place.device)
    if kept is not None:
        return kept
    choice = choose_setup(
        lambda setup: place.call(partial(load, setup)),
        batch_of,
        spec.max_batch_size if spec.batched else 0,
        place.call,
    )
    _keep(version, form, precision, place.device, choice)
    return choice.setup


def _kept(version: Version, form: str, precision: str, device: torch.device) -> CpuSetup | None:
    entries, parent = _read(_path(version, device)), version.manifest.get("parent")
    for number in (version.number, parent):
        entry = entries.get(_key(number, form, precision))
        if entry is None or entry["conditions"] != conditions(device):
            continue
        if number == parent or not entry.get("crowded"):
            return CpuSetup(entry["threads"], frozenset(entry["passes"]))
    return None


def _keep(version: Version, form: str, precision: str, device: torch.device, choice: CpuChoice) -> None:
    """Keep the results. Where the disk is full or read-only, the next load measures again."""
    path = _path(version, device)
    entry = {
        "conditions": conditions(device),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "crowded": choice.crowded,
        **choice.setup.to_json(),
        "measured": [
            {**timed.setup.to_json(), "rows": rows, "seconds": seconds}
            for timed in choice.measured
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
