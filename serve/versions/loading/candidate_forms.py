"""Loads, warms up and measures the engines that may serve a version, and chooses the fastest.

On a device with memory of its own they are loaded one at a time: each is closed before the next is loaded. On a CPU
they are loaded together and measured with batches that end soon; only the fastest is warmed up with the largest batch.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ....exporters.inputs.samples import Samples
from ....models.engines.engine import HALF_MUST_GAIN, Engine
from ....models.engines.faults import give_back_cached_memory
from ....models.errors import EngineFailed, NotReady
from ....models.spec.buckets import buckets_of
from ....models.spec.spec import ModelSpec
from ....models.store.store import Version
from ...batching.ceiling import Ceiling
from ...batching.core_wait import seconds_on_core
from ...batching.invariance import batch_invariance
from ...batching.place import Place
from ...batching.warming import warm
from .release import free_bytes, give_back, give_back_tried
from .useful_rows import AHEAD, ONE_BY_ONE, batch_sizes, measure_useful_rows, shortest_seconds

logger = logging.getLogger("halfeven.roster")
LONG_SECONDS = 0.5  # of a batch that is measured on a CPU
_LOADING_NEEDS = 2  # times the bytes of a version's files: as they are read, and as engines lay them out
NEAR = 10.0  # times the shortest measurement: no disturbance makes more of it


@dataclass(slots=True)
class CandidateForm:
    engine: Engine
    file: str
    seconds: float = 0.0  # for the batch that all candidates were measured with
    useful_rows: int = 0
    ceiling: Ceiling = field(default_factory=Ceiling)
    most_rows: int = 0  # that the device has memory for; found when it was warmed up
    load: Callable[[], Engine] | None = None  # loads the same engine again
    away: bool = False  # its engine is closed, and another may have the memory


def fastest(
    spec: ModelSpec,
    samples: Samples,
    candidates: Iterable[CandidateForm],
    place: Place,
    several: bool = True,
) -> tuple[CandidateForm, str]:
    """Measure every candidate on this device, where there are ``several``; a half must be faster by a clear margin.

    The largest batch is measured; on a CPU, where one lasts long, fewer rows of it (`_measured_rows`). Raises
    EngineFailed where no candidate runs.
    """
    rows = max(spec.max_batch_size, 1)
    if not place.apart and len(candidates := list(candidates)) > 1:
        running, rows = _measured_on_cpu(spec, samples, candidates, place)
        best = _warm_best(spec, samples, running, place)
    else:
        several = several and place.apart
        running = _running(spec, candidates, place, partial(_try_alone, spec, samples, place, several))
        best = min(running, key=_handicapped)
    for other in running:
        if other is not best:
            close(other, place)
    if len(running) == 1:
        return best, "the only form there is"
    sentence = ", ".join(f"{c.engine.form} {c.engine.precision} {c.seconds * 1e3:.3g} ms" for c in running)
    return best, f"measured fastest here at batch {rows}: {sentence}"


def _running(
    spec: ModelSpec,
    candidates: Iterable[CandidateForm],
    place: Place,
    attempt: Callable[[CandidateForm], None],
) -> list[CandidateForm]:
    """The candidates with which ``attempt`` succeeds. One that fails is closed; where all fail, EngineFailed is
    raised, and NotReady where the server is stopping."""
    running: list[CandidateForm] = []
    fault: Exception | None = None
    for candidate in candidates:
        try:
            attempt(candidate)
            running.append(candidate)
        except NotReady:  # the server is stopping
            raise
        except Exception as error:
            logger.exception(
                "the %s %s form does not run here", candidate.engine.form, candidate.engine.precision
            )
            close(candidate, place)
            fault = error
    if not running:
        why = fault or "there is no memory for it"
        raise EngineFailed(f"'{spec.name}' runs in no form on {place.device}: {why}") from fault
    return running


def _try_alone(
    spec: ModelSpec, samples: Samples, place: Place, several: bool, candidate: CandidateForm
) -> None:
    """Warm the candidate up; where there are ``several``, measure it and put it away before the next is loaded."""
    if candidate.away:
        load_again(candidate, place)
    warm_candidate(spec, samples, candidate, place)
    if several:
        _look(spec, samples, candidate, place, candidate.most_rows)
        candidate.seconds *= max(spec.max_batch_size, 1) / max(candidate.most_rows, 1)
        put_away(candidate, place)


def _measured_on_cpu(
    spec: ModelSpec, samples: Samples, candidates: Sequence[CandidateForm], place: Place
) -> tuple[list[CandidateForm], int]:
    """The candidates that run, each measured with the same number of rows, and that number. They all stay loaded.

    Only those that are near the fastest are measured again: a disturbance of the first measurement may be over.
    """
    one_row = spec.with_max_batch_size(1) if spec.batched else spec
    rows = 0

    def attempt(candidate: CandidateForm) -> None:
        nonlocal rows
        warm_candidate(one_row, samples, candidate, place)
        rows = rows or _measured_rows(spec, samples, candidate, place)
        _look(spec, samples, candidate, place, rows)

    running = _running(spec, candidates, place, attempt)
    shortest = min(candidate.seconds for candidate in running)
    for candidate in running:
        if candidate.seconds <= NEAR * shortest:
            _look(spec, samples, candidate, place, rows)
    return running, rows


def _measured_rows(spec: ModelSpec, samples: Samples, candidate: CandidateForm, place: Place) -> int:
    """The largest power of two of rows that should end within `LONG_SECONDS`, or all rows of a batch.

    A longer batch tells nothing more: its time is that of its rows.
    """
    if not spec.batched:
        return 1
    run = partial(candidate.engine.run, batch_of(spec, samples, 1))
    row_s = min(place.call(partial(seconds_on_core, run)) for _ in range(2))  # one may be disturbed
    fitting = max(int(LONG_SECONDS / max(row_s, 1e-9)), 1)
    return min(spec.max_batch_size, 1 << (fitting.bit_length() - 1))


def _warm_best(
    spec: ModelSpec, samples: Samples, running: list[CandidateForm], place: Place
) -> CandidateForm:
    """The fastest of the candidates that runs the largest batch, or as much of it as there is memory for. One that
    does not is closed and taken out of ``running``; the error of the last one is raised."""
    for best in sorted(running, key=_handicapped):
        try:
            warm_candidate(spec, samples, best, place)
            return best
        except Exception:
            close(best, place)
            running.remove(best)
            if not running:
                raise
            logger.exception("the %s %s form does not run here", best.engine.form, best.engine.precision)
    raise AssertionError("there is a candidate")


def _look(spec: ModelSpec, samples: Samples, candidate: CandidateForm, place: Place, rows: int) -> None:
    """Measure the candidate with a batch of so many rows, and keep the shortest of this time and those before."""
    run = partial(candidate.engine.run, batch_of(spec, samples, rows))
    seconds = place.call(partial(shortest_seconds, run))
    candidate.seconds = min(candidate.seconds or seconds, seconds)


def _handicapped(candidate: CandidateForm) -> float:
    """The candidate's seconds, a half's raised by `HALF_MUST_GAIN`: a difference within the noise is no gain."""
    return candidate.seconds * (1.0 if candidate.engine.precision == "fp32" else HALF_MUST_GAIN)


def warm_candidate(spec: ModelSpec, samples: Samples, candidate: CandidateForm, place: Place) -> None:
    batches = partial(batch_of, spec, samples)
    candidate.most_rows = warm(candidate.engine, spec, batches, candidate.ceiling, place.call)


def anew(
    spec: ModelSpec, samples: Samples, chosen: CandidateForm, load: Callable[[], Engine], place: Place
) -> CandidateForm:
    """Load the chosen engine again, as if it were the only one: memory that the other engines left behind, and its own
    for batches larger than the useful one, can be half of its memory."""
    place.call(chosen.engine.close)
    give_back_tried()  # the engines that were compared are this version's: a thousand models are started in linear time
    chosen.engine = place.call(load)
    warm_useful(spec, samples, chosen, place)
    return chosen


def warm_useful(spec: ModelSpec, samples: Samples, chosen: CandidateForm, place: Place) -> None:
    """Warm the engine up again, with no more rows than are useful."""
    rows = min(chosen.useful_rows or chosen.most_rows, chosen.most_rows)
    few, batches = spec.with_max_batch_size(rows), partial(batch_of, spec, samples)
    warm(chosen.engine, few, batches, chosen.ceiling, place.call)


def is_scarce(version: Version, place: Place) -> bool:
    """True where a processor has no memory for all forms of the version together, by the size of their files."""
    files = sum(path.stat().st_size for path in version.folder.iterdir() if path.is_file())
    needed, free = _LOADING_NEEDS * files, free_bytes()
    if place.device.type != "cpu" or needed <= free:
        return False
    mib = 1 << 20
    logger.warning(
        "%s: its forms need about %d MiB together and %d MiB are free, so they are compared one at a time; where the "
        "process is ended for its memory (exit code 137), raise the limit of its container or name one form in "
        "model.toml", version, needed // mib, free // mib,
    )  # fmt: skip
    return True


def free_memory() -> None:
    give_back()
    give_back_cached_memory()


def put_away(candidate: CandidateForm, place: Place) -> None:
    """Close the engine until it is needed, where another one is to have its memory."""
    if place.apart and candidate.load is not None and not candidate.away:
        place.call(candidate.engine.close)
        place.call(free_memory)
        candidate.away = True


def load_again(candidate: CandidateForm, place: Place) -> None:
    """Load the engine of a candidate that was put away."""
    assert candidate.load is not None, "only what can be loaded again is put away"
    candidate.engine = place.call(candidate.load)
    candidate.away = False


def close(candidate: CandidateForm, place: Place) -> None:
    if not candidate.away:
        place.call(candidate.engine.close)


def batch_of(spec: ModelSpec, samples: Samples, rows: int) -> list[list[np.ndarray]]:
    _, arrays = next(iter(samples.batches(max(rows, 1) if spec.batched else 0, 1)))
    return [[arrays[tensor.name]] for tensor in spec.inputs]


def useful_rows_of(spec: ModelSpec, samples: Samples, chosen: CandidateForm, place: Place) -> int:
    """`PreparedVersion.useful_rows`, measured in less than a second. 0, not measured, after an error: only speed
    depends on it."""

    def run_seconds(rows: int) -> float:
        run = partial(chosen.engine.run, batch_of(spec, samples, rows))
        return place.call(partial(shortest_seconds, run))

    engine = chosen.engine
    ahead = engine.device == "cpu" and engine.in_flight > 1
    try:
        return measure_useful_rows(run_seconds, chosen.most_rows, worth=AHEAD if ahead else ONE_BY_ONE)
    except Exception:
        logger.exception("the useful batch of '%s' could not be measured", spec.name)
        return 0


def invariance_of(spec: ModelSpec, samples: Samples, engine: Engine, most: int, place: Place) -> str:
    """`PreparedVersion.invariance` for batches of up to ``most`` rows, measured in a fraction of a second; empty after
    an error: no answer depends on it."""
    sizes = buckets_of(spec, engine.device) or batch_sizes(max(most, 1))
    try:
        return batch_invariance(
            spec,
            lambda parts: place.call(partial(engine.run, parts)),
            partial(batch_of, spec, samples),
            [rows for rows in sizes if rows <= most],
            engine.precision,
        )
    except Exception:
        logger.exception("the batch invariance of '%s' could not be measured", spec.name)
        return ""
