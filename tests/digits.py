"""The zoo's digits as several tests serve them, converted once for all of them and for later runs."""

import shutil
from pathlib import Path

from halfeven.exporters.conversion.convert import Options, convert
from halfeven.models.store.store import Store
from halfeven.models.zoo import zoo_folder

from tests.kept import kept_store


def digits_that_ask_for_torch() -> Path:
    """A store to be copied with three versions, all asking for the torch half: at O1 in both forms, which is active; at
    O3; and a refused one."""
    return kept_store(__file__, _convert) / "store"


def _convert(where: Path) -> None:
    folder, store = Path(shutil.copytree(zoo_folder("digits"), where / "digits")), Store(where / "store")
    toml = (folder / "model.toml").read_text().replace('form = "auto"', 'form = "torch"')
    (folder / "model.toml").write_text(toml)
    first = convert(folder, store)
    assert first.asked_passed
    assert convert(folder, store, Options(forms=("torch",), level="O3")).asked_passed
    # No half can meet this limit.
    (folder / "model.toml").write_text(toml + "\n[parity]\nmax_error_u = 0.0001\n")
    assert not convert(folder, store, Options(forms=("torch",))).any_passed
    store.promote(first.version)
