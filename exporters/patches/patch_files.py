"""The files of the patches that gained, and the sentences about all that were tried."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...models.errors import BadSetting
from ...models.store.store import Store
from ..conversion.convert import Conversion, Options
from ..guessing.bare import folder_at
from ..proof.maker import Notify
from .tried_patches import MOST, PatchTrials, TriedPatch, check_patchable


def check_patches_asked(folder: Path, target: Path, options: Options) -> None:
    """Raises before a conversion: BadInput where the model has no Python code of its own, BadSetting where ``target``
    is no new or empty folder, so that patches of two conversions are never mixed."""
    check_patchable(folder_at(folder, options.samples, options.name))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BadSetting(f"--patches {target}: expected a folder that is new or empty")


def write_patches(
    folder: Path, target: Path, done: Conversion, store: Store, options: Options, notify: Notify
) -> dict[str, Any]:
    """Try the patches of a converted folder and write those that count into ``target``. Gives the facts."""
    trials = PatchTrials(folder_at(folder, options.samples, options.name), done, store, options, notify)
    rows = []
    for number, patch in enumerate(trials.go(), 1):
        row = patch.to_json() | {"file": None}
        if not patch.why:
            target.mkdir(parents=True, exist_ok=True)
            name = "all" if patch.kind == "all" else f"{number}-{patch.kind}-{_flat(patch.place)}"
            path = target / f"{name}.patch"
            path.write_text(_text(trials, patch), encoding="utf-8", newline="\n")
            row["file"] = str(path)
        rows.append(row | {"sentence": _sentence(trials, patch, row["file"])})
    return {
        "kept": trials.kept,
        "nodes": trials.nodes,
        "limit_u": trials.limit_u,
        "not_tried": max(len(trials.places) - MOST, 0),
        "tried": rows,
    }


def patch_sentences(facts: Mapping[str, Any]) -> list[str]:
    """The lines for a terminal: each patch that counts, then those without gain in one line."""
    kept, tried, left = facts["kept"], facts["tried"], facts["not_tried"]
    if not kept:
        return ["patches: no node is kept in FP32, so there is nothing to gain"]
    if not tried:
        return [f"patches: no known pattern is at the lines of the {kept} nodes that are kept in FP32"]
    lost = [row["sentence"] for row in tried if not row["file"]]
    lines = [row["sentence"] for row in tried if row["file"]]
    lines += [f"tried without gain: {'; '.join(lost)}"] if lost else []
    return [*lines, f"{left} more were not tried, since {MOST} are tried at most"] if left else lines


def _sentence(trials: PatchTrials, patch: TriedPatch, file: str | None) -> str:
    what = f"{patch.kind} at {patch.place}" if patch.place else "all of them together"
    return f"{what} ({patch.why})" if file is None else f"{file}: {_saved(trials, patch)}"


def _saved(trials: PatchTrials, patch: TriedPatch) -> str:
    limit = f"of {trials.limit_u:g}u"
    return (
        f"{trials.kept} of {trials.nodes} nodes kept in FP32 become {patch.kept}; proven equal, {patch.error_u:.2g}u "
        f"{limit}; the FP32 answers move by {patch.moved_u:.2g}u {limit}"
    )


def _text(trials: PatchTrials, patch: TriedPatch) -> str:
    """The unified diff behind its comments, which `patch` and `git apply` skip."""
    what = f"{patch.kind} at {patch.place}" if patch.place else "all patches that gained alone, together"
    lines = [
        f"# {what}, tried in a copy of the folder of {trials.version}",
        f"# {_saved(trials, patch)}",
        "# apply in the model's folder: patch -p1 < FILE, or git apply FILE",
    ]
    for path, text in sorted(patch.texts.items()):
        before = trials.scripts[path].lines
        diff = difflib.unified_diff(
            before,
            text.removesuffix("\n").split("\n"),
            f"a/{path.as_posix()}",
            f"b/{path.as_posix()}",
            lineterm="",
        )
        lines += diff
    return "".join(f"{line}\n" for line in lines)


def _flat(place: str) -> str:
    """The place as a part of a file's name."""
    return place.replace("/", "-").replace(":", "-")
