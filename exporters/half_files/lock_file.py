"""The file ``halfeven.lock``: the facts of several halves; and the check of it.

    {"format": 1, "halfeven": "0.1.0", "halves": [{"target": "model.fp16.onnx", "form": "onnx", …}]}

A target is a half that `halfeven fp16` wrote, as a path from the lock's folder, or NAME or NAME@VERSION of a store.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any

from ...models.errors import BadInput, NewerFormat, ParityRefused
from ...models.files.durable import replace_text
from ...models.files.stored_json import stored_json
from ...models.version import __version__
from ..proof.maker import Notify
from .changes import Change, changes, slower
from .half_file import check_digests
from .measured import Found, measured

FORMAT = 1
AGAIN = (
    3  # times that a half is measured again where it seems slower, for another program may have had the cores
)
Facts = Mapping[str, Any]
_KINDS: Mapping[str, type | UnionType] = {
    "target": str, "form": str, "file": str, "weights": dict, "environment": dict, "processor": str, "passed": bool,
    "summary": str, "bits": dict, "milliseconds": dict, "max_error_u": float | int | None,
}  # fmt: skip


def write_lock(path: Path, found: Mapping[str, Found], notify: Notify = lambda _: None) -> dict[str, Any]:
    """Measure the halves of each target and write the lock; gives its facts. Raises BadInput as `measured`,
    ParityRefused where a half is not equal here, or a file of its proof is not the one that was proven."""
    for one in found.values():
        if one.file:
            check_digests(one.file, one.version)
    halves = [
        {"target": _from_folder(one.file, path.parent) if one.file else target, **facts}
        for target, one in found.items()
        for facts in measured(one, notify)
    ]
    for facts in halves:
        if not facts["passed"]:
            raise ParityRefused(
                f"{facts['target']} is not equal here, so there is nothing to lock: {facts['summary']}"
            )
    lock = {"format": FORMAT, "halfeven": __version__, "halves": halves}
    replace_text(path, json.dumps(lock, indent=2, allow_nan=False) + "\n")
    return lock


def read_lock(path: Path) -> list[Facts]:
    """The halves of a lock; the path of a file is absolute then. Raises BadInput for a file that is none, NewerFormat
    for one of a later release."""
    wrong = f"{path} is not a lock that `halfeven lock` wrote"
    try:
        lock = stored_json(path)
    except (OSError, ValueError) as error:
        raise BadInput(f"{wrong}: {error}") from error
    if isinstance(lock, dict) and isinstance(found := lock.get("format"), int) and found > FORMAT:
        raise NewerFormat(
            f"{path} has format {found}, and this release of halfeven reads {FORMAT}: use a later one"
        )
    halves = lock.get("halves") if isinstance(lock, dict) else None
    if not isinstance(halves, list) or not halves or not all(map(_is_half, halves)):
        raise BadInput(f"{wrong}: expected the key halves, with {', '.join(sorted(_KINDS))} of each")
    return [
        each | {"target": os.path.normpath(path.parent.resolve() / each["target"])}
        if _is_file(each["target"])
        else each
        for each in halves
    ]


def _is_half(facts: Any) -> bool:
    """True for facts that `changes` can compare."""
    if not isinstance(facts, dict) or not all(
        isinstance(facts.get(key), kind) for key, kind in _KINDS.items()
    ):
        return False
    sides = [(facts["bits"].get(side), facts["milliseconds"].get(side)) for side in ("half", "fp32")]
    return "device" in facts["environment"] and all(
        isinstance(bits, str) and isinstance(time, float | int) for bits, time in sides
    )


def _is_file(target: str) -> bool:
    return target.endswith(".onnx")


def _from_folder(file: Path, folder: Path) -> str:
    """The path of a file from a folder, either of which may be behind links; a file that is a link stays one, for its
    proof is beside the link."""
    return os.path.relpath(file.parent.resolve() / file.name, folder.resolve())


def checked(
    halves: Sequence[Facts], found: Callable[[str], Found], notify: Notify = lambda _: None
) -> list[tuple[str, str, list[Change]]]:
    """The changes of each half since it was locked, as (target, form, changes). ``found``: what a target names now."""
    result = list[tuple[str, str, list[Change]]]()
    for then in halves:
        now = _again(found(then["target"]), then, notify)
        result.append((then["target"], then["form"], changes(then, now)))
    return result


def compared(then: Sequence[Facts], now: Sequence[Facts]) -> list[tuple[str, str, list[Change]]]:
    """Target, form and changes for each half of two locks, which two environments wrote for the same targets. Raises
    BadInput where the targets differ."""
    by_name = {(facts["target"], facts["form"]): facts for facts in now}
    if missing := [facts["target"] for facts in then if (facts["target"], facts["form"]) not in by_name]:
        raise BadInput(f"the other environment has no {missing[0]}: expected the same targets in both")
    return [
        (facts["target"], facts["form"], changes(facts, by_name[facts["target"], facts["form"]]))
        for facts in then
    ]


def _again(found: Found, then: Facts, notify: Notify) -> Facts:
    """The half now; measured again while it seems slower: the fastest counts."""
    best = _form(found, then["form"], notify)
    for _ in range(AGAIN):
        if not slower(then, best):
            break
        notify("it seems slower: measuring it again")
        other = _form(found, then["form"], notify)
        best = min(
            best, other, key=lambda facts: facts["milliseconds"]["half"] / facts["milliseconds"]["fp32"]
        )
    return best


def _form(found: Found, form: str, notify: Notify) -> Facts:
    for facts in measured(found, notify, form):
        return facts
    raise BadInput(f"{found.version} has no proven {form} form any more: lock it again")
