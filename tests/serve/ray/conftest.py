"""A store with two versions of a half, the first one active."""

from pathlib import Path

import pytest
from halfeven.exporters.conversion.convert import Options, convert
from halfeven.models.store.store import Store

from tests.kept import kept_store
from tests.model_folders import LINEAR, samples_of, write_folder
from tests.server_process import settle

SEEDS = {1: 5, 2: 6}  # of the weights, by version


@pytest.fixture(scope="session")
def converted() -> Path:
    """A folder with a store of converted models, which tests copy."""

    def make(folder: Path) -> None:
        store = Store(folder / "store")
        for seed in SEEDS.values():
            code = LINEAR.replace("manual_seed(5)", f"manual_seed({seed})")
            settings = {"form": "torch", "precision": {"level": "O2"}, "max_batch_size": 8}
            samples = samples_of({"x": [4]}, 16, seed=1)
            convert(
                write_folder(folder / "net", code, samples=samples, **settings),
                store,
                Options(forms=("torch",)),
            )
        store.promote(store.version("net", 1))
        settle(store)

    return kept_store(__file__, make) / "store"
