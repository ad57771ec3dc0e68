"""Which version of a model in the store is to be served, before any order about traffic."""

from ...models.store import Store, Version


def wanted_version(store: Store, name: str, live: int | None, serves: bool) -> Version | None:
    """The live version; while there is none and nothing ``serves``, the newest one whose half was refused: its FP32
    original serves.

    A version whose weights a gate refused, or that waits for its promotion, never serves, in no precision.
    """
    if live is not None:
        return store.named_by_alias(name, live)
    if serves:
        return None
    for number in reversed(store.numbers(name)):
        version = store.version(name, number)
        gate = version.manifest.get("gate")
        if not version.awaits_promotion and (gate is None or gate["passed"]):
            return version
    return None
