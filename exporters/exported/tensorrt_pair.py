"""The two ONNX files of a folder for TensorRT: what it lacks is rewritten in both, and the half is proven again."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...models.errors import ExportFailed, ParityRefused
from ...models.store import Version
from ..inputs.samples import Samples
from ..prove import ReferenceRun
from .onnx_pair import HALF, ORIGINAL, Notify, judge_pair, proof_of
from .tensorrt_operators import LackingOperation, rewrite_for_tensorrt


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
    rewritten = _rewritten(found) or _rewritten(
        of_original
    )  # a value may be too large in one of the files alone
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
            f"with {named} rewritten as operations that TensorRT has the original of {version} was expected to answer as "
            f"before: {error}; {way_out}"
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
