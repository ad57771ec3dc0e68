"""The zoo: model folders that ship with halfeven. ``zoo_folder("digits")`` is one to convert."""

from pathlib import Path


def zoo_folder(name: str) -> Path:
    """The shipped model folder of that name (the layout of a model folder: ``model.toml`` and beside it)."""
    return Path(__file__).parent / name
