"""The file ``halfeven.lock``: the facts of several halves; and the check of it.

    {"format": 1, "halfeven": "0.1.0", "halves": [{"target": "model.fp16.onnx", "form": "onnx", …}]}

A target is a half that `halfeven fp16` wrote, as a path from the lock's folder, or NAME or NAME@VERSION of a store.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any

from ...models.errors import (
    BadFolder,
    BadInput,
    Conflict,
    DamagedFile,
    EngineFailed,
    NewerFormat,
    ParityRefused,
)
from ...models.files.durable import replace_text
from ...models.files.opened_file import opened_named
from ...models.files.stored_json import stored_json
from ...models.version import __version__
from ..proof.maker import Notify
from .half_file import check_digests, check_proof
from .measured import Found, digest_of, file_of, measured, surroundings

Facts = Mapping[str, Any]
# A half's share of FP32's time may grow so many times: two measurements of one half differ by less.
SLOWER = 1.5
LEAST_MS = 0.1  # of a shorter batch the clock of a busy machine tells nothing
# Times the half's own time: where FP32 became slower with it, on the same processor with as many cores.
MUCH_SLOWER = 3.0


@dataclass(frozen=True, slots=True)
class Change:
    """``kind``: ``file``, ``proof``, ``environment``, ``processor``, ``bits``, ``verdict`` or ``speed``. ``fails``: the
    lock does not hold any more."""

    kind: str
    message: str
    fails: bool


def changes(then: Facts, now: Facts) -> list[Change]:
    """The changes of one half in one form; ``then`` and ``now`` are its facts from `measured.py`."""
    files = _file(then, now)
    found = [*files, *_surroundings(then, now)]
    if not now["passed"]:  # then neither bits nor times were taken
        said = f"the half is not equal here any more: {now['summary']}"
        return [*found, Change("verdict", said, True)]
    # The bits are of the same half and of the same samples only where no file changed.
    if not files and (bits := _bits(then, now)):
        found.append(Change("bits", bits, False))
    if slow := slower(then, now):
        found.append(Change("speed", slow, True))
    return found


def _file(then: Facts, now: Facts) -> list[Change]:
    if (version := now.get("version")) != then.get("version", version):
        active = f"version {version} is active now, and version {then['version']} was locked"
        return [
            Change(
                "file", f"{active}: lock NAME@{then['version']} where that one is meant, or lock again", True
            )
        ]
    if then["file"] == now["file"]:
        if then["proof"] == now["proof"]:
            return []
        return [Change("proof", "the proof is another one than the locked one; restore it", True)]
    before, after = then["weights"], now["weights"]
    changed = sorted(name for name in before if after.get(name) != before[name])
    more = (
        f": {len(changed)} of its {len(before)} weights differ, the first is {changed[0]}" if changed else ""
    )
    return [
        Change(
            "file",
            f"the half is another file than the locked one{more}; lock the new half, or restore the old",
            True,
        )
    ]


def _surroundings(then: Facts, now: Facts) -> list[Change]:
    found = list[Change]()
    before, after = then["environment"], now["environment"]
    for key in sorted(before.keys() - {"device"}):
        if before[key] != after.get(key):
            said = f"{key}: {before[key]} then, {after.get(key, 'none')} now"
            found.append(Change("environment", said, False))
    devices = [before["device"], after["device"]]
    # Only torch names the kernels that oneDNN has for this processor.
    if "none" in (before.get("torch"), after.get("torch")):
        devices = [device.partition(",")[0] for device in devices]
    if devices[0] != devices[1] or then["processor"] != now["processor"]:
        kinds = f"{then['processor']} ({before['device']}) then, {now['processor']} ({after['device']}) now"
        found.append(Change("processor", f"another processor, which may have other kernels: {kinds}", False))
    if then["cores"] != now["cores"]:
        said = f"another number of cores: {then['cores']} then, {now['cores']} now"
        found.append(Change("processor", said, False))
    return found


def _bits(then: Facts, now: Facts) -> str:
    """A sentence where the answers to the same samples have other bits."""
    sides = [name for name in ("half", "fp32") if then["bits"][name] != now["bits"][name]]
    if not sides:
        return ""
    whose = {"half": "the half's", "fp32": "FP32's"}
    said = " and ".join(whose[side] for side in sides)
    return (
        f"{said} answers to the same samples have other bits: kernels compute otherwise. The half erred by "
        f"{_u(then['max_error_u'])} then and errs by {_u(now['max_error_u'])} now"
    )


def _u(error: float | None) -> str:
    return "more than can be counted" if error is None else f"{error:.3g}u"


def slower(then: Facts, now: Facts) -> str:
    """A sentence where the half is slower than it was; empty where it is not, or where no time was taken."""
    before, after = then["milliseconds"], now["milliseconds"]
    if (
        min(times[side] for times in (before, after) for side in ("half", "fp32")) <= 0
        or after["half"] < LEAST_MS
    ):
        return ""
    shares = [times["half"] / times["fp32"] for times in (before, after)]
    own = after["half"] / before["half"]
    if shares[1] > SLOWER * shares[0] and own > 1:
        return (
            f"the half is slower beside FP32: {shares[1]:.2f} of FP32's time, {shares[0]:.2f} when it was locked "
            f"({after['half']:.3g} ms for a batch, {before['half']:.3g} ms then)"
        )
    if own > MUCH_SLOWER and all(then[key] == now[key] for key in ("processor", "cores")):
        return f"half and FP32 are slower: {after['half']:.3g} ms for a batch of the half, {before['half']:.3g} ms then"
    return ""


FORMAT = 1
# A half that seems slower is measured again so often, for another program may have had the cores.
AGAIN = 3
_KINDS: Mapping[str, type | UnionType] = {
    "target": str, "form": str, "file": str, "weights": dict, "environment": dict, "processor": str, "passed": bool,
    "summary": str, "proof": str, "cores": int, "bits": dict, "milliseconds": dict, "max_error_u": float | int | None,
}  # fmt: skip


def write_lock(path: Path, found: Mapping[str, Found], notify: Notify = lambda _: None) -> dict[str, Any]:
    """Measure the halves of each target and write the lock; gives its facts.

    Raises BadInput as `measured`, Conflict where another file has its name, ParityRefused where a half is not equal
    here, or a file of its proof is not the one that was proven.
    """
    if path.exists():
        try:
            read_lock(path)
        except BadInput as error:
            raise Conflict(
                f"{path} is no lock of an earlier run, so it is not replaced; give another --out"
            ) from error
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
        lock = stored_json(path, opened_named)
    except OSError as error:
        raise BadInput(
            f"{path} cannot be read ({error.strerror or error}): expected a lock, which `halfeven lock` writes"
        ) from error
    except ValueError as error:
        raise BadInput(f"{wrong}: {error}") from error
    if isinstance(lock, dict) and isinstance(found := lock.get("format"), int) and found > FORMAT:
        raise NewerFormat(
            f"{path} has format {found}, and this release of halfeven reads {FORMAT}: use a later one"
        )
    halves = lock.get("halves") if isinstance(lock, dict) else None
    if not isinstance(lock.get("format") if isinstance(lock, dict) else None, int):
        raise BadInput(f"{wrong}: expected the key format, with its number")
    if not isinstance(halves, list) or not halves or not all(map(_is_half, halves)):
        raise BadInput(
            f"{wrong}: expected the key halves, with {', '.join(sorted(_KINDS))} of each half, which passed"
        )
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
    if not facts["passed"]:
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
    """The changes of each half since it was locked, as (target, form, changes); one that does not run is a change too.
    ``found``: what a target names now."""
    return [(then["target"], then["form"], _since(then, found, notify)) for then in halves]


def _since(then: Facts, found: Callable[[str], Found], notify: Notify) -> list[Change]:
    try:
        half = found(then["target"])
    except ParityRefused as error:
        return [Change("proof", str(error), True)]
    except (BadInput, DamagedFile) as error:
        return [Change("file", str(error), True)]
    if wrong := _wrong_file(half, then["form"]):
        return [wrong]
    try:
        return changes(then, _again(half, then, notify))
    except (BadInput, ParityRefused) as error:
        return [Change("proof", str(error), True)]
    except ModuleNotFoundError as error:
        return _why_it_cannot_be_proven(then, half, f"it needs {error.name}, which is not installed")
    # The files of the proof are as they were: the libraries are others, or the half is damaged.
    except (DamagedFile, EngineFailed) as error:
        return _why_it_cannot_be_proven(then, half, str(error))


def _wrong_file(half: Found, form: str) -> Change | None:
    """The first file of a proof, or of a version in the store, that is not as its manifest says; of a version the half
    itself comes first."""
    if half.file:
        try:
            check_proof(half.version)
        except (BadInput, DamagedFile, ParityRefused) as error:
            return Change("proof", str(error), True)
        return None
    own = file_of(form)
    for name in sorted(half.version.manifest["files"], key=lambda name: name != own):
        try:
            half.version.opened(name).close()
        except DamagedFile as error:
            return Change("file" if name == own else "proof", str(error), True)
    return None


def _why_it_cannot_be_proven(then: Facts, half: Found, why: str) -> list[Change]:
    changed = half.file is not None and _is_other_file(half.file, then["file"])
    found = (
        [Change("file", "the half is another file than the locked one; restore it", True)] if changed else []
    )
    return [
        *found,
        *_surroundings(then, surroundings()),
        Change("verdict", f"the half cannot be proven here: {why}", True),
    ]


def _is_other_file(half: Path, locked: str) -> bool:
    try:
        return digest_of(half) != locked
    except BadFolder:  # what is left of it is no ONNX file
        return True


def _again(found: Found, then: Facts, notify: Notify) -> Facts:
    """The half now; measured again while it seems slower. The last time counts: only a half that is slower each time is
    slower. Of verdict and bits the first change counts."""
    seen = [_form(found, then["form"], notify)]
    while seen[-1]["passed"] and slower(then, seen[-1]) and len(seen) <= AGAIN:
        notify("it seems slower: measuring it again")
        seen.append(_form(found, then["form"], notify))
    changed = min(seen, key=lambda facts: (facts["passed"], facts["bits"] == then["bits"]))
    return {**changed, "milliseconds": seen[-1]["milliseconds"]}


def _form(found: Found, form: str, notify: Notify) -> Facts:
    for facts in measured(found, notify, form):
        return facts
    raise BadInput(f"{found.version} has no proven {form} form any more: lock it again")
