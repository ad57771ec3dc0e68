"""A version of small files, published without a conversion."""

from halfeven.models.store.store import LIVE, Store


def publish(store: Store, text: str) -> int:
    with store.draft("net") as draft:
        (draft.folder / "original.pt2").write_text(text)
        (draft.folder / "source").mkdir()
        (draft.folder / "source" / "model.py").write_text("# " + text)
        return draft.publish(LIVE, {}).number
