"""The manifest of a version: the digest of each of its files, and the facts of its conversion. It is read strictly.
Files and keys that older versions call otherwise have their present names here."""

import errno
import hashlib
import json
from collections.abc import Container, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import DamagedFile, NewerFormat
from ..files.durable import PRIVATE, READABLE, fsync
from ..files.opened_file import OpenedFile
from ..files.stored_json import Opener, stored_json

LIVE, REFUSED = "live", "refused"
# The format of a version's folder. It rises with a change that older releases would misread; a manifest without a
# format is of format 1. In format 1 the files of the original are named ``whole.*``.
FORMAT = 2
_INPUTS = ("samples.safetensors", "inputs.npz")  # the latter of an exported folder
_PRESENT, _OLDER = "original.", "whole."
# A conversion writes values of these kinds under these keys, or null: so does an export, of a key that the release that
# made the version did not know.
_KINDS = {
    "reason": str,
    "notes": list,
    "samples": dict,
    "row_operations": int,
    "around": dict,
    "source": dict,
    "imported": dict,
}
_AROUND = ("nodes", "recorded", "read")
_KEYS = {"whole_because": "original_because", "accuracy_whole": "accuracy_original"}


def read_manifest(path: Path, opener: Opener = OpenedFile) -> Mapping[str, Any]:
    """Raises DamagedFile naming the file and what is wrong with it, NewerFormat where a later release wrote it."""
    try:
        manifest = stored_json(path, opener)
    except OSError as error:
        raise DamagedFile(f"{path} cannot be read: {error.strerror}; {restored(error)}") from error
    except ValueError as error:
        raise DamagedFile(f"{path} cannot be read: {error}; {restored()}") from error
    if not (
        isinstance(manifest, dict)
        and {"status", "digest", "files"} <= manifest.keys()
        and isinstance(manifest["files"], dict)
    ):
        raise DamagedFile(
            f"{path} is not a manifest: it needs status, digest and files; convert the model again"
        )
    if type(found := manifest.get("format", 1)) is int and found > FORMAT:
        raise NewerFormat(
            f"{path} has format {found}, and this release of halfeven reads 1 to {FORMAT}: a later one wrote it; use "
            "that one, or convert the model again"
        )
    if fault := _fault_of(manifest):
        raise DamagedFile(f"{path} is damaged: {fault}; {restored()}")
    return manifest


def restored(error: OSError | None = None) -> str:
    """The advice for a file of a version that is missing or damaged. ``error``: the error of opening the file."""
    if error is not None and error.errno in (errno.EACCES, errno.EPERM):
        return "let the user who runs this read it"
    return "where the folder is still being copied, wait; else restore the file or convert the model again"


def _fault_of(manifest: Mapping[str, Any]) -> str | None:
    """The first thing in a manifest that a conversion never writes, as a sentence; None where there is none.

    The files themselves are compared with their digests when each is read.
    """
    if manifest["status"] not in (LIVE, REFUSED):
        return f"its status is {str(manifest['status'])[:40]!r}, expected {LIVE!r} or {REFUSED!r}"
    if not all(isinstance(found, str) for found in manifest["files"].values()):
        return "a digest of a file is no text"
    if outside := [name for name in manifest["files"] if not _is_inside(name)]:
        return f"it names {outside[0][:80]!r}, which is no file of its folder"
    if manifest["digest"] != digest_of(manifest["files"]):
        return "its digest is not that of its files"
    if type(found := manifest.get("format", 1)) is not int or found < 1:
        return f"its format is {str(found)[:40]!r}, expected 1 to {FORMAT}"
    forms = manifest.get("forms", {})
    if not isinstance(forms, dict) or not all(
        isinstance(found, dict) and type(found.get("passed")) is bool for found in forms.values()
    ):
        return "its forms are not each passed or refused"
    return _fault_of_facts(manifest)


def _fault_of_facts(manifest: Mapping[str, Any]) -> str | None:
    if (half := manifest.get("half")) not in ("fp16", "bf16", None):
        return f"its half is {str(half)[:40]!r}, expected 'fp16', 'bf16' or null"
    for key, kind in _KINDS.items():
        if not isinstance(found := manifest.get(key), kind | None):
            return f"its {key} is {str(found)[:40]!r}, expected {kind.__name__} or null"
    if (around := manifest.get("around")) and not all(_are_names(around.get(key)) for key in _AROUND):
        return f"its around is without {', '.join(_AROUND)}, each a list of names"
    return None


def _are_names(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(name, str) for name in found)


def _is_inside(name: str) -> bool:
    """True for the name of a file below the manifest's folder, or of a folder in it, as `write_manifest` writes it."""
    path = PurePosixPath(name)
    plain = path.as_posix() == name != "." and "\0" not in name
    return plain and not path.is_absolute() and ".." not in path.parts


def digest_of(files: Mapping[str, str]) -> str:
    """The version's own digest: over the names and digests of its files."""
    text = "".join(f"{name}\0{sha}\n" for name, sha in files.items())
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def write_manifest(folder: Path, status: str, facts: Mapping[str, Any]) -> None:
    """Write ``manifest.json``: ``facts`` beside the digests of all files of the folder. Every file is on the disk when
    this returns, and readable for all, unless it has inputs of callers."""
    files = {
        path.relative_to(folder).as_posix(): sha256_of(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = {**facts, "format": FORMAT, "status": status, "digest": digest_of(files), "files": files}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2, allow_nan=False) + "\n")
    private = {folder / name for name in _INPUTS if (facts.get("samples") or {}).get("drifted")}
    for path in [*folder.rglob("*"), folder]:
        mode = READABLE | (0o111 if path.is_dir() else 0)  # safetensors writes for its owner alone
        path.chmod(PRIVATE if path in private else mode)
        fsync(path)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def name_in(files: Container[str], file: str) -> str:
    """The name that ``file`` has among ``files``: that of format 1 where they have it under that name alone."""
    older = _OLDER + file.removeprefix(_PRESENT) if file.startswith(_PRESENT) else file
    return older if older in files and file not in files else file


def in_present_words(facts: Any) -> Any:
    """The facts of a JSON file with today's keys. "whole" is a key of ours only beside "half": elsewhere it may be the
    name of a tensor."""
    if isinstance(facts, list):
        return [in_present_words(fact) for fact in facts]
    if not isinstance(facts, dict):
        return facts
    keys = _KEYS | ({"whole": "original"} if "half" in facts else {})
    return {keys.get(key, key): in_present_words(fact) for key, fact in facts.items()}
