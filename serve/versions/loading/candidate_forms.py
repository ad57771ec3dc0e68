"""Loads, warms up and measures the engines that may serve a version, and chooses the fastest.

On a device with memory of its own they are loaded one at a time: each is closed before the next is loaded.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ....exporters.inputs.samples import Samples
from ....models.engines.engine import Engine
from ....models.engines.faults import give_back_cached_memory
from ....models.errors import EngineFailed
from ....models.spec import ModelSpec
from ...batching.ceiling import Ceiling
from ...batching.place import Place
from ...batching.warming import warm
from .release import give_back
from .useful_rows import shortest_seconds

logger = logging.getLogger("halfeven.roster")
HALF_MUST_GAIN = 1.1  # times as fast as the best whole, or the whole serves


@dataclass(slots=True)
class Candidate:
    engine: Engine
    file: str
    seconds: float = 0.0  # for a batch of max_batch_size
    useful_rows: int = 0
    ceiling: Ceiling = field(default_factory=Ceiling)
    most_rows: int = 0  # that the device has memory for; found when it was warmed up
    load: Callable[[], Engine] | None = None  # loads the same engine again
    away: bool = False  # its engine is closed, and another may have the memory


def fastest(
    spec: ModelSpec,
    samples: Samples,
    candidates: Iterable[Candidate],
    place: Place,
    several: bool = True,
) -> tuple[Candidate, str]:
    """Measure every candidate on this device at the largest batch, where there are ``several``; a half must be faster
    by a clear margin."""
    candidates = _running(spec, samples, candidates, place, several)
    best = min(candidates, key=_handicapped)
    for other in candidates:
        if other is not best:
            close(other, place)
    if len(candidates) == 1:
        return best, "the only form there is"
    sentence = ", ".join(f"{c.engine.form} {c.engine.precision} {c.seconds * 1e3:.3g} ms" for c in candidates)
    return best, f"measured fastest here at batch {max(spec.max_batch_size, 1)}: {sentence}"


def _running(
    spec: ModelSpec, samples: Samples, candidates: Iterable[Candidate], place: Place, several: bool
) -> list[Candidate]:
    """The candidates that run here, warm and measured. One that fails is closed; where all fail, EngineFailed is
    raised. On a CPU all stay loaded and are measured twice; elsewhere each is put away before the next is loaded."""
    if place.device.type == "cpu":
        candidates = list(candidates)
        several = len(candidates) > 1
    running: list[Candidate] = []
    fault: Exception | None = None
    for candidate in candidates:
        try:
            if candidate.away:
                load_again(candidate, place)
            warm_candidate(spec, samples, candidate, place)
            if several:
                _look(spec, samples, candidate, place)
                put_away(candidate, place)
            running.append(candidate)
        except Exception as error:
            logger.exception(
                "the %s %s form does not run here", candidate.engine.form, candidate.engine.precision
            )
            close(candidate, place)
            fault = error
    if not running:
        why = fault or "there is no memory for it"
        raise EngineFailed(f"'{spec.name}' runs in no form on {place.device}: {why}") from fault
    if several and place.device.type == "cpu":
        for candidate in running:  # measure again: a disturbance of the first measurement may be over
            _look(spec, samples, candidate, place)
    return running


def _look(spec: ModelSpec, samples: Samples, candidate: Candidate, place: Place) -> None:
    """Measure the candidate, and keep the shortest of this time and those before."""
    run = partial(candidate.engine.run, batch_of(spec, samples, candidate.most_rows))
    seconds = place.call(partial(shortest_seconds, run))
    seconds *= max(spec.max_batch_size, 1) / max(candidate.most_rows, 1)
    candidate.seconds = min(candidate.seconds or seconds, seconds)


def _handicapped(candidate: Candidate) -> float:
    """The candidate's seconds, a half's raised by `HALF_MUST_GAIN`: a difference within the noise is no gain."""
    return candidate.seconds * (1.0 if candidate.engine.precision == "fp32" else HALF_MUST_GAIN)


def warm_candidate(spec: ModelSpec, samples: Samples, candidate: Candidate, place: Place) -> None:
    batches = partial(batch_of, spec, samples)
    candidate.most_rows = warm(candidate.engine, spec, batches, candidate.ceiling, place.call)


def anew(
    spec: ModelSpec, samples: Samples, chosen: Candidate, load: Callable[[], Engine], place: Place
) -> Candidate:
    """Load the chosen engine again, as if it were the only one: memory that the other engines left behind, and its own
    for batches larger than the useful one, can be half of its memory."""
    place.call(chosen.engine.close)
    give_back()
    chosen.engine = place.call(load)
    warm_useful(spec, samples, chosen, place)
    return chosen


def warm_useful(spec: ModelSpec, samples: Samples, chosen: Candidate, place: Place) -> None:
    """Warm the engine up again, with no more rows than are useful."""
    rows = min(chosen.useful_rows or chosen.most_rows, chosen.most_rows)
    few, batches = spec.with_max_batch_size(rows), partial(batch_of, spec, samples)
    warm(chosen.engine, few, batches, chosen.ceiling, place.call)


def free_memory() -> None:
    give_back()
    give_back_cached_memory()


def put_away(candidate: Candidate, place: Place) -> None:
    """Close the engine until it is needed, where another one is to have its memory."""
    if place.device.type != "cpu" and candidate.load is not None and not candidate.away:
        place.call(candidate.engine.close)
        place.call(free_memory)
        candidate.away = True


def load_again(candidate: Candidate, place: Place) -> None:
    """Load the engine of a candidate that was put away."""
    assert candidate.load is not None, "only what can be loaded again is put away"
    candidate.engine = place.call(candidate.load)
    candidate.away = False


def close(candidate: Candidate, place: Place) -> None:
    if not candidate.away:
        place.call(candidate.engine.close)


def batch_of(spec: ModelSpec, samples: Samples, rows: int) -> list[list[np.ndarray]]:
    _, arrays = next(iter(samples.batches(max(rows, 1) if spec.batched else 0, 1)))
    return [[arrays[tensor.name]] for tensor in spec.inputs]
