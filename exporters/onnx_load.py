"""A load by ONNX Runtime as the engine does it, where a crash costs nobody but a child process.

ONNX Runtime 1.31 segfaults on some valid files with FP16 inside control-flow bodies (a Scan whose body reads
an outer FP16 weight). A file with bodies is therefore loaded in another process first.
"""

import subprocess
import sys
from pathlib import Path

import onnxruntime

from ..models.errors import ExportFailed

_LOAD = """
import sys, onnxruntime
options = onnxruntime.SessionOptions()
options.log_severity_level = 4
onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
"""
_SECONDS = 300


def check_load(path: Path, bodies: bool) -> None:
    """Raise ExportFailed where ONNX Runtime dies of ``path``, or its own error where it refuses it.

    ``bodies``: whether some op of the file runs a graph of its own (If, Loop, Scan).
    """
    if bodies:
        done = subprocess.run(
            [sys.executable, "-c", _LOAD, str(path)],
            capture_output=True, text=True, timeout=_SECONDS, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if done.returncode < 0:
            raise ExportFailed(
                f"ONNX Runtime {onnxruntime.__version__} crashes (signal {-done.returncode}) when it loads {path.name}"
            )
        if done.returncode:
            raise ExportFailed(done.stderr.strip().splitlines()[-1])
        return
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    # optimising is the engine's affair, and so are packed copies of weights
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
