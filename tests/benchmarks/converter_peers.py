"""Other people's converters, each behind the same door: a worker that converts one ONNX file a line.

    python converter_peers.py NAME

It runs in an interpreter that has the converter (by path: the project need not be there). A line on standard
input is a job ``{source, target, calibration}``, a line on standard output what became of it; the first line
says whether the converter is there and which version. ``calibration`` is a folder of .npz batches. A conversion
that takes more processor time than `LIMIT_SECONDS` ends the process.
"""

import importlib
import importlib.metadata
import json
import os
import resource
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Job = Mapping[str, Any]
Convert = Callable[[Job], None]
Loaded = tuple[Convert, str]  # the converter and its version

LIMIT_SECONDS = 300  # of processor time for one model: how busy the machine is changes no verdict
AUTO_TOLERANCES = {"rtol": 0.01, "atol": 0.001}  # those of its documentation; it has no defaults


def serve(load: Callable[[], Loaded], prepare: Callable[[Job], object] = lambda job: None) -> None:
    """Answer jobs until standard input ends; whatever a converter prints goes nowhere.

    ``prepare`` does what is not the converter's work, and is not timed.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def notify(answer: Mapping[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    try:
        convert, version = load()
    except ImportError as error:
        notify({"missing": str(error)})
        return
    notify({"version": version})
    for line in sys.stdin:
        prepare(job := json.loads(line))
        notify(_done(convert, job))


def _done(convert: Convert, job: Job) -> dict[str, Any]:
    start = _processor_seconds()
    resource.setrlimit(resource.RLIMIT_CPU, (int(start) + LIMIT_SECONDS, resource.RLIM_INFINITY))
    try:
        convert(job)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {str(error)[:300]} ({Path(where.filename).name}:{where.lineno})"
        return {"error": reason, "seconds": _processor_seconds() - start}
    return {"seconds": _processor_seconds() - start}


def _processor_seconds() -> float:
    """The processor seconds of all threads and ended children: they do not depend on how busy the machine is."""
    return sum(os.times()[:4])


def onnxruntime_float16() -> Loaded:
    float16 = importlib.import_module("onnxruntime.transformers.float16")
    version = importlib.import_module("onnxruntime").__version__  # its distribution has several names
    return _by_model(float16.convert_float_to_float16), f"onnxruntime {version}"


def onnxconverter_float16() -> Loaded:
    float16 = importlib.import_module("onnxconverter_common.float16")
    return _by_model(float16.convert_float_to_float16), _version("onnxconverter-common")


def _by_model(to_half: Callable[..., Any]) -> Convert:
    onnx = importlib.import_module("onnx")

    def convert(job: Job) -> None:
        onnx.save(to_half(onnx.load(job["source"]), keep_io_types=True), job["target"])

    return convert


def onnxconverter_auto() -> Loaded:
    onnx, numpy = importlib.import_module("onnx"), importlib.import_module("numpy")
    auto = importlib.import_module("onnxconverter_common.auto_mixed_precision")

    def convert(job: Job) -> None:
        with numpy.load(min(Path(job["calibration"]).iterdir())) as arrays:
            feed = dict(arrays)
        model = onnx.load(job["source"])
        half = auto.auto_convert_mixed_precision(model, feed, keep_io_types=True, **AUTO_TOLERANCES)
        onnx.save(half, job["target"])

    return convert, _version("onnxconverter-common")


def modelopt(calibrated: bool) -> Loaded:
    onnx = importlib.import_module("onnx")
    autocast = importlib.import_module("modelopt.onnx.autocast")

    def convert(job: Job) -> None:
        data = job["calibration"] if calibrated else None
        half = autocast.convert_to_mixed_precision(job["source"], keep_io_types=True, calibration_data=data)
        onnx.save(half, job["target"])

    return convert, _version("nvidia-modelopt")


def _version(distribution: str) -> str:
    return f"{distribution} {importlib.metadata.version(distribution)}"


PEERS: dict[str, Callable[[], Loaded]] = {
    "onnxruntime float16": onnxruntime_float16,
    "onnxconverter float16": onnxconverter_float16,
    "onnxconverter auto": onnxconverter_auto,
    "modelopt calibrated": lambda: modelopt(calibrated=True),
    "modelopt uncalibrated": lambda: modelopt(calibrated=False),
}


if __name__ == "__main__":
    serve(PEERS[sys.argv[1]])
