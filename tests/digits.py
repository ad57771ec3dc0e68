"""The zoo's digits as several tests serve them, converted once for all of them and for later runs."""

import shutil
from pathlib import Path

from halfeven.exporters.conversion.convert import Options, convert
from halfeven.models.store.store import Store
from halfeven.models.zoo import zoo_folder

from tests.kept import kept_store

OF_NO_HALF = "\n[parity]\nmax_error_u = 0.0001\n"  # an overridden limit that no half can meet


def digits_of_either_form() -> Path:
    """A store to be copied: version 1 is proven in both forms, version 2 refused. Measurement chooses the form."""
    return kept_store(__file__, _either_form) / "store"


def digits_that_ask_for_torch() -> Path:
    """A store to be copied with three versions, all asking for the torch half: at O1 in both forms, which is active; at
    O3; and a refused one."""
    return kept_store(__file__, _torch) / "store"


def _either_form(where: Path) -> None:
    folder, store = _folder(where), Store(where / "store")
    assert convert(folder, store).asked_passed
    with (folder / "model.toml").open("a") as toml:
        toml.write(OF_NO_HALF)
    assert not convert(folder, store).any_passed


def _torch(where: Path) -> None:
    folder, store = _folder(where), Store(where / "store")
    toml = (folder / "model.toml").read_text().replace('form = "auto"', 'form = "torch"')
    (folder / "model.toml").write_text(toml)
    first = convert(folder, store)
    assert first.asked_passed
    assert convert(folder, store, Options(forms=("torch",), level="O3")).asked_passed
    (folder / "model.toml").write_text(toml + OF_NO_HALF)
    assert not convert(folder, store, Options(forms=("torch",))).any_passed
    store.promote(first.version)


def _folder(where: Path) -> Path:
    return Path(shutil.copytree(zoo_folder("digits"), where / "digits"))
