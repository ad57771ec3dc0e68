"""The record of the versions that were made active, by whose order and in place of which one; and the alias's lock.

    <store>/models/<name>/promotions.json   {"2": {"first": {"over": 1, "by": "operator", "at": …}, "last": {…}}}
    <store>/models/<name>/.promoting        locked (flock) while the alias is compared and moved

The first and the last promotion of each version are stored: the file grows with the versions, not with the calls.
"""

import json
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ..errors import DamagedFile
from ..files.durable import locked, replace_text
from ..files.stored_json import stored_json

Promotions = Mapping[int, Mapping[str, Any]]  # number → first and last, each with over, by and at


def alias_lock(folder: Path) -> AbstractContextManager[None]:
    """One promotion or rollback of a model at a time, over all processes and threads."""
    return locked(folder / ".promoting")


def read_promotions(folder: Path) -> Promotions:
    """Every version of the model that was ever made active. Raises DamagedFile."""
    path = folder / "promotions.json"
    try:
        saved = stored_json(path)
        return {
            int(number): {key: _entry(found[key]) for key in ("first", "last")}
            for number, found in saved.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedFile(
            f"{path} cannot be read ({error}); remove it: promoting goes on, and what stood in it is forgotten"
        ) from error


def _entry(saved: Any) -> Mapping[str, Any]:
    """Raises as a damaged file makes it."""
    return {key: saved[key] for key in ("over", "by", "at")}


def record_promotion(folder: Path, number: int, over: int | None, by: str) -> None:
    """Record a promotion. Hold `alias_lock`. Durable when this returns."""
    entry = {"over": over, "by": by, "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    found = dict(read_promotions(folder))
    found[number] = {"first": entry, **found.get(number, {}), "last": entry}
    text = json.dumps({str(key): found[key] for key in sorted(found)}, indent=2) + "\n"
    replace_text(folder / "promotions.json", text)


def was_cut_off(promotions: Promotions, number: int, live: int | None) -> bool:
    """True if the process that published the newest version ended before the version was active: the promotion was not
    recorded, or it was and no other one followed."""
    if number <= (live or 0):
        return False
    if (own := promotions.get(number)) is None:
        return True
    other = promotions.get(live or 0)
    followed = other is not None and (
        other["last"]["over"] == number or other["last"]["at"] > own["last"]["at"]
    )
    return own["last"]["over"] == live and not followed
