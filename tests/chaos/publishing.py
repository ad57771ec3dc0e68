"""A version more of a model, by a process that is no server."""

import shutil

from halfeven.models.store.store import LIVE, Store, Version


def publish_again(store: Store, name: str, as_name: str, form: str | None = None) -> Version:
    """The first version of ``name`` once more, as the next one of ``as_name``; ``form`` in its spec where given."""
    first = store.version(name, 1)
    spec = {**first.json("spec.json"), "name": as_name, **({"form": form} if form else {})}
    with store.draft(as_name) as draft:
        shutil.copytree(first.folder, draft.folder, dirs_exist_ok=True)
        (draft.folder / "manifest.json").unlink()
        draft.write_json("spec.json", spec)
        facts = {key: first.manifest[key] for key in first.manifest if key not in ("files", "digest")}
        return draft.publish(LIVE, {**facts, "model": as_name})
