"""Checks that an ONNX file is valid and loads; large files and control flow are checked in another process.

A full check has a large file in memory several times, and ONNX Runtime 1.31 segfaults on some valid files with FP16
inside control-flow bodies (a Scan whose body reads an outer FP16 weight). A small file without bodies is checked in
this process.
"""

import sys
from pathlib import Path

import onnx
import onnxruntime

from ....models.engines.onnx_engine import DEADLY_IN_HALF
from ....models.errors import ExportFailed
from ....models.order.one_order import one_order

LARGE = 2**26  # bytes
_CHILD = """
import sys, onnx, onnxruntime
onnx.checker.check_model(sys.argv[1], full_check=True)
options = onnxruntime.SessionOptions()
options.log_severity_level = 4
options.intra_op_num_threads = 1
if sys.argv[2] == "plain":
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
onnxruntime.InferenceSession(
    sys.argv[1], options, providers=["CPUExecutionProvider"], disabled_optimizers=sys.argv[3:]
)
"""


def check_file(path: Path, bodies: bool) -> None:
    """``onnx.checker``'s full check (shapes are inferred strictly) and a load by ONNX Runtime.

    ``bodies``: whether some op runs a graph of its own (If, Loop, Scan): then the load optimises, as the
    engine's will. Raises ExportFailed where the check or ONNX Runtime refuses the file or crashes, and OrderEnded.
    """
    if bodies or path.stat().st_size >= LARGE:
        _check_elsewhere(path, bodies)
        return
    onnx.checker.check_model(str(path), full_check=True)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1  # it is not run
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _check_elsewhere(path: Path, bodies: bool) -> None:
    command = [
        sys.executable,
        "-P",
        "-c",
        _CHILD,
        str(path),
        "bodies" if bodies else "plain",
        *DEADLY_IN_HALF,
    ]
    with one_order() as order:
        status, said = order.run(command, f"the check of {path.name} and its load by ONNX Runtime")
    if status < 0:
        raise ExportFailed(
            f"ONNX Runtime {onnxruntime.__version__} crashes (signal {-status}) when it loads {path.name}"
        )
    if status:
        raise ExportFailed(next(iter(said.strip().splitlines()[-1:]), "no reason given"))
