"""Gives for each engine the exact command that builds the exported half, and a program that answers a file's rows.

Sources: TensorRT 10 and 11, trtexec (strongly typed networks; 11 has no other); ONNX Runtime's Python API; OpenVINO,
"Precision Control" and "Conversion Parameters" (ovc rounds all weights to FP16 unless it is forbidden).
"""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...models.spec.spec import Dim, ModelSpec, TensorSpec
from ..inputs.synthetic import longest
from .file_rows import INPUTS

ANSWERS = "answers.npz"
TENSORRT = "tensorrt"
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Commands:
    """``build``: a shell command, ``notes``: what it must not change; ``asks``: a Python program, may be empty."""

    build: str
    notes: str
    asks: str = ""


def commands_for(engine: str, spec: ModelSpec, samples: Shapes, by_row: bool = False) -> Commands:
    """``samples``: the shape of one sample of each input, which free dimensions are optimised for. ``by_row``: the
    answers differ in shape from row to row, so that their file has an array for each (`file_rows.py`)."""
    return BY_ENGINE[engine](spec, samples, by_row)


def profile_of(spec: ModelSpec, samples: Shapes) -> dict[str, tuple[list[int], list[int], list[int]]]:
    """Least, usual and largest shape of each input that has a free size: what the proof asks of an engine."""
    free = [tensor for tensor in spec.inputs if not all(dim.fixed for dim in tensor.shape)]
    return {
        tensor.name: (
            _shape(spec, tensor, samples[tensor.name], "min"),
            _shape(spec, tensor, samples[tensor.name], "opt"),
            _shape(spec, tensor, samples[tensor.name], "max"),
        )
        for tensor in free
    }


def _tensorrt(spec: ModelSpec, samples: Shapes, by_row: bool) -> Commands:
    words = ["trtexec", "--onnx=half.onnx", "--stronglyTyped", "--noTF32"]
    profile = profile_of(spec, samples)
    for place, kind in enumerate(("min", "opt", "max") if profile else ()):
        named = (f"{name}:{'x'.join(map(str, shapes[place]))}" for name, shapes in profile.items())
        words.append(f"--{kind}Shapes={','.join(named)}")
    return Commands(
        _lines([*words, "--saveEngine=half.engine"]),
        "The precision of every tensor is in the file, and a strongly typed network keeps it: no `--fp16`, `--best`\n"
        "or `--int8`; `--noTF32` keeps the FP32 part FP32. TensorRT 11 has strongly typed networks alone and takes\n"
        "`--stronglyTyped` without effect. The tool of TensorRT-RTX is called `tensorrt_rtx`.",
    )


def _onnxruntime(spec: ModelSpec, samples: Shapes, by_row: bool) -> Commands:
    program = """
        import numpy as np
        import onnxruntime

        session = onnxruntime.InferenceSession(
            "half.onnx",
            providers=[("CUDAExecutionProvider", {"use_tf32": "0"}), "CPUExecutionProvider"],
        )
        """
    return Commands(
        "pip install onnxruntime-gpu",
        "There is nothing to build. `use_tf32` 0 keeps the FP32 part FP32. Do not run a float16 converter over the\n"
        "file: it is converted.",
        program + _answer_rows(spec, "session.run(None, {rows})", by_row),
    )


def _openvino(spec: ModelSpec, samples: Shapes, by_row: bool) -> Commands:
    program = """
        import numpy as np
        import openvino

        model = openvino.Core().compile_model("half.xml", "CPU", {"EXECUTION_MODE_HINT": "ACCURACY"})
        """
    return Commands(
        "ovc half.onnx --compress_to_fp16=False --output_model half.xml",
        "`--compress_to_fp16=False` matters: without it every weight that is kept in FP32 is rounded to FP16.\n"
        "So does `ACCURACY` in the program below: without it the device chooses the precision of every node.",
        program + _answer_rows(spec, "list(model({rows}).values())", by_row),
    )


BY_ENGINE: dict[str, Callable[[ModelSpec, Shapes, bool], Commands]] = {
    TENSORRT: _tensorrt,
    "onnxruntime": _onnxruntime,
    "openvino": _openvino,
}


def _answer_rows(spec: ModelSpec, call: str, by_row: bool) -> str:
    """The rest of a program: the rows of the file in batches, and the answers as a file."""
    step = max(spec.max_batch_size, 1)
    rows = f"start : start + {step}" if spec.batched else "start, ..."  # an array also of a scalar input
    join = "concatenate" if spec.batched else "stack"
    fed = f"{{name: array[{rows}] for name, array in inputs.items()}}"
    saved = f"{{name: np.{join}(part) for name, part in zip(names, zip(*parts))}}"
    if by_row:
        each = "(row for array in part for row in array)" if spec.batched else "part"
        saved = f'{{f"{{name}}[{{i}}]": row for name, part in zip(names, zip(*parts)) for i, row in enumerate({each})}}'
    return f"""
        names = {[tensor.name for tensor in spec.outputs]}
        inputs = dict(np.load("{INPUTS}"))
        count = len(next(iter(inputs.values())))
        parts = [{call.format(rows=fed)} for start in range(0, count, {step})]
        np.savez("{ANSWERS}", **{saved})
        """


def _shape(spec: ModelSpec, tensor: TensorSpec, sample: tuple[int, ...], kind: str) -> list[int]:
    """The sizes of an input in an optimisation profile."""
    batch = {"min": 1, "opt": spec.max_batch_size, "max": spec.max_batch_size}[kind]
    inner = tensor.shape[1:] if spec.batched else tensor.shape
    return [
        *([batch] if spec.batched else []),
        *(_size(dim, seen, kind) for dim, seen in zip(inner, sample, strict=True)),
    ]


def _size(dim: Dim, seen: int, kind: str) -> int:
    if dim.fixed:
        return dim.minimum
    return {"min": max(dim.minimum, 1), "opt": seen, "max": longest(dim, seen)}[kind]


def _lines(words: list[str]) -> str:
    return " \\\n  ".join(map(shlex.quote, words))
