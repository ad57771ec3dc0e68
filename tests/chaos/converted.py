"""A store with two models, of which one has two versions with both halves: converted once, copied by every test."""

import shutil
from pathlib import Path

import numpy as np
from halfeven.exporters.convert import Options, convert
from halfeven.models.store import Store

from tests.kept import kept_store
from tests.model_folders import samples_of, write_folder


def converted() -> Path:
    """The folder of the store: ``net`` with the versions 1 and 2 (active), ``other`` with 1. Not to be changed."""

    def make(folder: Path) -> None:
        store = Store(folder / "store")
        net = write_folder(folder / "net", samples=samples_of({"x": (4,)}, 32), max_batch_size=8)
        assert convert(net, store, Options(forms=("torch", "onnx"))).asked_passed
        for name in ("net", "other"):  # a conversion takes seconds, and these tests need none of their own
            _publish_again(store, name)

    return kept_store(__file__, make) / "store"


def _publish_again(store: Store, name: str) -> None:
    first = store.version("net", 1)
    with store.draft(name) as draft:
        shutil.copytree(first.folder, draft.folder, dirs_exist_ok=True)
        (draft.folder / "manifest.json").unlink()
        draft.write_json("spec.json", {**first.json("spec.json"), "name": name})
        facts = {**first.manifest, "model": name}
        store.promote(
            draft.publish("live", {key: facts[key] for key in facts if key not in ("files", "digest")})
        )


def copied(folder: Path) -> Store:
    """A copy of the store in ``folder``."""
    shutil.copytree(converted(), folder / "store")
    return Store(folder / "store")


def rows_of(number: float) -> dict[str, np.ndarray]:
    return {"x": np.full((1, 4), number, np.float32)}
