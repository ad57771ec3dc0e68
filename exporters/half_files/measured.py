"""The facts of one half here and now, as ``halfeven.lock`` keeps them: files, libraries, verdict, bits, speed."""

import hashlib
import platform
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np
import onnx
from onnx import external_data_helper

from ...models.engines.cpu.setup import PLAIN, CpuSetup
from ...models.engines.engine import Engine
from ...models.engines.faults import out_of_memory
from ...models.engines.load import load_half, load_original
from ...models.engines.onnx_engine import OnnxEngine
from ...models.errors import BadInput, EngineFailed, OrderEnded
from ...models.machine.processor import hardware
from ...models.machine.usable_cores import usable_cores
from ...models.store.manifest import sha256_of
from ...models.store.store import LIVE, Version
from ...models.version import __version__
from ..inputs.samples import Samples, stored_samples
from ..on_device.environment import environment
from ..on_device.reprove import reprove
from ..onnx.own_layout import batch_in_front
from ..onnx.reading.bounded_file import bytes_of, extent, external_files, read_graph
from ..proof.maker import Notify
from ..proof.prove import answers_of
from ..proof.subject import CPU
from ..proof.threads import fixed_threads
from ..question import REFUSALS, Answers
from ..report.headline import not_run
from .half_file import proof_of

RUNS = 25  # of each side, in turns; the median counts
ROWS = 8  # of the batch whose time is taken
_PIECE = 1 << 20  # bytes of a weight that are in memory at once
# The threads for bits and times: several add sums up in an order that depends on the number of cores, and wait for
# each other where another program has one of the cores.
ONE_THREAD = CpuSetup(threads=1)


@dataclass(frozen=True, slots=True)
class Found:
    """The version that a target names; ``file``: its half, where that is a file with its proof beside it."""

    version: Version
    file: Path | None = None

    @property
    def half(self) -> Path | None:
        """The half's ONNX file; None where the version has none."""
        return self.file or (self.version.folder / "half.onnx" if self.version.has("half.onnx") else None)


def found_file(file: Path) -> Found:
    """A half that `halfeven fp16` wrote. Raises BadInput."""
    return Found(proof_of(file), file)


def measured(
    found: Found, notify: Notify = lambda _: None, form: str | None = None
) -> Iterator[dict[str, Any]]:
    """The facts of each proven form, or of ``form`` alone. Raises BadInput where there is none,
    EngineFailed where one does not run."""
    version = found.version
    passed = [name for name, facts in version.manifest["forms"].items() if facts["passed"]]
    halves = [name for name in passed if version.has(file_of(name))]
    if version.status != LIVE or version.manifest["half"] is None or not passed:
        raise BadInput(f"{version} has no proven half that could be locked: {version.manifest['reason']}")
    if not halves:
        raise BadInput(
            f"{version} has a half in the form {passed[0]} alone, which is no file that could be locked: expected one "
            "in the form torch or onnx; convert the model with --form torch or --form onnx"
        )
    for name in halves:
        if form in (None, name):
            notify(f"proving the {name} form of {version} and measuring it")
            with _refusals_as_engine_failed(version):
                facts = _measured(found, name)
            yield facts


@contextmanager
def _refusals_as_engine_failed(version: Version) -> Iterator[None]:
    """Raises EngineFailed where a half or its original does not run: torch's errors have kinds of their own. An error
    that says that memory or time was lacking is raised as it is: it says nothing about the half."""
    try:
        yield
    except REFUSALS as error:
        if isinstance(error, EngineFailed | OrderEnded) or out_of_memory(error):
            raise
        raise EngineFailed(f"{version} does not run: {error}") from error


def file_of(form: str) -> str:
    """The name of a form's half in its version; empty for a form that has no file."""
    return {"torch": "half.pt2", "onnx": "half.onnx"}.get(form, "")


def _measured(found: Found, form: str) -> dict[str, Any]:
    version = found.version
    samples = stored_samples(version)
    with closing(_half(found, form, PLAIN)) as half:
        report = reprove(version, half, CPU, samples)
    return {
        "form": form,
        "half": version.manifest["half"],
        "file": digest_of(found.file) if found.file else sha256_of(version.folder / file_of(form)),
        "proof": sha256_of(version.folder / "manifest.json"),
        **({} if found.file else {"version": version.number}),
        "weights": _weights(found.half) if form == "onnx" and found.half else {},
        **surroundings(),
        "passed": report.passed,
        "summary": report.summary() + not_run(version.manifest),
        "max_error_u": float(report.max_error_u) if np.isfinite(report.max_error_u) else None,
        **(_bits_and_times(found, form, samples) if report.passed else {"bits": {}, "milliseconds": {}}),
    }


def _half(found: Found, form: str, setup: CpuSetup) -> Engine:
    version = found.version
    if not found.file:
        return load_half(version, form, CPU, setup)
    with batch_in_front(found.file, version.spec()) as file:
        return OnnxEngine(file, version.manifest["half"], CPU, setup)


def _bits_and_times(found: Found, form: str, samples: Samples) -> dict[str, Any]:
    version, spec = found.version, found.version.spec()
    with (
        closing(_half(found, form, ONE_THREAD)) as half,
        closing(load_original(version, form, CPU, ONE_THREAD)) as original,
        fixed_threads(0),  # torch has its threads back after it
    ):
        asked = {"half": answers_of(spec, half), "fp32": answers_of(spec, original)}
        return {
            "bits": {side: _bits(answers, samples, spec.max_batch_size) for side, answers in asked.items()},
            "milliseconds": timed(asked["half"], asked["fp32"], _batch(samples, spec.max_batch_size)),
        }


def surroundings() -> dict[str, Any]:
    """The libraries, the processor and the cores that a half is proven and measured with."""
    packages = {name: metadata.version(name) for name in ("numpy", "onnx")}
    ours = {"halfeven": __version__, "python": platform.python_version(), **packages}
    return {
        "environment": ours | environment(CPU),
        "processor": str(hardware()),
        "cores": usable_cores(),
    }


def _batch(samples: Samples, most: int) -> dict[str, np.ndarray]:
    """The first rows, as many as the model takes up to `ROWS`."""
    return next(samples.batches(min(most, ROWS)))[1]


def _bits(answers: Answers, samples: Samples, most: int) -> str:
    """One digest over the bytes of all answers to the judging samples."""
    digest = hashlib.sha256()
    for _, inputs in samples.split()[1].batches(min(most, ROWS)):
        for name, array in sorted(answers(inputs).items()):
            digest.update(name.encode() + array.tobytes())
    return digest.hexdigest()


def timed(
    half: Answers,
    original: Answers,
    inputs: Mapping[str, np.ndarray],
    clock: Callable[[], float] = thread_time,
) -> dict[str, float]:
    """Milliseconds of one batch by each side: medians of `RUNS` runs in turns, after one that is not counted.

    The clock is the processor's time of this thread, in which an engine of one thread computes: time that another
    program has the core does not count."""
    times = dict[str, list[float]](half=[], fp32=[])
    for run in range(RUNS + 1):
        for side, answers in (("half", half), ("fp32", original)):
            began = clock()
            answers(inputs)
            if run:
                times[side].append(1e3 * (clock() - began))
    return {side: round(statistics.median(found), 4) for side, found in times.items()}


def digest_of(half: Path) -> str:
    """The SHA-256 of an ONNX file; of one with its weights beside it, of the digests of all its files."""
    digests = [sha256_of(half), *map(sha256_of, external_files(half, read_graph(half)).values())]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def _weights(half: Path) -> dict[str, str]:
    """The start of the SHA-256 of each weight of the half's ONNX file, by name: it tells which one was changed."""
    model = onnx.load(half, load_external_data=False)
    return {
        tensor.name: _digest_of_weight(half, tensor)[:16]
        for tensor in model.graph.initializer
        if bytes_of(tensor)
    }


def _digest_of_weight(half: Path, tensor: onnx.TensorProto) -> str:
    """The data of a large half lie in a file beside it, which is read piece by piece; where they lie there does not
    count."""
    if not external_data_helper.uses_external_data(tensor):
        return hashlib.sha256(tensor.SerializeToString()).hexdigest()
    file, offset, left = extent(half, half.parent.resolve(), tensor)
    tensor.ClearField("external_data")
    digest = hashlib.sha256(tensor.SerializeToString())
    with file.open("rb") as data:
        data.seek(offset)
        while left and (piece := data.read(min(left, _PIECE))):
            digest.update(piece)
            left -= len(piece)
    return digest.hexdigest()
