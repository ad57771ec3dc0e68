"""A version of one store, copied into another one."""

import shutil

from .store import Store, Version


def copied_version(version: Version, store: Store) -> Version:
    """A copy of ``version`` in ``store`` under the next number: its facts, and its files, each compared with its
    digest. The copy is not made active."""
    with store.draft(version.name) as draft:
        for file in version.manifest["files"]:
            target = draft.folder / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(version.file(file), target)
        return draft.publish(version.status, version.manifest)
