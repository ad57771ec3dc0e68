"""``halfeven init``: a model folder for a model that has none, with a model.toml to be confirmed."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from ...models.errors import BadInput, Conflict
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
    overwrite a model.toml.

    Raises Conflict where there is a model.toml, and what guessing raises.
    """
    arrays = read_tensors(samples) if samples is not None else None
    where = Path(path.partition(":")[0] if ".py:" in path else path)
    is_file = where.is_file() and ".py:" not in path
    if folder is not None and (where.is_dir() or ".py:" in path):
        raise BadInput(
            f"FOLDER {folder}: of code and of a transformers folder nothing is copied, model.toml is written beside "
            f"{where}: leave FOLDER out"
        )
    refuse_existing(folder if is_file else where if where.is_dir() else where.parent, replace)
    guess = guess_at(path, arrays)
    target = (folder or Path(guess.spec.name)) if is_file else where if where.is_dir() else where.parent
    refuse_existing(target, replace)
    target.mkdir(parents=True, exist_ok=True)
    if is_file and where.parent.resolve() != target.resolve():
        copy_model_file(where, target)
    if (laid_out := arrays if guess.samples is None else guess.samples) is not None:
        save_file({name: np.ascontiguousarray(array) for name, array in laid_out.items()}, target / SAMPLES)
    (target / TOML).write_text(guess.toml(), encoding="utf-8")
    return {
        "model": guess.spec.name,
        "folder": str(target),
        "guesses": list(guess.sentences),
        "to_confirm": guess.toml().count(f"# {CONFIRM}:"),
    }


def refuse_existing(folder: Path | None, replace: bool) -> None:
    """Raise Conflict where the folder has a model.toml, unless it may be replaced."""
    if folder is not None and (folder / TOML).exists() and not replace:
        raise Conflict(f"{folder / TOML} exists: it is not overwritten unless you say --force")


def copy_model_file(file: Path, target: Path) -> None:
    """Copy a file, and those of its external data, into a folder. Raises BadFolder where they lie elsewhere."""
    shutil.copyfile(file, target / file.name)
    if file.suffix != ".onnx":
        return
    for location, data in external_files(file, read_graph(file)).items():
        (target / location).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(data, target / location)
