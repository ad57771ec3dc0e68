"""Make a version ready to serve: load it, prove its half on this device, choose a form, warm it up.

Everything that touches the device runs on the device thread, one short call after another, so that the active
version goes on answering requests between them. On a device with memory of its own, and where memory is scarce, the
forms that are compared are loaded one at a time.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import NamedTuple

from ....exporters.on_device.device_proofs import keep_proof, kept_proof
from ....exporters.on_device.reprove import holds_here, reprove
from ....exporters.on_device.selftest_record import obey_selftest
from ....models.engines.cpu.setup import PLAIN
from ....models.engines.engine import Engine
from ....models.engines.faults import no_half_kernel, out_of_memory
from ....models.engines.wire_widening import widened
from ....models.errors import DamagedFile, HalfevenError, NotReady
from ....models.store.store import Version
from ...batching.ceiling import Ceiling
from ...batching.interface import PreparedVersion, ServableForm
from ...batching.place import Place
from ..orders import drifted
from .candidate_forms import CandidateForm, VersionHere, free_memory, is_scarce
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
    here = VersionHere.of(version, place)
    found, reason = _judged(here, replaces)
    forms = _servable(here, found.proven)
    chosen, why, damaged = _chosen(here, found.proven)
    if alone := chosen.away:
        here.load_again(chosen)
        here.warm(chosen)
    if not chosen.useful_rows and here.spec.batched:
        chosen.useful_rows = here.useful_rows_of(chosen)
    if chosen.seconds and chosen.load is not None and not alone:
        here.anew(chosen)
    graphs = choose_graphs(here, chosen)
    original, beside = _original_beside(here, chosen)
    reasons = [(reason or why) + beside, *found.damaged, *damaged, *graphs]
    reasons += [*_placed(chosen.engine), *off_sentences(place.device)]
    most = min(chosen.useful_rows or chosen.most_rows, chosen.most_rows)
    return PreparedVersion(
        version=str(version.number),
        digest=version.sha256_of_form(chosen.file),
        precision=chosen.engine.precision,
        useful_rows=chosen.useful_rows,
        engine=chosen.engine,
        reason="; ".join(reasons),
        original=original,
        ceiling=chosen.ceiling,
        invariance=here.invariance_of(chosen.engine, most),
        probe=[part[0] for part in here.batch(1)],
        setup=chosen.engine.setup if place.device.type == "cpu" else None,
        forms=forms,
    )


def _judged(here: VersionHere, replaces: PreparedVersion | None) -> tuple[Halves, str]:
    """The halves that may serve, and why none may, where that is so. Raises NotReady where the original may not serve
    instead: it would replace an active version, or the fall-back is forbidden."""
    version, device = here.version, here.place.device
    drift = drifted(version, str(device)) or halves_off(version, here.spec, device)
    found = Halves([], [drift]) if drift else proven_halves(here)
    reason = "; ".join(found.refusals)
    if reason and not drift and replaces is not None:
        raise NotReady(f"{version}: {reason}; version {replaces.version} stays active")
    if reason and not here.place.fallback:
        raise NotReady(f"{version}: {reason}; serving its FP32 original is forbidden by --fallback none")
    return found, reason


def _servable(here: VersionHere, halves: list[CandidateForm]) -> list[ServableForm]:
    """The forms among which measurement chooses, on a CPU: `PreparedVersion.forms`."""
    if here.place.device.type != "cpu":
        return []
    version, proven = here.version, _kinds(halves)
    asked = bool(proven) and here.spec.form in HALVES  # then no original may take its place
    originals = [] if asked else [(form, "fp32") for form in _original_forms(here)]
    weights = version.folder / "weights.safetensors"

    def servable(form: str, precision: str) -> ServableForm:
        file = _file_of(form, precision)
        return ServableForm(
            form,
            precision,
            version.sha256_of_form(file),
            sum(path.stat().st_size for path in (version.path(file), weights) if path.is_file()),
            lambda setup: widened(here.engine(form, precision, setup), here.spec),
        )

    return [servable(form, precision) for form, precision in [*originals, *proven]]


def _kinds(halves: Sequence[CandidateForm]) -> list[tuple[str, str]]:
    return [(half.engine.form, half.engine.precision) for half in halves]


def _file_of(form: str, precision: str) -> str:
    return (ORIGINALS if precision == "fp32" else HALVES)[form]


def _placed(engine: Engine) -> list[str]:
    """A sentence about nodes that ONNX Runtime computes on the CPU beside a device; none where there are none."""
    return [sentence] if engine.placement is not None and (sentence := engine.placement.sentence()) else []


def _chosen(here: VersionHere, halves: list[CandidateForm]) -> tuple[CandidateForm, str, list[str]]:
    """The candidate that serves, and why: the form asked for, the winner of a tuning, or the fastest here. Then a
    sentence about each original that is left out because its file is damaged."""
    if halves and here.spec.form in HALVES:
        here.warm(halves[0])
        return halves[0], f"form = {here.spec.form!r} asks for it", []
    several = len(_original_forms(here)) + len(halves) > 1
    if tuned := _as_tuned(here, halves):
        return *tuned, []
    originals = _Originals(here)
    chosen, why = here.fastest(chain(originals, halves), several=several)
    return chosen, why, originals.damaged


def _ceiling(here: VersionHere) -> Ceiling:
    """The row limits found when this model ran out of memory on this device; delete the file to forget them."""
    name = f"ceiling-{str(here.place.device).replace(':', '-')}.json"
    return Ceiling(here.version.folder.parent / "tuned" / name)


def _original_beside(here: VersionHere, chosen: CandidateForm) -> tuple[Engine | None, str]:
    """The FP32 original that stays loaded beside a half, warm, and a sentence about it. Of several forms the program,
    as in the gate."""
    version = here.version
    form = next((form for form, file in ORIGINALS.items() if version.has(file)), None)
    if chosen.engine.precision == "fp32" or not here.place.rescue or form is None:
        return None, ""
    try:
        original = _candidate(here, form, "fp32")
        here.warm(original)
    except DamagedFile as error:
        logger.error("the FP32 original of %s cannot stand by: %s", version, error)
        return None, f"; its FP32 original cannot stand by: {error}"
    except NotReady:  # the server is stopping
        raise
    except Exception as error:  # the half was proven and serves without it
        logger.exception("the FP32 original of %s cannot stand by", version)
        return None, f"; its FP32 original cannot stand by: {error}"
    facts = version.manifest["forms"].values()
    size = next((found["bytes_fp32"] for found in facts if found.get("bytes_fp32")), None)
    return original.engine, "; its FP32 original stands by" + (f" ({size / 2**20:.3g} MiB)" if size else "")


def proven_halves(here: VersionHere) -> Halves:
    """The halves that may serve here: of the form that the spec asks for alone, where it does."""
    version = here.version
    if version.manifest["half"] is None:
        return Halves([], [])
    forms = [here.spec.form] if here.spec.form in HALVES else ["torch", "onnx"]
    proven, refusals = [], []
    faults: list[str] = []
    for form in forms:
        if form not in version.manifest["forms"]:
            refusals.append(f"the {form} form was not converted")
            continue
        if not version.manifest["forms"][form]["passed"]:
            refusals.append(f"the {form} form was refused: {version.manifest['reason']}")
            continue
        if off := form_off(form, here.place.device):
            refusals.append(off)
            continue
        try:
            found = _proven_with_memory(here, form)
            if len(forms) > 1:
                here.put_away(found)
            proven.append(found)
        except NoMemory:
            for other in proven:
                here.close(other)
            raise
        except DamagedFile as error:
            logger.error("%s: %s", version, error)
            faults.append(str(error))
            refusals.append(f"the {form} form: {error}")
        except Exception as error:  # whatever the fault of a half, its original can still serve
            again = no_half_kernel(error) and plan_again(version, here.place.device)
            refusals.append(
                f"the {form} form: {error}" + ("; it is planned again for this device" if again else "")
            )
    return Halves(proven, [], faults) if proven else Halves([], refusals)


def _proven_with_memory(here: VersionHere, form: str) -> CandidateForm:
    """Raises NoMemory where the device has too little to prove the half, which says nothing about the half."""
    try:
        return _proven(here, form)
    except Exception as error:
        if not out_of_memory(error):
            raise
    here.place.call(free_memory)
    try:
        return _proven(here, form)
    except Exception as error:
        if not out_of_memory(error):
            raise
        raise NoMemory(
            f"{here.version}: {here.place.device} has no memory to load and prove the {form} form, which needs the "
            f"half and its FP32 original together: {error}; unload other models, or serve this one on another device"
        ) from error


def _proven(here: VersionHere, form: str) -> CandidateForm:
    place, found = here.place, _candidate(here, form, here.version.manifest["half"])
    try:
        if not holds_here(here.version, place.device):
            passed, summary = _proven_here(here, found.engine, form)
            if not passed:
                raise NotReady(f"not equal on {place.device}: {summary}")
    except BaseException:
        place.call(found.engine.close)
        raise
    return found


def _proven_here(here: VersionHere, engine: Engine, form: str) -> tuple[bool, str]:
    """True if the gate passes the half on this device, and the gate's summary: as stored at an earlier start, or found
    now."""
    version, place = here.version, here.place
    kept = kept_proof(version, form, HALVES[form], place.device)
    if kept is not None:
        return kept.passed, kept.summary
    report = reprove(version, engine, place.device, here.samples, place.call)
    keep_proof(version, form, HALVES[form], place.device, report)
    return report.passed, report.summary()


def _candidate(here: VersionHere, form: str, precision: str) -> CandidateForm:
    """A form, loaded as it serves: it takes the wire's datatypes, and on a processor it has the setup that is best
    there, as measured before or now."""
    setup = measured_setup(here, form, precision) if here.place.device.type == "cpu" else PLAIN

    def load() -> Engine:
        return widened(here.engine(form, precision, setup), here.spec)

    return CandidateForm(here.place.call(load), _file_of(form, precision), ceiling=_ceiling(here), load=load)


@dataclass
class _Originals:
    """The FP32 forms that may serve, each loaded when its turn comes: the one that the spec asks for, or every one
    there is. ``damaged``: a sentence about each that was left out because its file is damaged."""

    here: VersionHere
    damaged: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[CandidateForm]:
        here, version, place = self.here, self.here.version, self.here.place
        for form in _original_forms(here):
            try:
                found = _candidate(here, form, "fp32")
            except Exception as error:
                if out_of_memory(error):
                    logger.warning("%s: %s has no memory for its %s original", version, place.device, form)
                    place.call(free_memory)
                    continue  # a half needs less
                if not isinstance(error, HalfevenError) or form in (here.spec.form, next(iter(ORIGINALS))):
                    raise
                if isinstance(error, DamagedFile):
                    logger.error("%s: %s", version, error)
                    self.damaged.append(str(error))
                continue  # there is another original; `doctor` names the missing provider
            yield found


def _original_forms(here: VersionHere) -> list[str]:
    """The form that the spec asks for, or every one that there is."""
    there = [form for form, file in ORIGINALS.items() if here.version.has(file)]
    return [here.spec.form] if here.spec.form in there else there


def _as_tuned(here: VersionHere, halves: list[CandidateForm]) -> tuple[CandidateForm, str] | None:
    """The winner of `halfeven tune` here, where it is still valid, a half only if it is proven; else None."""
    version, place = here.version, here.place
    tuned = tuned_for(version, place.device) if here.spec.form == "auto" else None
    if tuned is None:
        return None
    winner = tuned.winner
    form, precision = winner.form, winner.precision
    if precision != "fp32" and (form, precision) not in _kinds(halves):
        return None
    engine: Engine | None = None
    try:
        engine = widened(place.call(partial(here.engine, form, precision, winner.setup)), here.spec)
        file, rows = _file_of(form, precision), winner.useful_rows
        chosen = CandidateForm(engine, file, useful_rows=rows, ceiling=_ceiling(here))
        here.warm(chosen)
    except NotReady:  # the server is stopping
        raise
    except Exception:
        logger.exception("the tuned setup of %s does not run here; measuring instead", version)
        if engine is not None:
            place.call(engine.close)
        return None
    for other in halves:
        here.close(other)
    return chosen, str(tuned)
