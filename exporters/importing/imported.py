"""The results of `halfeven import`: a written model folder, or a refusal, for each model of the other server.

The files of such a model lie in the folder that was given to import, also where links lead.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...models.errors import BadFolder, HalfevenError, TooLarge
from ...models.files.opened_file import OpenedFile, opened_inside
from ...models.folder.package import read_folder
from ..guessing.bare import TOML
from ..guessing.guess import Guess

LEFT = "not taken over: "


@dataclass(frozen=True, slots=True)
class Written:
    """A model folder that the import wrote. ``origin``: the file or folder that it was made from. ``left``: one
    sentence for each setting that was not taken over; ``notes``: further sentences for the operator."""

    guess: Guess
    origin: str
    folder: Path
    left: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def lines(self) -> Iterator[str]:
        """Lines for a terminal: the inputs and outputs, the guesses to confirm, and the settings not taken over."""
        yield f"{self.guess.spec.name}: {self.origin} → {self.folder}"
        yield from (f"  {line}" for line in self.guess.signature)
        yield from (f"  to confirm: {line}" for line in self.guess.reasons)
        yield from (f"  {line}" for line in (*self.guess.notes, *self.notes))
        yield from (f"  {LEFT}{line}" for line in self.left)

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.guess.spec.name,
            "from": self.origin,
            "folder": str(self.folder),
            "to_confirm": list(self.guess.reasons),
            "notes": [*self.guess.notes, *self.notes],
            "not_taken_over": list(self.left),
        }


@dataclass(frozen=True, slots=True)
class Refusal:
    """A model of the other server that was not imported, with the error that says why."""

    name: str
    error: HalfevenError | OSError


def write_toml(guess: Guess, left: Sequence[str], folder: Path) -> None:
    """Write model.toml into a folder that has the files which the guess names; ``left`` becomes comments.

    Raises BadFolder where the folder cannot be read as a model folder then.
    """
    notes = (*guess.notes, *(f"{LEFT}{line}" for line in left))
    (folder / TOML).write_text(replace(guess, notes=notes).toml(), encoding="utf-8")
    try:
        read_folder(folder)
    except BadFolder as error:
        said = str(error).replace(f"{folder.resolve()}/", "")
        raise BadFolder(f"the model folder that would be written cannot be read: {said}") from error


def foreign_file(folder: Path, path: Path, what: str) -> OpenedFile:
    """A file of another server's model. Raises BadFolder for one that is not there, is no regular one, or lies outside
    of ``folder``."""
    try:
        return opened_inside(folder, path)
    except OSError as error:
        raise BadFolder(
            f"{path} cannot be taken ({error.strerror}): expected {what}, a regular file inside {folder}"
        ) from error


def foreign_bytes(folder: Path, path: Path, most_bytes: int, what: str) -> bytes:
    """All bytes of a file. Raises BadFolder as `foreign_file`, TooLarge beyond ``most_bytes``."""
    with foreign_file(folder, path, what) as opened:
        data = opened.handle.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise TooLarge(f"{path} is larger than {most_bytes} bytes: expected {what}")
    return data


def foreign_text(folder: Path, path: Path, most_bytes: int, what: str) -> str:
    """The text of a file. Raises as `foreign_bytes`, BadFolder where it is not UTF-8."""
    try:
        return foreign_bytes(folder, path, most_bytes, what).decode()
    except UnicodeDecodeError as error:
        raise BadFolder(f"{path} is not UTF-8 text ({error})") from error
