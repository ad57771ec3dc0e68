"""The server's answer to "is it ready?" and "which models are there?". A fault of one model is that model's: the others
serve, and the server is ready.

The rule: every model that was ready at the start, or was named by ``--require``, is ready. Where the store had models
at the start and none of them could be made ready, the server is not ready until one is. Models that were unloaded by
an order, or deleted from the store, do not count; a required one does, wherever it is.
"""

from collections.abc import Callable, Collection, Iterable, Mapping

from ..batching.interface import IndexEntry
from .model_faults import AGAIN, Faults
from .traffic.served import ServedModel

NOT_THERE = (
    "it is not in the store: convert it into the store or copy it there, or start without --require for it"
)


class Readiness:
    """``required``: the models that must be ready."""

    def __init__(self, required: Iterable[str] = ()) -> None:
        self._required = tuple(dict.fromkeys(required))
        self._ready_at_start: set[str] = set()
        self._failed_at_start: set[str] = set()

    def started(self, there: Collection[str], ready: Collection[str]) -> None:
        """The models that were in the store at the start have been tried; ``ready`` are served."""
        self._ready_at_start, self._failed_at_start = set(ready), set(there) - set(ready)

    def forget(self, name: str) -> None:
        """The model was deleted from the store."""
        self._ready_at_start.discard(name)
        self._failed_at_start.discard(name)

    def missing(self, ready: Collection[str], unloaded: Collection[str]) -> list[str]:
        """The models for want of which the server is not ready."""
        wanted = dict.fromkeys((*self._required, *sorted(self._ready_at_start)))
        missing = [name for name in wanted if name not in ready and name not in unloaded]
        if missing or ready or self._ready_at_start:
            return missing
        return sorted(self._failed_at_start.difference(unloaded))


def reasons_of(
    missing: Iterable[str], faults: Faults, knows: Callable[[str], bool], reaches: Callable[[str], bool]
) -> list[str]:
    """The reasons why the missing models are not served, a sentence each. ``knows``: whether the store has the model;
    ``reaches``: whether the reader may know of it."""
    reasons = list[str]()
    for name in missing:
        if not reaches(name):
            continue
        fault = faults.of(name)
        why = f"{fault}; {AGAIN}" if fault else "it is being made ready" if knows(name) else NOT_THERE
        reasons.append(f"model '{name}' is not served: {why}")
    hidden = any(not reaches(name) for name in missing)
    return [*reasons, "a model that this key is not for is not served"] if hidden else reasons


def index_of(
    names: Iterable[str],
    served: Mapping[str, ServedModel],
    loading: Mapping[str, int],
    seen: Mapping[str, tuple[int | None, int]],
    unloaded: Collection[str],
    faults: Faults,
) -> list[IndexEntry]:
    """The entries of all ``names``. ``loading``: the version that is being loaded; ``seen``: the alias's version and
    the newest one, as they were looked at last."""
    found: list[IndexEntry] = []
    for name in names:
        model, being_loaded = served.get(name), loading.get(name)
        loaded = sorted(one.number for one in model.loaded_versions()) if model is not None else []
        found += [(name, str(number), "READY", "") for number in loaded]
        if being_loaded is not None and being_loaded not in loaded:
            found.append((name, str(being_loaded), "LOADING", ""))
        elif model is None:
            live, _ = seen.get(name, (None, 0))
            why = "unloaded" if name in unloaded else faults.of(name) or "not looked at yet"
            found.append((name, "" if live is None else str(live), "UNAVAILABLE", why))
    return found
