"""The gate again, for a version that is in the store: on another device, or for `halfeven parity`."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ...models.engines.cpu.setup import PACKED, CpuSetup
from ...models.engines.engine import Engine
from ...models.engines.load import load_half, load_original
from ...models.store.store import Version
from ..gate.verdict import ParityReport
from ..inputs.samples import Samples
from ..proof.prove import (
    Answers,
    ReferenceRun,
    Taken,
    TieTolerance,
    answers_of,
    ask_reference,
    judged,
    take,
)
from .device_proofs import kernels_of
from .environment import environment

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
OnDevice = Callable[[Callable[[], T]], T]  # runs a call on the device thread, and waits for it


def at_once(call: Callable[[], T]) -> T:
    """Run the call here: where there is no device thread."""
    return call()


def holds_here(version: Version, device: "torch.device | str") -> bool:
    """True if the stored proof was made on this kind of device under these libraries."""
    return version.read("parity.json", itemgetter("environment")) == environment(device)


def reprove(
    version: Version,
    half: Engine,
    device: "torch.device | str",
    samples: Samples,
    on_device: OnDevice[Any] = at_once,
) -> ParityReport:
    """Judge ``half``, loaded on ``device``, against the version's original on the same device.

    ``samples``: those that chose the plan do not judge (`Samples.judging`).
    """
    run = reference_run_of(version, half.precision, device, samples, on_device)
    return judged(run, half.precision, list(_takes(version, half, device, run, on_device)))


def reference_run_of(
    version: Version,
    dtype: str,
    device: "torch.device | str",
    samples: Samples,
    on_device: OnDevice[Any] = at_once,
) -> ReferenceRun:
    """The answers of the version's original on ``device`` to every question of a proof. ``dtype`` is the half's."""
    spec, form = version.spec(), _original_form(version)
    judging = samples.judging
    ties = _tie_tolerance(version, dtype, judging)  # before the original is in memory a second time
    original = on_device(partial(load_original, version, form, device))
    bounded = _bounded(version, judging) if form == "onnx" and str(device) == "cpu" else None
    try:
        return ask_reference(
            spec,
            judging,
            _on(on_device, bounded or answers_of(spec, original)),
            ties,
            version.manifest.get("row_operations") or 0,  # an export of an earlier version says null
            _exact(version, form),
            str(device),
        )
    finally:
        on_device(original.close)


def _original_form(version: Version) -> str:
    """The reference: the program, or what a version has instead (an ONNX file, a live module)."""
    return "torch" if version.has("original.pt2") else "onnx" if version.has("original.onnx") else "live"


def _tie_tolerance(version: Version, dtype: str, judging: Samples) -> TieTolerance | None:
    if not version.has("original.pt2") and version.has("original.onnx"):
        from ..onnx.stored import stored_ties  # brings onnx, which no other form needs here

        return stored_ties(version, dtype, judging)
    if not version.has("original.pt2"):
        return None
    from ...models.engines.torch_engine import original_module
    from ..torch.program_answers import ties_of

    return ties_of(original_module(version), version.spec(), dtype, judging)


def _bounded(version: Version, judging: Samples) -> Answers | None:
    from ..onnx.stored import bounded_original

    return bounded_original(version, judging)


def _exact(version: Version, form: str) -> Answers | None:
    """The original evaluated another way; None for a live module."""
    if form == "live":
        return None
    if form == "torch":
        from ...models.engines.torch_engine import original_module
        from ..torch.program_graph import exact_answers

        return exact_answers(original_module(version), version.spec())
    from ..onnx.stored import stored_original

    return stored_original(version)


def _takes(
    version: Version, half: Engine, device: "torch.device | str", run: ReferenceRun, on_device: OnDevice[Any]
) -> Iterator[Taken]:
    yield take(run, _on(on_device, answers_of(version.spec(), half)))
    yield from _in_other_kernels(version, half, device, run, on_device)
    if half.form == "onnx" and str(device) == "cpu":
        # ONNX Runtime's CPU provider computes FP16 in FP32: the file is judged with true half storage as well
        from ..onnx.stored import stored_oracle

        yield take(run, stored_oracle(version))


def _in_other_kernels(
    version: Version, half: Engine, device: "torch.device | str", run: ReferenceRun, on_device: OnDevice[Any]
) -> Iterator[Taken]:
    """The answers in the kernels that ``half`` is not loaded with, and that a server may choose later without another
    proof."""
    if not kernels_of(half.form, half.precision, device):
        return
    for passes in dict.fromkeys((frozenset[str](), PACKED & half.possible)):
        if passes == half.setup.passes & PACKED:
            continue
        setup = CpuSetup(half.setup.threads, passes)
        other = on_device(partial(load_half, version, half.form, device, setup))
        try:
            yield take(run, _on(on_device, answers_of(version.spec(), other)))
        finally:
            on_device(other.close)


def _on(on_device: OnDevice[Any], answers: Answers) -> Answers:
    def answer(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return on_device(partial(answers, arrays))

    return answer
