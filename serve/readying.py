"""Make a version ready for duty: load it, prove its half on this device, choose a form, warm it up.

Everything that touches the device runs on the device thread, one short call after another, so that the
version on duty goes on answering between them.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from ..exporters.reprove import holds_here, reprove
from ..exporters.samples import Samples, load_samples
from ..models.engines.engine import Engine
from ..models.engines.load import load_half, load_whole
from ..models.engines.torch_engine import median_seconds
from ..models.errors import EngineFailed, HalfevenError, NotReady
from ..models.spec import ModelSpec
from ..models.store import Version
from .batching.device import DeviceThread
from .duty import OnDuty

logger = logging.getLogger("halfeven.roster")
T = TypeVar("T")
HALVES = {"torch": "half.pt2", "onnx": "half.onnx", "live": "live.json"}
WHOLES = {"torch": "whole.pt2", "onnx": "whole.onnx", "live": "live.json"}
HALF_MUST_GAIN = 1.1  # times as fast as the best whole, or the whole serves


@dataclass(frozen=True, slots=True)
class Place:
    """Where versions serve, and whether a refused half may be replaced by its FP32 whole."""

    device: torch.device
    thread: DeviceThread
    fallback: bool = True

    def call(self, fn: Callable[[], T]) -> T:
        """Run ``fn`` on the device thread, between two batches, and wait for it."""
        return self.thread.call(fn).result()


@dataclass(slots=True)
class _Candidate:
    engine: Engine
    file: str
    seconds: float = 0.0


def make_ready(version: Version, place: Place, relieves: OnDuty | None = None) -> OnDuty:
    """A loaded, proven and warm version. Blocks for as long as that takes; never on the device thread.

    Where its half is not equal here, its FP32 whole is made ready instead, unless the version ``relieves``
    one on duty, which then stays, or the fall-back is forbidden: NotReady. Raises DamagedFile or EngineFailed
    where nothing of the version can be loaded.
    """
    spec = version.spec()
    samples = load_samples(version.file("samples.safetensors"), spec)
    halves, refusals = _proven_halves(version, spec, samples, place)
    reason = "; ".join(refusals)
    if refusals and relieves is not None:
        raise NotReady(f"{version}: {reason}; version {relieves.version} stays on duty")
    if refusals and not place.fallback:
        raise NotReady(f"{version}: {reason}; serving its FP32 whole is forbidden by --fallback none")
    wanted_form = spec.form in HALVES
    if halves and wanted_form:
        chosen, why = halves[0], f"form = {spec.form!r} asks for it"
        _warm(spec, samples, chosen, place)
    else:
        candidates = [*_wholes(version, spec, place), *halves]
        chosen, why = _fastest(spec, samples, candidates, place)
    return OnDuty(
        version=str(version.number),
        digest=version.manifest["files"][chosen.file],
        precision=chosen.engine.precision,
        engine=chosen.engine,
        reason=reason or why,
    )


def _proven_halves(
    version: Version, spec: ModelSpec, samples: Samples, place: Place
) -> tuple[list[_Candidate], list[str]]:
    """The halves that may serve here (the form that the spec asks for alone, where it does), and refusals."""
    if version.manifest["half"] is None:
        return [], []
    forms = [spec.form] if spec.form in HALVES else ["torch", "onnx"]
    proven, refusals = [], []
    for form in forms:
        if form not in version.manifest["forms"]:
            refusals.append(f"the {form} form was not converted")
            continue
        if not version.manifest["forms"][form]["passed"]:
            refusals.append(f"the {form} form was refused: {version.manifest['reason']}")
            continue
        try:
            proven.append(_proven(version, samples, form, place))
        except Exception as error:  # whatever is wrong with a half, its whole can still serve
            refusals.append(f"the {form} form: {error}")
    return proven, [] if proven else refusals


def _proven(version: Version, samples: Samples, form: str, place: Place) -> _Candidate:
    engine = place.call(partial(load_half, version, form, place.device))
    try:
        if not holds_here(version, place.device):
            report = reprove(version, engine, place.device, samples, place.call)
            if not report.passed:
                raise NotReady(f"not equal on {place.device}: {report.summary()}")
    except BaseException:
        place.call(engine.close)
        raise
    return _Candidate(engine, HALVES[form])


def _wholes(version: Version, spec: ModelSpec, place: Place) -> Iterator[_Candidate]:
    """The FP32 forms that may serve: the one that the spec asks for, or every one there is."""
    wanted = [spec.form] if spec.form in WHOLES and version.has(WHOLES[spec.form]) else list(WHOLES)
    for form in wanted:
        if version.has(WHOLES[form]):
            load: Callable[[], Engine] = partial(load_whole, version, form, place.device)
            try:
                engine = place.call(load)
            except HalfevenError:
                if form == wanted[0]:
                    raise
                continue  # another whole is there; the provider that is missing is named by `doctor`
            yield _Candidate(engine, WHOLES[form])


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
    told = ", ".join(f"{c.engine.form} {c.engine.precision} {c.seconds * 1e3:.3g} ms" for c in candidates)
    return best, f"measured fastest here at batch {max(spec.max_batch_size, 1)}: {told}"


def _running(
    spec: ModelSpec, samples: Samples, candidates: list[_Candidate], place: Place
) -> list[_Candidate]:
    """Those that run here, warm and measured; what fails is closed, and its error raised if nothing is left."""
    running: list[_Candidate] = []
    fault: Exception | None = None
    for candidate in candidates:
        try:
            _warm(spec, samples, candidate, place)
            if len(candidates) > 1:
                run = partial(candidate.engine.run, _batch(spec, samples, spec.max_batch_size))
                candidate.seconds = place.call(partial(median_seconds, run))
            running.append(candidate)
        except Exception as error:
            logger.exception(
                "the %s %s form does not run here", candidate.engine.form, candidate.engine.precision
            )
            place.call(candidate.engine.close)
            fault = error
    if not running:
        raise EngineFailed(f"'{spec.name}' runs in no form on {place.device}: {fault}") from fault
    return running


def _handicapped(candidate: _Candidate) -> float:
    """What is not measured faster is not preferred: a difference within the noise is no gain."""
    return candidate.seconds * (1.0 if candidate.engine.precision == "fp32" else HALF_MUST_GAIN)


def _warm(spec: ModelSpec, samples: Samples, candidate: _Candidate, place: Place) -> None:
    for rows in sorted({1, max(spec.max_batch_size, 1)}):
        place.call(partial(candidate.engine.warm_up, _batch(spec, samples, rows)))


def _batch(spec: ModelSpec, samples: Samples, rows: int) -> list[list[np.ndarray]]:
    _, arrays = next(iter(samples.batches(max(rows, 1) if spec.batched else 0, 1)))
    return [[arrays[tensor.name]] for tensor in spec.inputs]
