"""Make a version ready to serve: load it, prove its half on this device, choose a form, warm it up.

Everything that touches the device runs on the device thread, one short call after another, so that the active
version goes on answering requests between them. On a device with memory of its own the forms that are compared are
loaded one at a time.
"""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain

from ....exporters.device_proofs import keep_proof, kept_proof
from ....exporters.inputs.samples import Samples, stored_samples
from ....exporters.reprove import holds_here, reprove
from ....exporters.selftest_record import obey_selftest
from ....models.buckets import buckets_of
from ....models.engines.engine import Engine
from ....models.engines.faults import no_half_kernel, out_of_memory
from ....models.engines.load import load_half, load_original
from ....models.engines.wire_widening import widened
from ....models.errors import DamagedFile, HalfevenError, NotReady
from ....models.spec import ModelSpec
from ....models.store import Version
from ...batching.ceiling import Ceiling
from ...batching.interface import PreparedVersion, ServableForm
from ...batching.invariance import batch_invariance
from ...batching.place import Place
from ..orders import drifted
from .candidate_forms import (
    Candidate,
    anew,
    batch_of,
    close,
    fastest,
    free_memory,
    load_again,
    put_away,
    warm_candidate,
)
from .graph_choice import choose_graphs
from .kept_setups import measured_setup
from .off_here import form_off, halves_off, off_sentences, refuse_where_off
from .planned_again import plan_again
from .tuned import tuned_for
from .useful_rows import AHEAD, ONE_BY_ONE, batch_sizes, measure_useful_rows, shortest_seconds

logger = logging.getLogger("halfeven.roster")
HALVES = {"torch": "half.pt2", "onnx": "half.onnx", "live": "live.json"}
ORIGINALS = {"torch": "original.pt2", "onnx": "original.onnx", "live": "live.json"}


class NoMemory(NotReady):
    """The device has too little memory to find out whether a half may serve."""

    code = "no_memory"


def make_ready(version: Version, place: Place, replaces: PreparedVersion | None = None) -> PreparedVersion:
    """The version loaded, proven and warm. Blocks for as long as that takes; call it on no device thread.

    Where its half is not equal here, its FP32 original is made ready instead. Raises NotReady then where the version
    ``replaces`` an active one, which stays active, where the fall-back is forbidden, and where there is no memory to
    prove the half. Where its half drifted on this device before, or the selftest switched it off, the original is made
    ready. Raises DamagedFile or EngineFailed where no form can be loaded, NotReady where the selftest switched the
    device off.
    """
    obey_selftest(version, place.device)
    refuse_where_off(version, place.device)
    spec = version.spec()
    samples = stored_samples(version)
    drift = drifted(version, str(place.device)) or halves_off(version, spec, place.device)
    damaged: list[str] = []
    halves, refusals = ([], [drift]) if drift else proven_halves(version, spec, samples, place, damaged)
    reason = "; ".join(refusals)
    if refusals and not drift and replaces is not None:
        raise NotReady(f"{version}: {reason}; version {replaces.version} stays active")
    if refusals and not place.fallback:
        raise NotReady(f"{version}: {reason}; serving its FP32 original is forbidden by --fallback none")
    forms = _servable(version, spec, halves, place)
    chosen, why = _chosen(version, spec, samples, halves, place, damaged)
    if alone := chosen.away:
        load_again(chosen, place)
        warm_candidate(spec, samples, chosen, place)
    if not chosen.useful_rows and spec.batched:
        chosen.useful_rows = _useful_rows(spec, samples, chosen, place)
    if chosen.seconds and chosen.load is not None and not alone:
        chosen = anew(spec, samples, chosen, chosen.load, place)
    graphs = choose_graphs(spec, samples, chosen, place)
    original, beside = _original_beside(version, spec, samples, chosen, place)
    return PreparedVersion(
        version=str(version.number),
        digest=version.manifest["files"][chosen.file],
        precision=chosen.engine.precision,
        useful_rows=chosen.useful_rows,
        engine=chosen.engine,
        reason="; ".join(
            [
                (reason or why) + beside,
                *damaged,
                *graphs,
                *_placed(chosen.engine),
                *off_sentences(place.device),
            ]
        ),
        original=original,
        ceiling=chosen.ceiling,
        invariance=invariance_of(
            spec, samples, chosen.engine, min(chosen.useful_rows or chosen.most_rows, chosen.most_rows), place
        ),
        probe=[part[0] for part in batch_of(spec, samples, 1)],
        setup=getattr(chosen.engine, "setup", None) if place.device.type == "cpu" else None,
        forms=forms,
    )


def _servable(version: Version, spec: ModelSpec, halves: list[Candidate], place: Place) -> list[ServableForm]:
    """The forms among which measurement chooses, on a CPU: `PreparedVersion.forms`."""
    if place.device.type != "cpu":
        return []
    proven = [(half.engine.form, half.engine.precision) for half in halves]
    asked = bool(proven) and spec.form in HALVES  # then no original may take its place
    originals = [] if asked else [(form, "fp32") for form in _original_forms(version, spec)]
    weights = version.folder / "weights.safetensors"

    def servable(form: str, precision: str) -> ServableForm:
        fetch, files = (load_original, ORIGINALS) if precision == "fp32" else (load_half, HALVES)
        file = files[form]
        return ServableForm(
            form,
            precision,
            version.manifest["files"][file],
            sum(path.stat().st_size for path in (version.folder / file, weights) if path.is_file()),
            lambda setup: widened(fetch(version, form, place.device, setup), spec),
        )

    return [servable(form, precision) for form, precision in [*originals, *proven]]


def _placed(engine: Engine) -> list[str]:
    """A sentence about nodes that ONNX Runtime computes on the CPU beside a device; none where there are none."""
    placement = getattr(engine, "placement", None)
    return [sentence] if placement is not None and (sentence := placement.sentence()) else []


def _chosen(
    version: Version, spec: ModelSpec, samples: Samples, halves: list[Candidate], place: Place, damaged: list[str]
) -> tuple[Candidate, str]:  # fmt: skip
    """The candidate that serves, and why: the form asked for, the winner of a tuning, or the fastest here."""
    if halves and spec.form in HALVES:
        warm_candidate(spec, samples, halves[0], place)
        return halves[0], f"form = {spec.form!r} asks for it"
    several = len(_original_forms(version, spec)) + len(halves) > 1
    every = chain(_originals(version, spec, samples, place, damaged), halves)
    tuned = _as_tuned(version, spec, samples, halves, place)
    return tuned or fastest(spec, samples, every, place, several=several)


def _ceiling(version: Version, place: Place) -> Ceiling:
    """The row limits found when this model ran out of memory on this device; delete the file to forget them."""
    name = f"ceiling-{str(place.device).replace(':', '-')}.json"
    return Ceiling(version.folder.parent / "tuned" / name)


def _original_beside(
    version: Version, spec: ModelSpec, samples: Samples, chosen: Candidate, place: Place
) -> tuple[Engine | None, str]:
    """The FP32 original that stays loaded beside a half, warm, and a sentence about it. Of several forms the program, as
    in the gate."""
    file = next((file for file in ORIGINALS.values() if version.has(file)), None)
    if chosen.engine.precision == "fp32" or not place.rescue or file is None:
        return None, ""
    form = next(form for form in ORIGINALS if ORIGINALS[form] == file)
    try:
        load = _loading(version, spec, samples, form, "fp32", place)
        original = Candidate(place.call(load), file, ceiling=_ceiling(version, place))
        warm_candidate(spec, samples, original, place)
    except DamagedFile as error:
        logger.error("the FP32 original of %s cannot stand by: %s", version, error)
        return None, f"; its FP32 original cannot stand by: {error}"
    except Exception as error:  # the half was proven and serves without it
        logger.exception("the FP32 original of %s cannot stand by", version)
        return None, f"; its FP32 original cannot stand by: {error}"
    facts = version.manifest["forms"].values()
    size = next((found["bytes_fp32"] for found in facts if found.get("bytes_fp32")), None)
    return original.engine, "; its FP32 original stands by" + (f" ({size / 2**20:.3g} MiB)" if size else "")


def proven_halves(
    version: Version, spec: ModelSpec, samples: Samples, place: Place, damaged: list[str] | None = None
) -> tuple[list[Candidate], list[str]]:
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
        if off := form_off(form, place.device):
            refusals.append(off)
            continue
        try:
            found = _proven_with_memory(version, spec, samples, form, place)
            if len(forms) > 1:
                put_away(found, place)
            proven.append(found)
        except NoMemory:
            for other in proven:
                close(other, place)
            raise
        except DamagedFile as error:
            logger.error("%s: %s", version, error)
            faults.append(str(error))
            refusals.append(f"the {form} form: {error}")
        except Exception as error:  # whatever the fault of a half, its original can still serve
            again = no_half_kernel(error) and plan_again(version, place.device)
            refusals.append(
                f"the {form} form: {error}" + ("; it is planned again for this device" if again else "")
            )
    if proven and damaged is not None:
        damaged += faults
    return proven, [] if proven else refusals


def _proven_with_memory(
    version: Version, spec: ModelSpec, samples: Samples, form: str, place: Place
) -> Candidate:
    """Raises NoMemory where the device has too little to prove the half, which says nothing about the half."""
    try:
        return _proven(version, spec, samples, form, place)
    except Exception as error:
        if not out_of_memory(error):
            raise
    place.call(free_memory)
    try:
        return _proven(version, spec, samples, form, place)
    except Exception as error:
        if not out_of_memory(error):
            raise
        raise NoMemory(
            f"{version}: {place.device} has no memory to load and prove the {form} form, which needs the half and its "
            f"FP32 original together: {error}; unload other models, or serve this one on another device"
        ) from error


def _proven(version: Version, spec: ModelSpec, samples: Samples, form: str, place: Place) -> Candidate:
    load = _loading(version, spec, samples, form, version.manifest["half"], place)
    engine = place.call(load)
    try:
        if not holds_here(version, place.device):
            passed, summary = _proven_here(version, engine, samples, form, place)
            if not passed:
                raise NotReady(f"not equal on {place.device}: {summary}")
    except BaseException:
        place.call(engine.close)
        raise
    return Candidate(engine, HALVES[form], ceiling=_ceiling(version, place), load=load)


def _proven_here(
    version: Version, engine: Engine, samples: Samples, form: str, place: Place
) -> tuple[bool, str]:
    """Whether the gate passes the half on this device, and its summary: as kept from an earlier start, or found now."""
    kept = kept_proof(version, form, HALVES[form], place.device)
    if kept is not None:
        return kept.passed, kept.summary
    report = reprove(version, engine, place.device, samples, place.call)
    keep_proof(version, form, HALVES[form], place.device, report)
    return report.passed, report.summary()


def _loading(
    version: Version, spec: ModelSpec, samples: Samples, form: str, precision: str, place: Place
) -> Callable[[], Engine]:
    """A function that loads a form as it serves: it takes the wire's datatypes, and on a processor it has the setup
    that is best there, as measured before or now."""
    fetch = partial(load_original if precision == "fp32" else load_half, version, form, place.device)
    if place.device.type == "cpu":
        batches = partial(batch_of, spec, samples)
        fetch = partial(fetch, measured_setup(version, form, precision, fetch, spec, batches, place))
    return lambda: widened(fetch(), spec)


def _originals(
    version: Version, spec: ModelSpec, samples: Samples, place: Place, damaged: list[str]
) -> Iterator[Candidate]:
    """The FP32 forms that may serve: the one that the spec asks for, or every one there is.

    ``damaged`` gets a sentence about each form that is left out because its file is damaged.
    """
    for form in _original_forms(version, spec):
        try:
            load = _loading(version, spec, samples, form, "fp32", place)
            engine = place.call(load)
        except Exception as error:
            if out_of_memory(error):
                logger.warning("%s: %s has no memory for its %s whole", version, place.device, form)
                place.call(free_memory)
                continue  # a half needs less
            if not isinstance(error, HalfevenError) or form in (spec.form, next(iter(ORIGINALS))):
                raise
            if isinstance(error, DamagedFile):
                logger.error("%s: %s", version, error)
                damaged.append(str(error))
            continue  # there is another original; `doctor` names the missing provider
        yield Candidate(engine, ORIGINALS[form], ceiling=_ceiling(version, place), load=load)


def _original_forms(version: Version, spec: ModelSpec) -> list[str]:
    """The form that the spec asks for, or every one that there is."""
    asked = spec.form in ORIGINALS and version.has(ORIGINALS[spec.form])
    return [spec.form] if asked else [form for form in ORIGINALS if version.has(ORIGINALS[form])]


def _as_tuned(
    version: Version, spec: ModelSpec, samples: Samples, halves: list[Candidate], place: Place
) -> tuple[Candidate, str] | None:
    """The winner of `halfeven tune` here, where it is still valid, a half only if it is proven; else None."""
    tuned = tuned_for(version, place.device) if spec.form == "auto" else None
    if tuned is None:
        return None
    winner, is_half = tuned.winner, tuned.winner.precision != "fp32"
    proven = [(half.engine.form, half.engine.precision) for half in halves]
    if is_half and (winner.form, winner.precision) not in proven:
        return None
    fetch, files = (load_half, HALVES) if is_half else (load_original, ORIGINALS)
    engine: Engine | None = None
    try:
        loaded = place.call(partial(fetch, version, winner.form, place.device, winner.setup))
        engine = widened(loaded, spec)
        chosen = Candidate(
            engine, files[winner.form], useful_rows=winner.useful_rows, ceiling=_ceiling(version, place)
        )
        warm_candidate(spec, samples, chosen, place)
    except Exception:
        logger.exception("the tuned setup of %s does not run here; measuring instead", version)
        if engine is not None:
            place.call(engine.close)
        return None
    for other in halves:
        close(other, place)
    return chosen, str(tuned)


def _useful_rows(spec: ModelSpec, samples: Samples, chosen: Candidate, place: Place) -> int:
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
