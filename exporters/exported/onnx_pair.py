"""The two ONNX files of a version, original and half: of the store, or written from its programs and proven now.

For TensorRT what it lacks is rewritten in both, and the half is proven again.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...models.engines.cpu.setup import CpuSetup
from ...models.engines.onnx_engine import OnnxEngine
from ...models.errors import BadInput, ExportFailed, ParityRefused
from ...models.store.store import LIVE, Version
from ..gate.verdict import ParityReport
from ..inputs.samples import Samples
from ..on_device.environment import environment
from ..onnx.reading.large_files import DATA
from ..onnx.stored import half_file_on_cpu
from ..proof.prove import ReferenceRun, answers_of, check_original_form, judged
from ..proof.subject import CPU
from ..proof.threads import threads_now
from .tensorrt_operators import LackingOperation, rewrite_for_tensorrt

ORIGINAL, HALF = "original.onnx", "half.onnx"
Notify = Callable[[str], None]


def check_exportable(version: Version) -> None:
    """Raises ParityRefused, BadInput or ExportFailed where the version has no proven half that ONNX can hold."""
    reason = version.manifest["reason"]
    if version.status != LIVE:
        raise ParityRefused(
            f"{version} was refused by the parity gate, so no engine is given its half: {reason}; convert the model "
            "again with more in FP32 (--keep, --search, a lower level), or export an older version"
        )
    if version.manifest["half"] is None:
        raise BadInput(
            f"{version} has no half to export: {reason}; convert the model at a level that has one (--level O1), "
            "or give the engine the FP32 model itself"
        )
    if not (version.has(HALF) or version.has("half.pt2")):
        raise ExportFailed(
            f"{version} has the live form alone, and the code of a live module cannot be written as ONNX; export a "
            'version whose model torch.export captures (without form = "live")'
        )


def put_pair(version: Version, run: ReferenceRun, folder: Path, notify: Notify) -> dict[str, Any]:
    """Put both files into ``folder``; gives the proof of the half, as ``parity.json`` has it.

    ``run``: the reference run of the version on a CPU. Of a version that has the torch form alone both are written:
    raises ExportFailed where its programs cannot be, ParityRefused where the half that was written is not equal.
    """
    if version.has(HALF) and version.manifest["forms"]["onnx"]["passed"]:
        for name in (ORIGINAL, HALF, ORIGINAL + DATA, HALF + DATA):
            if version.has(name):
                with version.opened(name) as file:
                    # the ONNX file names its data file
                    shutil.copyfile(file.again, folder / (file.path.name if name.endswith(DATA) else name))
        return version.read(
            "parity.json",
            lambda proof: {"environment": proof["environment"], "forms": {"onnx": proof["forms"]["onnx"]}},
        )
    return _written(version, run, folder, notify)


def judge_pair(version: Version, run: ReferenceRun, folder: Path) -> ParityReport:
    """The gate's report on the half in ``folder``. Raises ExportFailed where the original there does not answer as the
    version's does."""
    spec, dtype = version.spec(), version.manifest["half"]
    original = OnnxEngine(folder / ORIGINAL, "fp32", CPU, CpuSetup(threads_now()))
    check_original_form(run, answers_of(spec, original))
    del original  # its weights need not lie beside the half's
    _, taken = half_file_on_cpu(folder / HALF, spec, dtype, run)
    return judged(run, dtype, taken)


def proof_of(report: ParityReport) -> dict[str, Any]:
    """The report on a half file that was judged now, as ``parity.json`` has it."""
    return {"environment": environment(CPU), "forms": {"onnx": report.to_json()}}


def _written(version: Version, run: ReferenceRun, folder: Path, notify: Notify) -> dict[str, Any]:
    from ...models.engines.torch_engine import half_program, original_program
    from ..torch.onnx_form.export import write_onnx

    spec, dtype = version.spec(), version.manifest["half"]
    notify(f"{version} has the torch form alone: writing its programs as ONNX")
    write_onnx(original_program(version), spec, folder / ORIGINAL, {"model": spec.name, "precision": "fp32"})
    kept = version.read("precision.json", lambda plan: ",".join(kept["node"] for kept in plan["kept"]))
    about = {"model": spec.name, "precision": dtype, "kept": kept}
    write_onnx(half_program(version), spec, folder / HALF, about)
    notify("proving the ONNX form")
    report = judge_pair(version, run, folder)
    if not report.passed:
        raise ParityRefused(
            f"the ONNX form of {version} is not equal, so it is not exported: {report.summary()}; convert the model "
            "again with --form onnx, which searches for what must stay in FP32 there"
        )
    return proof_of(report)


def suit_tensorrt(
    version: Version, run: ReferenceRun, samples: Samples, folder: Path, notify: Notify
) -> tuple[list[LackingOperation], dict[str, Any] | None]:
    """The operations of the half that TensorRT lacks, and the proof of the half as it is now: None where nothing was
    rewritten, and its proof still holds.

    ``run``: the reference run of the version on a CPU; ``samples``: the version's. Raises ParityRefused where the half
    is not equal any more, ExportFailed where the original does not answer as the version's does.
    """
    rows = version.spec().max_batch_size
    of_original = rewrite_for_tensorrt(folder / ORIGINAL, samples, rows)
    found = rewrite_for_tensorrt(folder / HALF, samples, rows)
    for operation in found:
        if operation.left_because:
            notify(f"TensorRT lacks {operation.operation}, which stays as it is: {operation.left_because}")
    # A value may be too large in one of the files alone.
    rewritten = _rewritten(found) or _rewritten(of_original)
    if not rewritten:
        return found, None
    notify(f"proving the half again: {_named(rewritten)} rewritten as operations that TensorRT has")
    return found, _proven_again(version, run, folder, _named(rewritten))


def _proven_again(version: Version, run: ReferenceRun, folder: Path, named: str) -> dict[str, Any]:
    way_out = "export it for onnxruntime (--for onnxruntime), whose files are not rewritten"
    try:
        report = judge_pair(version, run, folder)
    except ExportFailed as error:
        raise ExportFailed(
            f"with {named} rewritten as operations that TensorRT has the original of {version} was expected to answer "
            f"as before: {error}; {way_out}"
        ) from error
    if not report.passed:
        raise ParityRefused(
            f"with {named} rewritten as operations that TensorRT has the half of {version} was expected to be equal to "
            f"its original, and it is not: {report.summary()}; {way_out}"
        )
    return proof_of(report)


def _rewritten(operations: Sequence[LackingOperation]) -> list[LackingOperation]:
    return [operation for operation in operations if not operation.left_because]


def _named(operations: Sequence[LackingOperation]) -> str:
    counts = Counter(sorted(operation.operation for operation in operations))
    return ", ".join(f"{count} {name}" for name, count in counts.items())
