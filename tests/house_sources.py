"""The files of the package by their names as modules."""

from pathlib import Path

ROOMS = ("models", "exporters", "serve")  # each may import itself and those before it
Name = tuple[str, ...]  # a module's place in the package: ("models", "spec"); the root door is ()


def sources(root: Path) -> dict[Name, Path]:
    """Every module of the three rooms and the root door; a package's door has the package's name."""
    files = [root / "__init__.py", *(file for room in ROOMS for file in sorted((root / room).rglob("*.py")))]
    return {_name(file.relative_to(root)): file for file in files}


def _name(file: Path) -> Name:
    return file.parent.parts if file.name == "__init__.py" else (*file.parent.parts, file.stem)
