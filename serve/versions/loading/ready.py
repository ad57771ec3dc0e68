"""Make a version ready to serve: load it, prove its half on this device, choose a form, warm it up.

Everything that touches the device runs on the device thread, one short call after another, so that the active
version goes on answering requests between them. On a device with memory of its own, and where memory is scarce, the
forms that are compared are loaded one at a time.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import NamedTuple

from ....exporters.inputs.samples import Samples, stored_samples
from ....exporters.on_device.device_proofs import keep_proof, kept_proof
from ....exporters.on_device.reprove import holds_here, reprove
from ....exporters.on_device.selftest_record import obey_selftest
from ....models.engines.engine import Engine
from ....models.engines.faults import no_half_kernel, out_of_memory
from ....models.engines.load import load_half, load_original
from ....models.engines.wire_widening import widened
from ....models.errors import DamagedFile, HalfevenError, NotReady
from ....models.spec.spec import ModelSpec
from ....models.store.store import Version
from ...batching.ceiling import Ceiling
from ...batching.interface import PreparedVersion, ServableForm
from ...batching.place import Place
from ..orders import drifted
from .candidate_forms import (
    CandidateForm,
    anew,
    batch_of,
    close,
    fastest,
    free_memory,
    invariance_of,
    is_scarce,
    load_again,
    put_away,
    useful_rows_of,
    warm_candidate,
)
from .graph_choice import choose_graphs
from .kept_setups import measured_setup
from .off_here import form_off, halves_off, off_sentences, refuse_where_off
from .planned_again import plan_again
from .tuned import tuned_for

logger = logging.getLogger("halfeven.roster")
HALVES = {"torch": "half.pt2", "onnx": "half.onnx", "live": "live.json"}
ORIGINALS = {"torch": "original.pt2", "onnx": "original.onnx", "live": "live.json"}


class Halves(NamedTuple):
    """The halves that may serve, and why the others may not. ``damaged``: a sentence about each damaged file, where
    another half is proven all the same; ``refusals`` are empty then."""

    proven: list[CandidateForm]
    refusals: list[str]
    damaged: Sequence[str] = ()


class NoMemory(NotReady):
    """The device has too little memory to find out whether a half may serve. Unload other models."""

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
    place = replace(place, scarce=is_scarce(version, place))
    spec = version.spec()
    samples = stored_samples(version)
    found, reason = _judged(version, spec, samples, place, replaces)
    halves = found.proven
    forms = _servable(version, spec, halves, place)
    chosen, why, damaged = _chosen(version, spec, samples, halves, place)
    if alone := chosen.away:
        load_again(chosen, place)
        warm_candidate(spec, samples, chosen, place)
    if not chosen.useful_rows and spec.batched:
        chosen.useful_rows = useful_rows_of(spec, samples, chosen, place)
    if chosen.seconds and chosen.load is not None and not alone:
        chosen = anew(spec, samples, chosen, chosen.load, place)
    graphs = choose_graphs(spec, samples, chosen, place)
    original, beside = _original_beside(version, spec, samples, chosen, place)
    reasons = [(reason or why) + beside, *found.damaged, *damaged, *graphs]
    reasons += [*_placed(chosen.engine), *off_sentences(place.device)]
    most = min(chosen.useful_rows or chosen.most_rows, chosen.most_rows)
    return PreparedVersion(
        version=str(version.number),
        digest=version.sha256(chosen.file),
        precision=chosen.engine.precision,
        useful_rows=chosen.useful_rows,
        engine=chosen.engine,
        reason="; ".join(reasons),
        original=original,
        ceiling=chosen.ceiling,
        invariance=invariance_of(spec, samples, chosen.engine, most, place),
        probe=[part[0] for part in batch_of(spec, samples, 1)],
        setup=chosen.engine.setup if place.device.type == "cpu" else None,
        forms=forms,
    )


def _judged(
    version: Version, spec: ModelSpec, samples: Samples, place: Place, replaces: PreparedVersion | None
) -> tuple[Halves, str]:
    """The halves that may serve, and why none may, where that is so. Raises NotReady where the original may not serve
    instead: it would replace an active version, or the fall-back is forbidden."""
    drift = drifted(version, str(place.device)) or halves_off(version, spec, place.device)
    found = Halves([], [drift]) if drift else proven_halves(version, spec, samples, place)
    reason = "; ".join(found.refusals)
    if reason and not drift and replaces is not None:
        raise NotReady(f"{version}: {reason}; version {replaces.version} stays active")
    if reason and not place.fallback:
        raise NotReady(f"{version}: {reason}; serving its FP32 original is forbidden by --fallback none")
    return found, reason


def _servable(
    version: Version, spec: ModelSpec, halves: list[CandidateForm], place: Place
) -> list[ServableForm]:
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
            version.sha256(file),
            sum(path.stat().st_size for path in (version.path(file), weights) if path.is_file()),
            lambda setup: widened(fetch(version, form, place.device, setup), spec),
        )

    return [servable(form, precision) for form, precision in [*originals, *proven]]


def _placed(engine: Engine) -> list[str]:
    """A sentence about nodes that ONNX Runtime computes on the CPU beside a device; none where there are none."""
    return [sentence] if engine.placement is not None and (sentence := engine.placement.sentence()) else []


def _chosen(
    version: Version, spec: ModelSpec, samples: Samples, halves: list[CandidateForm], place: Place
) -> tuple[CandidateForm, str, list[str]]:
    """The candidate that serves, and why: the form asked for, the winner of a tuning, or the fastest here. Then a
    sentence about each original that is left out because its file is damaged."""
    if halves and spec.form in HALVES:
        warm_candidate(spec, samples, halves[0], place)
        return halves[0], f"form = {spec.form!r} asks for it", []
    several = len(_original_forms(version, spec)) + len(halves) > 1
    if tuned := _as_tuned(version, spec, samples, halves, place):
        return *tuned, []
    originals = _Originals(version, spec, samples, place)
    chosen, why = fastest(spec, samples, chain(originals, halves), place, several=several)
    return chosen, why, originals.damaged


def _ceiling(version: Version, place: Place) -> Ceiling:
    """The row limits found when this model ran out of memory on this device; delete the file to forget them."""
    name = f"ceiling-{str(place.device).replace(':', '-')}.json"
    return Ceiling(version.folder.parent / "tuned" / name)


def _original_beside(
    version: Version, spec: ModelSpec, samples: Samples, chosen: CandidateForm, place: Place
) -> tuple[Engine | None, str]:
    """The FP32 original that stays loaded beside a half, warm, and a sentence about it. Of several forms the program,
    as in the gate."""
    file = next((file for file in ORIGINALS.values() if version.has(file)), None)
    if chosen.engine.precision == "fp32" or not place.rescue or file is None:
        return None, ""
    form = next(form for form in ORIGINALS if ORIGINALS[form] == file)
    try:
        load = _loading(version, spec, samples, form, "fp32", place)
        original = CandidateForm(place.call(load), file, ceiling=_ceiling(version, place))
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


def proven_halves(version: Version, spec: ModelSpec, samples: Samples, place: Place) -> Halves:
    """The halves that may serve here: of the form that the spec asks for alone, where it does."""
    if version.manifest["half"] is None:
        return Halves([], [])
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
    return Halves(proven, [], faults) if proven else Halves([], refusals)


def _proven_with_memory(
    version: Version, spec: ModelSpec, samples: Samples, form: str, place: Place
) -> CandidateForm:
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


def _proven(version: Version, spec: ModelSpec, samples: Samples, form: str, place: Place) -> CandidateForm:
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
    return CandidateForm(engine, HALVES[form], ceiling=_ceiling(version, place), load=load)


def _proven_here(
    version: Version, engine: Engine, samples: Samples, form: str, place: Place
) -> tuple[bool, str]:
    """True if the gate passes the half on this device, and the gate's summary: as stored at an earlier start, or found
    now."""
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


@dataclass
class _Originals:
    """The FP32 forms that may serve, each loaded when its turn comes: the one that the spec asks for, or every one
    there is. ``damaged``: a sentence about each that was left out because its file is damaged."""

    version: Version
    spec: ModelSpec
    samples: Samples
    place: Place
    damaged: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[CandidateForm]:
        version, place = self.version, self.place
        for form in _original_forms(version, self.spec):
            try:
                load = _loading(version, self.spec, self.samples, form, "fp32", place)
                engine = place.call(load)
            except Exception as error:
                if out_of_memory(error):
                    logger.warning("%s: %s has no memory for its %s original", version, place.device, form)
                    place.call(free_memory)
                    continue  # a half needs less
                if not isinstance(error, HalfevenError) or form in (self.spec.form, next(iter(ORIGINALS))):
                    raise
                if isinstance(error, DamagedFile):
                    logger.error("%s: %s", version, error)
                    self.damaged.append(str(error))
                continue  # there is another original; `doctor` names the missing provider
            yield CandidateForm(engine, ORIGINALS[form], ceiling=_ceiling(version, place), load=load)


def _original_forms(version: Version, spec: ModelSpec) -> list[str]:
    """The form that the spec asks for, or every one that there is."""
    asked = spec.form in ORIGINALS and version.has(ORIGINALS[spec.form])
    return [spec.form] if asked else [form for form in ORIGINALS if version.has(ORIGINALS[form])]


def _as_tuned(
    version: Version, spec: ModelSpec, samples: Samples, halves: list[CandidateForm], place: Place
) -> tuple[CandidateForm, str] | None:
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
        chosen = CandidateForm(
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
