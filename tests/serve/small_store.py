"""A small model that tests load, choose and tune, converted once for all of them and for later runs."""

from pathlib import Path

from halfeven.exporters.conversion.convert import convert
from halfeven.models.store.store import Store

from tests.kept import kept_store
from tests.model_folders import write_folder


def net_of_either_form() -> Path:
    """A store to be copied: version 1 is proven in both forms, version 2 refused. Measurement chooses the form."""
    return kept_store(__file__, _convert) / "store"


def _convert(where: Path) -> None:
    store = Store(where / "store")
    assert convert(write_folder(where / "net"), store).asked_passed
    no_half_can_meet = {"max_error_u": 0.0001}  # an overridden limit
    assert not convert(write_folder(where / "net", parity=no_half_can_meet), store).any_passed
