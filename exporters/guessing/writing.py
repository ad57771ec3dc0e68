"""``halfeven init``: a model folder for a model that has none, with a model.toml to be confirmed."""

import filecmp
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from ...models.errors import BadInput, BadSamples, Conflict
from ...models.files.tensor_file import save_tensors
from ..inputs.samples import read_tensors
from ..onnx.reading.bounded_file import external_files, read_graph
from .bare import TOML, guess_at
from .guess import CONFIRM

SAMPLES = "samples.safetensors"


def write_folder(
    path: str, folder: Path | None = None, samples: Path | None = None, replace: bool = False
) -> Mapping[str, Any]:
    """Write model.toml for ``path``: a file (``.onnx``, ``.pt2``), a transformers folder, or ``file.py:function``.

    A file is copied into ``folder`` (without it: a new folder of the model's name in the working directory), with its
    external data; of a transformers folder and a module model.toml is written beside it. ``samples``: real inputs,
    written into the folder; a module needs them, and an ONNX file or transformers model is run with them. ``replace``:
    overwrite files that are there.

    Raises Conflict as `filled_folder` does, and what guessing raises.
    """
    arrays = read_tensors(samples) if samples is not None else None
    where = Path(path.partition(":")[0] if ".py:" in path else path)
    is_file = where.is_file() and ".py:" not in path
    if folder is not None and (where.is_dir() or ".py:" in path):
        raise BadInput(
            f"FOLDER {folder}: of code and of a transformers folder nothing is copied, model.toml is written beside "
            f"{where}: leave FOLDER out"
        )
    beside = where if where.is_dir() else where.parent
    known = folder if is_file else beside
    # A folder that is refused in any case is refused before the work.
    if known is not None and not replace:
        _refuse([known / TOML])
    guess = guess_at(path, arrays)
    target = (folder or Path(guess.spec.name)) if is_file else beside
    with filled_folder(target, replace) as filled:
        if is_file and where.parent.resolve() != target.resolve():
            copy_model_file(where, filled)
        if (laid_out := arrays if guess.samples is None else guess.samples) is not None:
            own = {name: np.ascontiguousarray(array) for name, array in laid_out.items()}
            save_tensors(filled / SAMPLES, own)
        (filled / TOML).write_text(guess.toml(), encoding="utf-8")
    return {
        "model": guess.spec.name,
        "folder": str(target),
        "guesses": list(guess.sentences),
        "to_confirm": guess.toml().count(f"# {CONFIRM}:"),
    }


@contextmanager
def filled_folder(target: Path, replace: bool) -> Iterator[Path]:
    """A folder to fill, whose files are put into ``target`` at the end; nothing is put there where filling raises.

    Raises Conflict where the target has a model.toml, or another of the files with other content, unless ``replace``.
    """
    missing = [place for place in (target, *target.parents) if not place.exists()]
    target.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".halfeven-", dir=target) as name:
            filled = Path(name) / "model"
            filled.mkdir()
            yield filled
            moves = _moves(filled, target)
            if not replace:
                _refuse([goal for _, goal in moves])
            for place, goal in moves:
                goal.parent.mkdir(parents=True, exist_ok=True)
                place.replace(goal)
    finally:
        for place in missing:  # rmdir removes those that are still empty
            with suppress(OSError):
                place.rmdir()


def _moves(filled: Path, target: Path) -> list[tuple[Path, Path]]:
    """The files to be put into the target, each with its place there; not those that it has already. A model.toml is
    always one of them. Raises Conflict for a folder where a file is to be, and the reverse."""
    pairs = [(place, target / place.relative_to(filled)) for place in sorted(filled.rglob("*"))]
    for place, goal in pairs:
        if os.path.lexists(goal) and goal.is_dir() != place.is_dir():
            kind = "folder" if place.is_dir() else "file"
            raise Conflict(f"{goal} is in the way of a {kind} that is to be written: move it elsewhere")
    return [pair for pair in pairs if pair[0].is_file() and (pair[0].name == TOML or not _equal(*pair))]


def _equal(new: Path, there: Path) -> bool:
    """True if both files have the same bytes, or both are samples and have the same tensors."""
    if there.is_file() and filecmp.cmp(new, there, shallow=False):
        return True
    if new.name != SAMPLES:
        return False
    try:
        others, own = read_tensors(there), read_tensors(new)
    except BadSamples:  # there is none, or no samples are in it
        return False
    return own.keys() == others.keys() and all(
        (one.dtype, one.shape) == (others[name].dtype, others[name].shape)
        and one.tobytes() == others[name].tobytes()
        for name, one in own.items()
    )


def _refuse(files: list[Path]) -> None:
    """Raises Conflict where one of the files exists."""
    if there := [file for file in files if os.path.lexists(file)]:
        which = str(there[0]) + (f" (and {len(there) - 1} other files)" if there[1:] else "")
        raise Conflict(f"{which} exists: it is not overwritten unless you say --force")


def copy_model_file(file: Path, target: Path, name: str | None = None) -> None:
    """Copy a file, as ``name`` where that is given, and the files of its external data, into a folder. Raises BadFolder
    where they lie elsewhere."""
    name = name or file.name
    shutil.copyfile(file, target / name)
    if not name.endswith(".onnx"):
        return
    for location, data in external_files(file, read_graph(file)).items():
        (target / location).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(data, target / location)
