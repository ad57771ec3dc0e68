"""The orders about a model's versions, kept beside them in the store, so that they hold after a restart.

<store>/models/<name>/rollout.json       the canary and the shadow; the server is its one writer
<store>/models/<name>/drifted-<v>.json   the half of this version drifted, and on which device
<store>/models/<name>/events.jsonl       the decisions, with time and numbers
"""

import json
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...models.errors import DamagedFile
from ...models.files.durable import replace_text
from ...models.files.json_fields import as_json
from ...models.files.stored_json import json_of, stored_bytes, stored_json
from ...models.store.store import Store, Version
from ..http.limits.request_limits import DEFAULTS

_SEARCHED = 1000  # events in which the last activation is looked for
EVENTS_MOST_BYTES = DEFAULTS.events_bytes


@dataclass(frozen=True, slots=True)
class TrafficOrder:
    """A share of the traffic (``percent``, above 0 to 100) for a version."""

    version: int
    percent: float


@dataclass(frozen=True, slots=True)
class TrafficOrders:
    canary: TrafficOrder | None = None
    shadow: TrafficOrder | None = None


def read_orders(store: Store, name: str) -> TrafficOrders:
    """Raises DamagedFile."""
    path = _folder(store, name) / "rollout.json"
    try:
        saved = stored_json(path)
        return TrafficOrders(*(_order(saved[role]) if saved[role] else None for role in ("canary", "shadow")))
    except FileNotFoundError:
        return TrafficOrders()
    except (OSError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise DamagedFile(
            f"{path} cannot be read ({error}); remove it, and order the canary or shadow again"
        ) from error


def _order(saved: Any) -> TrafficOrder:
    """Raises ValueError, TypeError, KeyError, OverflowError."""
    order = TrafficOrder(saved["version"], float(saved["percent"]))
    if type(order.version) is not int:
        raise TypeError(f"{order.version!r} is no version's number")
    if not 0.0 < order.percent <= 100.0:
        raise ValueError(f"{order.percent} is no share in percent")
    return order


def write_orders(store: Store, name: str, orders: TrafficOrders) -> None:
    """Durable when this returns."""
    _replace(_folder(store, name) / "rollout.json", asdict(orders))


def drifted(version: Version, device: str) -> str | None:
    """The reason why the half of this version may not serve on this device since it drifted, or None where it may. A
    note of another version that had this number is none."""
    try:
        found = stored_json(_note(version))
        reason, noted, digest = str(found["reason"]), found["device"], found.get("digest", version.digest)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        return f"its note of drift cannot be read ({error})"
    return reason if (noted, digest) == (device, version.digest) else None


def note_drift(version: Version, device: str, reason: str) -> None:
    """Note that the half may not serve on this device before it is proven again. Durable when this returns."""
    note = {"device": device, "digest": version.digest, "reason": reason, "at": _now()}
    _replace(_note(version), note)


def pardon(version: Version) -> None:
    """Delete the note: the half was proven again on the device that it names."""
    _note(version).unlink(missing_ok=True)


def _note(version: Version) -> Path:
    return version.folder.parent / f"drifted-{version.number}.json"


def record(
    store: Store, name: str, kind: str, message: str, numbers: Mapping[str, Any] | None = None
) -> None:
    """Append an event; ``numbers`` that JSON lacks (an infinite error) become null. Durable when this returns. Where
    the file would be larger than its bound, the newest events in half of that are kept."""
    path = _folder(store, name) / "events.jsonl"
    event = {"at": _now(), "model": name, "kind": kind, "message": message, "numbers": as_json(numbers or {})}
    line = json.dumps(event, allow_nan=False).encode() + b"\n"
    if path.exists() and path.stat().st_size + len(line) > EVENTS_MOST_BYTES:
        newest = stored_bytes(path)[-(EVENTS_MOST_BYTES // 2) :]
        replace_text(path, newest.partition(b"\n")[2].decode(errors="replace"))
    with path.open("a+b") as file:
        file.seek(0, os.SEEK_END)
        if file.tell() and (file.seek(-1, os.SEEK_END), file.read())[1] != b"\n":
            file.write(b"\n")  # a crash cut the last line off
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def events(store: Store, name: str, most: int = 100) -> list[dict[str, Any]]:
    """The newest first. A line that is damaged, for example cut off by a crash, is left out. Raises DamagedFile."""
    path = _folder(store, name) / "events.jsonl"
    try:
        lines = stored_bytes(path).splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DamagedFile(f"{path} cannot be read ({error.strerror}); remove it") from error
    found = []
    for line in reversed(lines):
        if len(found) == most:
            break
        try:
            event = json_of(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            found.append(event)
    return found


def newest_events(store: Store, names: Iterable[str], most: int) -> list[dict[str, Any]]:
    """The newest of several models, the newest first. A file is read only where it can hold one of them: its events are
    not younger than it is. A file that cannot be read is an event of the kind ``damaged``."""
    files = list[tuple[float, str]]()
    for name in names:
        with suppress(OSError):
            files.append(((_folder(store, name) / "events.jsonl").stat().st_mtime, name))
    found = list[dict[str, Any]]()
    for changed_s, name in sorted(files, reverse=True):
        if len(found) == most and str(found[-1].get("at")) > _at(changed_s):
            break
        try:
            found += [{**event, "model": name} for event in events(store, name, most)]
        except DamagedFile as error:
            found.append({"at": _at(changed_s), "model": name, "kind": "damaged", "message": str(error)})
        found = sorted(found, key=lambda event: str(event.get("at")), reverse=True)[:most]
    return found


def last_activation(store: Store, name: str) -> Mapping[str, Any] | None:
    """The numbers of the newest event that says which version became active; None where there is none."""
    with suppress(DamagedFile):
        for event in events(store, name, _SEARCHED):
            numbers = event.get("numbers")
            if event.get("kind") == "activated" and isinstance(numbers, dict):
                return numbers
    return None


def _folder(store: Store, name: str) -> Path:
    return store.root / "models" / name


def _now() -> str:
    return _at(time.time())


def _at(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _replace(path: Path, data: Mapping[str, Any]) -> None:
    replace_text(path, json.dumps(data, indent=2, allow_nan=False) + "\n")
