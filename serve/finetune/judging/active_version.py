"""The version that is active when a job is judged: the sets of samples that judge the job, and its answers to them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ....exporters.inputs.samples import Samples
from ....exporters.proof.prove import Answers, answers_of
from ....models.spec.spec import ModelSpec
from ....models.store.store import Store, Version
from ...batching.place import Place
from ...versions.roster import Roster
from .gate import predictions
from .judging_sets import sets_of


@dataclass(frozen=True, slots=True)
class MeasuredActive:
    """``predictions``: what the active version answers, as ``set:output``."""

    version: Version
    sets: Mapping[str, Samples]
    predictions: Mapping[str, np.ndarray]


class ActiveVersion:
    """Asks the version that serves, on the device thread, as any request does."""

    def __init__(self, store: Store, roster: Roster, place: Place) -> None:
        self._store, self._roster, self._place = store, roster, place

    def of(self, name: str) -> Version:
        """The version that serves now; of a name without an alias, the one whose FP32 original serves."""
        return self._store.version(name, int(self._roster.find(name).prepared.version))

    def measured(self, name: str, held_out: Samples, metrics: Sequence[str]) -> MeasuredActive:
        """The active version's answers to the held-out rows, and to its own judging samples."""
        while True:
            prepared = self._roster.find(name).prepared
            version = self._store.version(name, int(prepared.version))
            spec, sets = version.spec(), sets_of(version, held_out)
            answers = partial(_on_thread, self._place, answers_of(spec, prepared.engine))
            try:
                found = {place: predictions(spec, answers, each, metrics) for place, each in sets.items()}
            except Exception:
                if self._roster.find(name).prepared is prepared:
                    raise
                continue  # the version was replaced and closed meanwhile: find the active one again
            named = {
                f"{place}:{output}": array for place, each in found.items() for output, array in each.items()
            }
            return MeasuredActive(version, sets, named)


def same_signature(one: ModelSpec, other: ModelSpec) -> bool:
    """True if two models take the same rows, and their answers can be compared."""
    first, second = (
        [
            (tensor.name, tensor.datatype, tensor.shape, tensor.kind)
            for tensor in (*spec.inputs, *spec.outputs)
        ]
        for spec in (one, other)
    )
    return first == second


def _on_thread(place: Place, answers: Answers, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    call: Callable[[], dict[str, np.ndarray]] = partial(answers, inputs)
    return place.call(call)
