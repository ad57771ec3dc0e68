"""The files of the patches that gained, and the sentences about all that were tried."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...models.files.durable import check_new_folder
from ...models.order.one_order import SECONDS_SETTING, one_order
from ...models.store.store import Store
from ..conversion.convert import Conversion, Options
from ..guessing.bare import folder_at
from ..proof.maker import Notify
from .tried_patches import ALL, MOST, PatchTrials, TriedPatch, check_patchable


def check_patches_asked(folder: Path, target: Path, options: Options) -> None:
    """Raises before a conversion: BadInput where the model has no Python code of its own, BadSetting where ``target``
    is no new or empty folder, so that patches of two conversions are never mixed."""
    check_patchable(folder_at(folder, options.samples, options.name))
    check_new_folder("--patches", target)


def try_patches(
    folder: Path, done: Conversion, store: Store, options: Options, target: Path, notify: Notify
) -> dict[str, Any]:
    """Try the patches of a folder that was converted, and write into ``target``; gives the facts of `write_patches`."""
    with one_order() as order:
        order.published = str(done.version)
    trials = PatchTrials(folder, done, store, options, notify)
    return write_patches(trials, trials.go(), target)


def write_patches(trials: PatchTrials, tried: Iterable[TriedPatch], target: Path) -> dict[str, Any]:
    """Write each patch that counts into ``target`` as soon as it was ``tried``: the order may end before the next one.
    Gives the facts of all that were tried."""
    rows = []
    for number, patch in enumerate(tried, 1):
        file = None
        if not patch.why:
            place = patch.place.replace("/", "-").replace(":", "-")
            file = target / ("all.patch" if patch.kind == ALL else f"{number}-{patch.kind}-{place}.patch")
            try:
                target.mkdir(parents=True, exist_ok=True)
                file.write_text(_text(trials, patch), encoding="utf-8", newline="\n")
            except OSError as error:  # the version is there all the same
                patch = replace(patch, why=f"it gains, but {file} cannot be written: {error.strerror}")
                file = None
        facts = {
            name: getattr(patch, name) for name in ("kind", "place", "kept", "error_u", "moved_u", "why")
        }
        rows.append(facts | {"file": file and str(file), "sentence": _sentence(trials, patch, file)})
    left = len(trials.places) - sum(row["kind"] != ALL for row in rows)
    return {
        "kept": trials.kept,
        "nodes": trials.nodes,
        "limit_u": trials.limit_u,
        "not_tried": left,
        "tried": rows,
    }


def patch_sentences(facts: Mapping[str, Any]) -> list[str]:
    """The lines for a terminal: each patch that counts, then those without gain in one line."""
    kept, tried, left = facts["kept"], facts["tried"], facts["not_tried"]
    if not kept:
        return ["patches: no node is kept in FP32, so there is nothing to gain"]
    if not tried and not left:
        return [f"patches: no known pattern is at the lines of the {kept} nodes that are kept in FP32"]
    lost = [row["sentence"] for row in tried if not row["file"]]
    lines = [row["sentence"] for row in tried if row["file"]]
    lines += [f"tried without gain: {'; '.join(lost)}"] if lost else []
    bound = f"{MOST} are tried at most, and no more than {SECONDS_SETTING} gives time for"
    return [*lines, f"{left} more were not tried, since {bound}"] if left else lines


def _sentence(trials: PatchTrials, patch: TriedPatch, file: Path | None) -> str:
    return f"{_what(patch)} ({patch.why})" if file is None else f"{file}: {_saved(trials, patch)}"


def _what(patch: TriedPatch) -> str:
    return "all that gained, together" if patch.kind == ALL else f"{patch.kind} at {patch.place}"


def _saved(trials: PatchTrials, patch: TriedPatch) -> str:
    limit = f"of {trials.limit_u:g}u"
    return (
        f"{trials.kept} of {trials.nodes} nodes kept in FP32 become {patch.kept}; proven equal, {patch.error_u:.2g}u "
        f"{limit}; the FP32 answers move by {patch.moved_u:.2g}u {limit}"
    )


def _text(trials: PatchTrials, patch: TriedPatch) -> str:
    """The unified diff behind its comments, which `patch` and `git apply` skip."""
    lines = [
        f"# {_what(patch)}: tried in a copy of the folder of {trials.version}",
        f"# {_saved(trials, patch)}",
        "# apply in the model's folder: patch -p1 < FILE, or git apply FILE",
    ]
    for path, text in sorted(patch.texts.items()):
        before, after = trials.scripts[path].lines, text.removesuffix("\n").split("\n")
        names = f"a/{path.as_posix()}", f"b/{path.as_posix()}"
        lines += difflib.unified_diff(before, after, *names, lineterm="")
    return "".join(f"{line}\n" for line in lines)
