"""Make a version ready to serve: load it, prove its half on this device, choose a form, warm it up.

Everything that touches the device runs on the device thread, one short call after another, so that the active
version goes on answering requests between them.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ....exporters.inputs.samples import Samples, stored_samples
from ....exporters.reprove import holds_here, reprove
from ....models.buckets import buckets_of
from ....models.engines.engine import Engine
from ....models.engines.load import load_half, load_whole
from ....models.engines.wire_widening import widened
from ....models.errors import DamagedFile, EngineFailed, HalfevenError, NotReady
from ....models.spec import ModelSpec
from ....models.store import Version
from ...batching.ceiling import Ceiling
from ...batching.interface import PreparedVersion
from ...batching.invariance import batch_invariance
from ...batching.place import Place
from ...batching.warming import warm
from ..orders import drifted
from .kept_setups import measured_setup
from .release import give_back
from .tuned import tuned_for
from .useful_rows import AHEAD, ONE_BY_ONE, batch_sizes, measure_useful_rows, shortest_seconds

logger = logging.getLogger("halfeven.roster")
HALVES = {"torch": "half.pt2", "onnx": "half.onnx", "live": "live.json"}
WHOLES = {"torch": "whole.pt2", "onnx": "whole.onnx", "live": "live.json"}
HALF_MUST_GAIN = 1.1  # times as fast as the best whole, or the whole serves


@dataclass(slots=True)
class _Candidate:
    engine: Engine
    file: str
    seconds: float = 0.0  # for a batch of max_batch_size
    useful_rows: int = 0
    ceiling: Ceiling = field(default_factory=Ceiling)
    most_rows: int = 0  # that the device has memory for; found when it was warmed up
    load: Callable[[], Engine] | None = None  # loads the same engine again


def make_ready(version: Version, place: Place, replaces: PreparedVersion | None = None) -> PreparedVersion:
    """The version loaded, proven and warm. Blocks for as long as that takes; call it on no device thread.

    Where its half is not equal here, its FP32 whole is made ready instead. Raises NotReady then where the version
    ``replaces`` an active one, which stays active, and where the fall-back is forbidden. Where its half drifted on
    this device before, the whole is made ready. Raises DamagedFile or EngineFailed where no form can be loaded.
    """
    spec = version.spec()
    samples = stored_samples(version)
    drift = drifted(version, str(place.device))
    damaged: list[str] = []
    halves, refusals = ([], [drift]) if drift else proven_halves(version, spec, samples, place, damaged)
    reason = "; ".join(refusals)
    if refusals and not drift and replaces is not None:
        raise NotReady(f"{version}: {reason}; version {replaces.version} stays active")
    if refusals and not place.fallback:
        raise NotReady(f"{version}: {reason}; serving its FP32 whole is forbidden by --fallback none")
    wanted_form = spec.form in HALVES
    if halves and wanted_form:
        chosen, why = halves[0], f"form = {spec.form!r} asks for it"
        _warm(spec, samples, chosen, place)
    else:
        chosen, why = _as_tuned(version, spec, samples, halves, place) or _fastest(
            spec, samples, [*_wholes(version, spec, samples, place, damaged), *halves], place
        )
    if not chosen.useful_rows and spec.batched:
        chosen.useful_rows = _useful_rows(spec, samples, chosen, place)
    if chosen.seconds and chosen.load is not None:
        chosen = _anew(spec, samples, chosen, chosen.load, place)
    whole, beside = _whole_beside(version, spec, samples, chosen, place)
    return PreparedVersion(
        version=str(version.number),
        digest=version.manifest["files"][chosen.file],
        precision=chosen.engine.precision,
        useful_rows=chosen.useful_rows,
        engine=chosen.engine,
        reason="; ".join([(reason or why) + beside, *damaged]),
        whole=whole,
        ceiling=chosen.ceiling,
        invariance=_invariance(spec, samples, chosen, place),
        probe=[part[0] for part in batch_of(spec, samples, 1)],
        setup=getattr(chosen.engine, "setup", None) if place.device.type == "cpu" else None,
    )


def _ceiling(version: Version, place: Place) -> Ceiling:
    """The row limits found when this model ran out of memory on this device; delete the file to forget them."""
    name = f"ceiling-{str(place.device).replace(':', '-')}.json"
    return Ceiling(version.folder.parent / "tuned" / name)


def _whole_beside(
    version: Version, spec: ModelSpec, samples: Samples, chosen: _Candidate, place: Place
) -> tuple[Engine | None, str]:
    """The FP32 whole that stays loaded beside a half, warm, and a sentence about it. Of several forms the program, as
    in the gate."""
    file = next((file for file in WHOLES.values() if version.has(file)), None)
    if chosen.engine.precision == "fp32" or not place.rescue or file is None:
        return None, ""
    form = next(form for form in WHOLES if WHOLES[form] == file)
    try:
        load = _loading(version, spec, samples, form, "fp32", place)
        whole = _Candidate(place.call(load), file, ceiling=_ceiling(version, place))
        _warm(spec, samples, whole, place)
    except Exception as error:  # the half was proven and serves without it
        logger.exception("the FP32 whole of %s cannot stand by", version)
        return None, f"; its FP32 whole cannot stand by: {error}"
    facts = version.manifest["forms"].values()
    size = next((found["bytes_fp32"] for found in facts if found.get("bytes_fp32")), None)
    return whole.engine, "; its FP32 whole stands by" + (f" ({size / 2**20:.3g} MiB)" if size else "")


def proven_halves(
    version: Version, spec: ModelSpec, samples: Samples, place: Place, damaged: list[str] | None = None
) -> tuple[list[_Candidate], list[str]]:
    """The halves that may serve here (the form that the spec asks for alone, where it does), and refusals.

    Where one half is proven although the file of another is damaged, ``damaged`` gets the sentence about that file.
    """
    if version.manifest["half"] is None:
        return [], []
    forms = [spec.form] if spec.form in HALVES else ["torch", "onnx"]
    proven, refusals = [], []
    faults: list[str] = []
    for form in forms:
        if form not in version.manifest["forms"]:
            refusals.append(f"the {form} form was not converted")
            continue
        if not version.manifest["forms"][form]["passed"]:
            refusals.append(f"the {form} form was refused: {version.manifest['reason']}")
            continue
        try:
            proven.append(_proven(version, spec, samples, form, place))
        except DamagedFile as error:
            logger.error("%s: %s", version, error)
            faults.append(str(error))
            refusals.append(f"the {form} form: {error}")
        except Exception as error:  # whatever the fault of a half, its whole can still serve
            refusals.append(f"the {form} form: {error}")
    if proven and damaged is not None:
        damaged += faults
    return proven, [] if proven else refusals


def _proven(version: Version, spec: ModelSpec, samples: Samples, form: str, place: Place) -> _Candidate:
    load = _loading(version, spec, samples, form, version.manifest["half"], place)
    engine = place.call(load)
    try:
        if not holds_here(version, place.device):
            report = reprove(version, engine, place.device, samples, place.call)
            if not report.passed:
                raise NotReady(f"not equal on {place.device}: {report.summary()}")
    except BaseException:
        place.call(engine.close)
        raise
    return _Candidate(engine, HALVES[form], ceiling=_ceiling(version, place), load=load)


def _loading(
    version: Version, spec: ModelSpec, samples: Samples, form: str, precision: str, place: Place
) -> Callable[[], Engine]:
    """A function that loads a form as it serves: it takes the wire's datatypes, and on a processor it has the setup
    that is best there, as measured before or now."""
    fetch = partial(load_whole if precision == "fp32" else load_half, version, form, place.device)
    if place.device.type == "cpu":
        batches = partial(batch_of, spec, samples)
        fetch = partial(fetch, measured_setup(version, form, precision, fetch, spec, batches, place))
    return lambda: widened(fetch(), spec)


def _wholes(
    version: Version, spec: ModelSpec, samples: Samples, place: Place, damaged: list[str]
) -> Iterator[_Candidate]:
    """The FP32 forms that may serve: the one that the spec asks for, or every one there is.

    ``damaged`` gets a sentence about each form that is left out because its file is damaged.
    """
    wanted = [spec.form] if spec.form in WHOLES and version.has(WHOLES[spec.form]) else list(WHOLES)
    for form in wanted:
        if version.has(WHOLES[form]):
            try:
                load = _loading(version, spec, samples, form, "fp32", place)
                engine = place.call(load)
            except HalfevenError as error:
                if form == wanted[0]:
                    raise
                if isinstance(error, DamagedFile):
                    logger.error("%s: %s", version, error)
                    damaged.append(str(error))
                continue  # there is another whole; `doctor` names the missing provider
            yield _Candidate(engine, WHOLES[form], ceiling=_ceiling(version, place), load=load)


def _as_tuned(
    version: Version, spec: ModelSpec, samples: Samples, halves: list[_Candidate], place: Place
) -> tuple[_Candidate, str] | None:
    """The winner of `halfeven tune` here, where it is still valid, a half only if it is proven; else None."""
    tuned = tuned_for(version, place.device) if spec.form == "auto" else None
    if tuned is None:
        return None
    winner, is_half = tuned.winner, tuned.winner.precision != "fp32"
    proven = [(half.engine.form, half.engine.precision) for half in halves]
    if is_half and (winner.form, winner.precision) not in proven:
        return None
    fetch, files = (load_half, HALVES) if is_half else (load_whole, WHOLES)
    engine: Engine | None = None
    try:
        loaded = place.call(partial(fetch, version, winner.form, place.device, winner.setup))
        engine = widened(loaded, spec)
        chosen = _Candidate(
            engine, files[winner.form], useful_rows=winner.useful_rows, ceiling=_ceiling(version, place)
        )
        _warm(spec, samples, chosen, place)
    except Exception:
        logger.exception("the tuned setup of %s does not run here; measuring instead", version)
        if engine is not None:
            place.call(engine.close)
        return None
    for other in halves:
        place.call(other.engine.close)
    return chosen, f"tuned on {tuned.date}: {winner}"


def _anew(
    spec: ModelSpec, samples: Samples, chosen: _Candidate, load: Callable[[], Engine], place: Place
) -> _Candidate:
    """Load the chosen engine again, as if it were the only one: memory that the other engines left behind, and its own
    for batches larger than the useful one, can be half of its memory."""
    rows = min(chosen.useful_rows or chosen.most_rows, chosen.most_rows)
    place.call(chosen.engine.close)
    give_back()
    chosen.engine = place.call(load)
    warm(
        chosen.engine,
        spec.with_max_batch_size(rows),
        partial(batch_of, spec, samples),
        chosen.ceiling,
        place.call,
    )
    return chosen


def _useful_rows(spec: ModelSpec, samples: Samples, chosen: _Candidate, place: Place) -> int:
    """`PreparedVersion.useful_rows`, measured in less than a second. 0, not measured, after an error: only speed
    depends on it."""

    def run_seconds(rows: int) -> float:
        run = partial(chosen.engine.run, batch_of(spec, samples, rows))
        return place.call(partial(shortest_seconds, run))

    engine = chosen.engine
    ahead = engine.device == "cpu" and getattr(engine, "in_flight", 1) > 1
    try:
        return measure_useful_rows(run_seconds, chosen.most_rows, worth=AHEAD if ahead else ONE_BY_ONE)
    except Exception:
        logger.exception("the useful batch of '%s' could not be measured", spec.name)
        return 0


def _fastest(
    spec: ModelSpec, samples: Samples, candidates: list[_Candidate], place: Place
) -> tuple[_Candidate, str]:
    """Measure every candidate on this device at the largest batch; a half must be faster by a clear margin."""
    candidates = _running(spec, samples, candidates, place)
    best = min(candidates, key=_handicapped)
    for other in candidates:
        if other is not best:
            place.call(other.engine.close)
    if len(candidates) == 1:
        return best, "the only form there is"
    sentence = ", ".join(f"{c.engine.form} {c.engine.precision} {c.seconds * 1e3:.3g} ms" for c in candidates)
    return best, f"measured fastest here at batch {max(spec.max_batch_size, 1)}: {sentence}"


def _running(
    spec: ModelSpec, samples: Samples, candidates: list[_Candidate], place: Place
) -> list[_Candidate]:
    """The candidates that run here, warm and measured. One that fails is closed; where all fail, EngineFailed is
    raised."""
    running: list[_Candidate] = []
    fault: Exception | None = None
    for candidate in candidates:
        try:
            _warm(spec, samples, candidate, place)
            if len(candidates) > 1:
                _look(spec, samples, candidate, place)
            running.append(candidate)
        except Exception as error:
            logger.exception(
                "the %s %s form does not run here", candidate.engine.form, candidate.engine.precision
            )
            place.call(candidate.engine.close)
            fault = error
    if not running:
        raise EngineFailed(f"'{spec.name}' runs in no form on {place.device}: {fault}") from fault
    if len(candidates) > 1:
        for candidate in running:  # measure again: a disturbance of the first measurement may be over
            _look(spec, samples, candidate, place)
    return running


def _look(spec: ModelSpec, samples: Samples, candidate: _Candidate, place: Place) -> None:
    """Measure the candidate, and keep the shortest of this time and those before."""
    run = partial(candidate.engine.run, batch_of(spec, samples, candidate.most_rows))
    seconds = place.call(partial(shortest_seconds, run))
    seconds *= max(spec.max_batch_size, 1) / max(candidate.most_rows, 1)
    candidate.seconds = min(candidate.seconds or seconds, seconds)


def _handicapped(candidate: _Candidate) -> float:
    """The candidate's seconds, a half's raised by `HALF_MUST_GAIN`: a difference within the noise is no gain."""
    return candidate.seconds * (1.0 if candidate.engine.precision == "fp32" else HALF_MUST_GAIN)


def _warm(spec: ModelSpec, samples: Samples, candidate: _Candidate, place: Place) -> None:
    batches = partial(batch_of, spec, samples)
    candidate.most_rows = warm(candidate.engine, spec, batches, candidate.ceiling, place.call)


def _invariance(spec: ModelSpec, samples: Samples, chosen: _Candidate, place: Place) -> str:
    """`PreparedVersion.invariance`, measured in a fraction of a second; empty after an error: no answer depends on
    it."""
    most = min(chosen.useful_rows or chosen.most_rows, chosen.most_rows)
    sizes = buckets_of(spec, chosen.engine.device) or batch_sizes(max(most, 1))
    try:
        return batch_invariance(
            spec,
            lambda parts: place.call(partial(chosen.engine.run, parts)),
            partial(batch_of, spec, samples),
            [rows for rows in sizes if rows <= most],
            chosen.engine.precision,
        )
    except Exception:
        logger.exception("the batch invariance of '%s' could not be measured", spec.name)
        return ""


def batch_of(spec: ModelSpec, samples: Samples, rows: int) -> list[list[np.ndarray]]:
    _, arrays = next(iter(samples.batches(max(rows, 1) if spec.batched else 0, 1)))
    return [[arrays[tensor.name]] for tensor in spec.inputs]
