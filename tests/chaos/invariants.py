"""The invariants that hold after every fault (docs/architecture.md); the words of each violation say which one it
breaks."""

import json
import sqlite3
from pathlib import Path

from halfeven.models.errors import HalfevenError
from halfeven.models.store.store import LIVE, Store

from tests.chaos.callers import infer, is_right
from tests.chaos.servers import Server, moments

MOST_BYTES = 1200 << 20  # resident: the libraries have some hundred MB of it
KEYS = "keys.json"
MISTAKES = ("Traceback (most recent call last)", "a mistake of ours", "internal error")


def violations(
    server: Server, store: Store, rows: dict[str, tuple[list[float], list[float]]], damaged: str | None = None
) -> list[str]:
    """Sentences; none where all is well. ``damaged``: the file that is, which ``net`` may be refused for by name."""
    found = [fault for name in rows for fault in _of_answers(server, store, name, *rows[name], damaged)]
    found += _left_behind(server, store)
    found += [f"the log says {words!r}" for words in MISTAKES if words in server.said()]
    if server.resident_bytes > MOST_BYTES:
        found.append(f"the server has {server.resident_bytes / 2**20:.0f} MiB")
    if damaged is None:
        found += _of_database(store.root / "halfeven.db")
    return found


def _of_answers(
    server: Server, store: Store, name: str, row: list[float], expected: list[float], damaged: str | None
) -> list[str]:
    status, headers, answer = infer(server, name, row)
    if damaged == KEYS and (store.root / KEYS).exists():  # nobody has a key that could be read
        return [] if status in (401, 503) else [f"{name} answers {status} without a key"]
    if status != 200:
        is_named = damaged is not None and name == "net" and Path(damaged).name in str(answer)
        return [] if is_named and status == 503 else [f"{name} is refused with {status}: {answer}"]
    faults = [] if is_right(answer, expected) else [f"{name} answers {answer}, expected {expected}"]
    try:
        version = store.version(name, int(headers["halfeven-version"]))
    except HalfevenError as error:
        return [*faults, f"{name} is answered by a version that is damaged: {error}"]
    if version.status != LIVE:
        faults.append(f"{version} answers and is {version.status}")
    half = headers["halfeven-precision"] != "fp32"
    if half and not any(form["passed"] for form in version.manifest["forms"].values()):
        faults.append(f"{version} answers with a half that was not proven")
    if half and damaged is not None and Path(damaged).name == "half.pt2" and name == "net":
        faults.append(f"{version} answers with its half, whose file {damaged} is damaged")
    if damaged is None and version.number != store.live_number(name):
        faults.append(f"{version} answers, and the store names {store.live_number(name)}")
    return faults


def _left_behind(server: Server, store: Store) -> list[str]:
    """Drafts, uploads and folders of jobs that no process works on. They go soon after a start, not before it."""
    left = list[str]()
    for _ in moments():
        left = _leftovers(server, store)
        if not left:
            return []
        if not server.alive():
            return ["the server ended by itself"]
    return [f"{path} is left behind" for path in left]


def _leftovers(server: Server, store: Store) -> list[str]:
    status, body = server.call("GET", "/v1/fine_tuning/jobs?limit=100")
    jobs = json.loads(body)["data"] if status == 200 else []
    unfinished = {job["id"] for job in jobs if job["finished_at"] is None}
    patterns = ("models/*/.draft-*", "files/.upload-*", "models/*/.*-????????", ".*-????????")
    drafts = [str(path) for pattern in patterns for path in store.root.glob(pattern)]
    return drafts + [str(path) for path in store.root.glob("jobs/*") if path.name not in unfinished]


def _of_database(path: Path) -> list[str]:
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        (result,) = connection.execute("PRAGMA integrity_check").fetchone()
    finally:
        connection.close()
    return [] if result == "ok" else [f"the database is damaged: {result}"]
