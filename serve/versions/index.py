"""The index of the repository: every version that is loaded, being loaded, or wanted and not available."""

from collections.abc import Collection, Iterable, Mapping

from ..batching.interface import IndexEntry
from .model_faults import Faults
from .traffic.served import ServedModel


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
