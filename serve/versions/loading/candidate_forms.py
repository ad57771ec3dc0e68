"""Loads, warms up and measures the engines that may serve a version, and chooses the fastest.

On a device with memory of its own they are loaded one at a time: each is closed before the next is loaded. On a CPU
they are loaded together and measured with batches that end soon; only the fastest is warmed up with the largest batch.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from ....exporters.inputs.samples import Samples, stored_samples
from ....models.engines.cpu.setup import PLAIN, CpuSetup
from ....models.engines.engine import HALF_MUST_GAIN, Engine
from ....models.engines.faults import give_back_cached_memory
from ....models.engines.load import load_half, load_original
from ....models.errors import EngineFailed, NotReady
from ....models.machine.control_groups import free_bytes
from ....models.machine.core_wait import Crowding, seconds_on_core
from ....models.spec.buckets import buckets_of
from ....models.spec.spec import ModelSpec
from ....models.store.store import Version
from ...batching.ceiling import Ceiling
from ...batching.place import Place
from .cpu_choice import CROWDED
from .invariance import batch_invariance
from .release import give_back, give_back_tried
from .useful_rows import AHEAD, ONE_BY_ONE, batch_sizes, measure_useful_rows, shortest_seconds
from .warming import warm

logger = logging.getLogger("halfeven.roster")
LONG_SECONDS = 0.5  # of a batch that is measured on a CPU
_LOADING_NEEDS = 2  # times the bytes of a version's files: as they are read, and as engines lay them out
_DOES_NOT_RUN = "the %s %s form does not run here"
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


@dataclass(frozen=True)
class ModelHere:
    """A model whose forms are loaded, warmed up and measured at one place. ``samples`` are what they run."""

    spec: ModelSpec
    samples: Samples
    place: Place

    def batch(self, rows: int) -> list[list[np.ndarray]]:
        """A batch of so many samples, as engines take it."""
        _, arrays = next(iter(self.samples.batches(max(rows, 1) if self.spec.batched else 0, 1)))
        return [[arrays[tensor.name]] for tensor in self.spec.inputs]

    def fastest(self, candidates: Iterable[CandidateForm], several: bool = True) -> tuple[CandidateForm, str]:
        """Measure every candidate on this device, where there are ``several``; a half must be faster by a clear margin.

        The largest batch is measured; on a CPU, where one lasts long, fewer rows of it (`_measured_rows`). Raises
        EngineFailed where no candidate runs.
        """
        rows = max(self.spec.max_batch_size, 1)
        if not self.place.apart and len(candidates := list(candidates)) > 1:
            running, rows = self._measured_on_cpu(candidates)
            best = self._warm_best(running)
        else:
            running = self._running(candidates, partial(self._try_alone, several and self.place.apart))
            best = min(running, key=_handicapped)
        for other in running:
            if other is not best:
                self.close(other)
        if len(running) == 1:
            return best, "the only form there is"
        sentence = ", ".join(
            f"{c.engine.form} {c.engine.precision} {c.seconds * 1e3:.3g} ms" for c in running
        )
        return best, f"measured fastest here at batch {rows}: {sentence}"

    def _running(
        self, candidates: Iterable[CandidateForm], attempt: Callable[[CandidateForm], None]
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
                logger.exception(_DOES_NOT_RUN, candidate.engine.form, candidate.engine.precision)
                self.close(candidate)
                fault = error
        if not running:
            why = fault or "there is no memory for it"
            raise EngineFailed(f"'{self.spec.name}' runs in no form on {self.place.device}: {why}") from fault
        return running

    def _try_alone(self, several: bool, candidate: CandidateForm) -> None:
        """Warm the candidate up; where there are ``several``, measure it and put it away before the next is loaded."""
        if candidate.away:
            self.load_again(candidate)
        self.warm(candidate)
        if several:
            self._look(candidate, candidate.most_rows)
            candidate.seconds *= max(self.spec.max_batch_size, 1) / max(candidate.most_rows, 1)
            self.put_away(candidate)

    def _measured_on_cpu(self, candidates: Sequence[CandidateForm]) -> tuple[list[CandidateForm], int]:
        """The candidates that run, each measured with the same number of rows, and that number. They all stay loaded.

        Only those that are near the fastest are measured again: a disturbance of the first measurement may be over.
        """
        one_row = replace(self, spec=self.spec.with_max_batch_size(1)) if self.spec.batched else self
        rows = 0

        def attempt(candidate: CandidateForm) -> None:
            nonlocal rows
            one_row.warm(candidate)
            rows = rows or self._measured_rows(candidate)
            self._look(candidate, rows)

        running = self._running(candidates, attempt)
        shortest = min(candidate.seconds for candidate in running)
        for candidate in running:
            if candidate.seconds <= NEAR * shortest:
                self._look(candidate, rows)
        return running, rows

    def _measured_rows(self, candidate: CandidateForm) -> int:
        """The largest power of two of rows that should end within `LONG_SECONDS`, or all rows of a batch.

        A longer batch tells nothing more: its time is that of its rows.
        """
        if not self.spec.batched:
            return 1
        run = partial(candidate.engine.run, self.batch(1))
        row_s = min(self.place.call(partial(seconds_on_core, run)) for _ in range(2))  # one may be disturbed
        fitting = max(int(LONG_SECONDS / max(row_s, 1e-9)), 1)
        return min(self.spec.max_batch_size, 1 << (fitting.bit_length() - 1))

    def _warm_best(self, running: list[CandidateForm]) -> CandidateForm:
        """The fastest of the candidates that runs the largest batch, or as much of it as there is memory for. One that
        does not is closed and taken out of ``running``; the error of the last one is raised."""
        for best in sorted(running, key=_handicapped):
            try:
                self.warm(best)
                return best
            except NotReady:  # the server is stopping
                raise
            except Exception:
                self.close(best)
                running.remove(best)
                if not running:
                    raise
                logger.exception(_DOES_NOT_RUN, best.engine.form, best.engine.precision)
        raise AssertionError("there is a candidate")

    def _look(self, candidate: CandidateForm, rows: int) -> None:
        """Measure the candidate with a batch of so many rows, and keep the shortest of this time and those before."""
        seconds = self._seconds(candidate.engine, rows)
        candidate.seconds = min(candidate.seconds or seconds, seconds)

    def _seconds(self, engine: Engine, rows: int) -> float:
        return self.place.call(partial(shortest_seconds, partial(engine.run, self.batch(rows))))

    def warm(self, candidate: CandidateForm) -> None:
        candidate.most_rows = warm(
            candidate.engine, self.spec, self.batch, candidate.ceiling, self.place.call
        )

    def warm_useful(self, chosen: CandidateForm) -> None:
        """Warm the engine up again, with no more rows than are useful."""
        few = self.spec.with_max_batch_size(min(chosen.useful_rows or chosen.most_rows, chosen.most_rows))
        warm(chosen.engine, few, self.batch, chosen.ceiling, self.place.call)

    def anew(self, chosen: CandidateForm) -> None:
        """Load the chosen engine again, as if it were the only one: memory that the other engines left behind, and its
        own for batches larger than the useful one, can be half of its memory."""
        self.place.call(chosen.engine.close)
        # The engines that were compared are this version's: a thousand models are started in linear time.
        give_back_tried()
        self.load_again(chosen)
        self.warm_useful(chosen)

    def put_away(self, candidate: CandidateForm) -> None:
        """Close the engine until it is needed, where another one is to have its memory."""
        if self.place.apart and candidate.load is not None and not candidate.away:
            self.place.call(candidate.engine.close)
            self.place.call(free_memory)
            candidate.away = True

    def load_again(self, candidate: CandidateForm) -> None:
        """Load the engine of a candidate that was put away."""
        assert candidate.load is not None, "only what can be loaded again is put away"
        candidate.engine = self.place.call(candidate.load)
        candidate.away = False

    def close(self, candidate: CandidateForm) -> None:
        if not candidate.away:
            self.place.call(candidate.engine.close)

    def useful_rows_of(self, chosen: CandidateForm) -> int:
        """`PreparedVersion.useful_rows`, measured in less than a second. 0, not known, after an error, since only
        speed depends on it; and on a CPU beside other programs, which may take a core from every batch but the
        smallest: there the rows are measured again while serving."""
        engine, crowding = chosen.engine, Crowding()
        on_cpu = engine.device == "cpu"
        worth = AHEAD if on_cpu and engine.in_flight > 1 else ONE_BY_ONE
        try:
            rows = measure_useful_rows(partial(self._seconds, engine), chosen.most_rows, worth=worth)
            return 0 if on_cpu and crowding.share() > CROWDED else rows
        except NotReady:  # the server is stopping
            raise
        except Exception:
            logger.exception("the useful batch of '%s' could not be measured", self.spec.name)
            return 0

    def invariance_of(self, engine: Engine, most: int) -> str:
        """`PreparedVersion.invariance` for batches of up to ``most`` rows, measured in a fraction of a second; empty
        after an error: no answer depends on it."""
        sizes = buckets_of(self.spec, engine.device) or batch_sizes(max(most, 1))
        try:
            return batch_invariance(
                self.spec,
                lambda parts: self.place.call(partial(engine.run, parts)),
                self.batch,
                [rows for rows in sizes if rows <= most],
                engine.precision,
            )
        except NotReady:  # the server is stopping
            raise
        except Exception:
            logger.exception("the batch invariance of '%s' could not be measured", self.spec.name)
            return ""


@dataclass(frozen=True)
class VersionHere(ModelHere):
    """A version of the model, which is made ready or tuned at the place."""

    version: Version

    @classmethod
    def of(cls, version: Version, place: Place) -> "VersionHere":
        """The version with its own spec, and the samples that are stored with it."""
        return cls(version.spec(), stored_samples(version), place, version)

    def engine(self, form: str, precision: str, setup: CpuSetup = PLAIN) -> Engine:
        """The version's original (``fp32``) or half in one form. Called on the device thread."""
        load = load_original if precision == "fp32" else load_half
        return load(self.version, form, self.place.device, setup)


def _handicapped(candidate: CandidateForm) -> float:
    """The candidate's seconds, a half's raised by `HALF_MUST_GAIN`: a difference within the noise is no gain."""
    return candidate.seconds * (1.0 if candidate.engine.precision == "fp32" else HALF_MUST_GAIN)


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
