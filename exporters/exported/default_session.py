"""An exported half runs in ONNX Runtime with its default settings, as whoever gets the file runs it.

Each is run so, in a process of its own, before it is handed out: its optimiser does more to a file than that of
halfeven's engine, and one of its passes ends the process (`exporters/onnx/parted_transposes.py`).
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnxruntime

from ...models.errors import ExportFailed, ParityRefused
from ...models.order.one_order import one_order
from ...models.store.store import Version
from ..onnx.output_names import output_names
from ..proof.prove import ReferenceRun, judged
from .file_rows import INPUTS, take_rows
from .onnx_pair import HALF

_CHILD = """
import sys
import numpy as np
import onnxruntime

half, inputs, answers, rows = *sys.argv[1:4], int(sys.argv[4])
onnxruntime.disable_telemetry_events()
session = onnxruntime.InferenceSession(half, providers=["CPUExecutionProvider"])
given = dict(np.load(inputs))
names = [output.name for output in session.get_outputs()]
found = []
for start in range(0, min(map(len, given.values())), rows or 1):
    part = slice(start, start + rows) if rows else (start, ...)  # an array also of a scalar input
    found.append(session.run(names, {name: array[part] for name, array in given.items()}))
join = np.concatenate if rows else np.stack
np.savez(answers, **{name: join([one[place] for one in found]) for place, name in enumerate(names)})
"""


def check_by_default(version: Version, run: ReferenceRun, folder: Path) -> None:
    """Run the half in ``folder`` with default settings on the rows of its proof, and judge its answers.

    Raises ExportFailed where it does not run, ParityRefused where its answers are not equal, OrderEnded.
    """
    spec = version.spec()
    with TemporaryDirectory(prefix="halfeven-export-") as place:
        answers = Path(place) / "answers.npz"
        rows = str(spec.max_batch_size if spec.batched else 0)
        _in_a_child([str(folder / HALF), str(folder / INPUTS), str(answers), rows])
        with np.load(answers) as file:
            taken = take_rows(run, {name: file[own] for name, own in output_names(spec).items()})
    report = judged(run, version.manifest["half"], [taken])
    if not report.passed:
        raise ParityRefused(
            f"the half of {version} is not equal in ONNX Runtime {onnxruntime.__version__} with its default settings: "
            f"{report.summary()}; serve it with halfeven, or convert it again with more in FP32 (--keep)"
        )


def _in_a_child(words: list[str]) -> None:
    command = [sys.executable, "-P", "-c", _CHILD, *words]
    with one_order() as order:
        status, written = order.run(command, "the run of the export's samples by ONNX Runtime")
    if status:
        said = next(iter(written.strip().splitlines()[-1:]), "no reason given")
        why = f"it ends by signal {-status}" if status < 0 else said[:400]
        raise ExportFailed(
            f"ONNX Runtime {onnxruntime.__version__} does not run the half with its default settings: {why}; serve it "
            "with halfeven, which proves each file with the settings that it serves it with"
        )
