"""A store with two models, of which one has two versions with both halves: converted once, copied by every test."""

import shutil
from pathlib import Path

from halfeven.exporters.conversion.convert import Options, convert
from halfeven.models.store.store import Store

from tests.chaos.publishing import publish_again
from tests.kept import kept_store
from tests.model_folders import samples_of, tensor, write_folder


def converted() -> Path:
    """The store's folder: ``net`` with versions 1 and 2 (active), whose half serves in torch; ``other`` with 1. Read
    only."""

    def make(folder: Path) -> None:
        store = Store(folder / "store")
        samples = samples_of({"x": (4,)}, 32)
        outputs = [tensor("y", "FP32", [-1, 3], kind="logits")]
        net = write_folder(folder / "net", outputs=outputs, samples=samples, max_batch_size=8, form="torch")
        assert convert(net, store, Options(forms=("torch", "onnx"))).asked_passed
        # A conversion takes seconds, and these tests need none of their own.
        store.promote(publish_again(store, "net", "net"))
        store.promote(publish_again(store, "net", "other", form="auto"))

    return kept_store(__file__, make) / "store"


def copied(folder: Path) -> Store:
    """A copy of the store in ``folder``."""
    shutil.copytree(converted(), folder / "store")
    return Store(folder / "store")
