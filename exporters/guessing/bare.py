"""A model that comes without a model.toml: a bare file, read as the folder that it would be."""

from dataclasses import replace
from pathlib import Path

from ...models.errors import BadFolder
from ...models.package import ModelFolder, parse_folder, read_folder
from .guess import Guess
from .onnx_file import guess_onnx

TOML = "model.toml"


def folder_at(path: Path) -> ModelFolder:
    """A model folder as its model.toml has it; of a bare ONNX file as guessed, unless a model.toml beside it names it.

    Raises BadFolder where the path is neither.
    """
    if path.is_dir() or not path.is_file():
        return read_folder(path)
    path = path.resolve()
    if (path.parent / TOML).is_file():
        beside = read_folder(path.parent)
        if beside.source == path.name:
            return beside
    guess = guess_file(path)
    folder = parse_folder(guess.toml(), path.parent / TOML)
    return replace(folder, samples=None, weights=None, guessed=guess.toml(), notes=guess.sentences)


def guess_file(path: Path) -> Guess:
    """Raises BadFolder for a kind of file that nothing is guessed of."""
    if path.suffix == ".onnx":
        return guess_onnx(path)
    raise BadFolder(
        f"{path} is no model folder and no kind of model file that is taken bare: expected a folder with a model.toml, "
        "or an ONNX file (.onnx)"
    )
