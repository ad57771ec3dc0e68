"""Capture: a model folder becomes an exported FP32 program, in a child process, once.

The child (`capture_child.py`) runs the operator's code under a time and a memory limit; what comes back is
an archive that is checked like any other before torch opens it here.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from torch.export import ExportedProgram

from .archive import load_program
from .errors import BadFolder, CaptureFailed
from .package import ModelFolder
from .spec import Dim, ModelSpec, TensorSpec

CHILD = Path(__file__).with_name("capture_child.py")


@dataclass(frozen=True, slots=True)
class Limits:
    """What the operator's code may use: seconds of wall time, bytes of private memory (0: no limit)."""

    seconds: float = 600.0
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Captured:
    """An FP32 program with its weights, the spec made exact by what the capture found, and what to tell."""

    program: ExportedProgram
    spec: ModelSpec
    notes: tuple[str, ...]


def capture(folder: ModelFolder, samples: Mapping[str, np.ndarray], limits: Limits | None = None) -> Captured:
    """Run ``folder``'s code on a few samples and trace it.

    ``samples`` holds one array per input, samples first. Raises CaptureFailed with the tail of the user's
    own traceback where the code raises, hangs, eats memory, or cannot be traced.
    """
    limits = limits or Limits(memory_bytes=_most_of_the_memory())
    with tempfile.TemporaryDirectory(prefix="halfeven-capture-") as name:
        out = Path(name)
        save_file(
            {key: np.ascontiguousarray(value[:8]) for key, value in samples.items()},
            out / "samples.safetensors",
        )
        request = _request(folder, out, limits)
        (out / "request.json").write_text(json.dumps(request))
        result = _run_child(out, folder, limits)
        program = normalise(load_program(out / "program.pt2"))
    spec = _exact(folder.spec, result["dims"]).with_max_batch_size(result["max_batch_size"])
    _check_outputs(program, spec)
    return Captured(program, spec, tuple(result["notes"]))


def normalise(program: ExportedProgram) -> ExportedProgram:
    """Take out what ties a program to where and in which dtype it was captured.

    ``_assert_tensor_metadata`` pins dtypes and devices. Dropout stays: training needs it (`program.runnable`
    leaves it out). Raises CaptureFailed for a region that the policy cannot look into yet.
    """
    for node in list(program.graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            program.graph.erase_node(node)
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            raise CaptureFailed(
                f"the captured program holds '{node.target.name()}', whose body is not converted yet "
                "(autocast regions and control flow): take it out of forward, or serve the model in FP32"
            )
    program.graph_module.recompile()
    return program


def _request(folder: ModelFolder, out: Path, limits: Limits) -> dict[str, Any]:
    return {
        "folder": str(folder.folder),
        "source": folder.source,
        "path": [str(path) for path in folder.path],
        "weights": str(folder.weights) if folder.weights else None,
        "samples": str(out / "samples.safetensors"),
        "inputs": [
            {"name": t.name, "dims": [[dim.minimum, dim.maximum] for dim in t.shape]}
            for t in folder.spec.inputs
        ],
        "outputs": [t.name for t in folder.spec.outputs],
        "max_batch_size": folder.spec.max_batch_size,
        "memory_limit_bytes": limits.memory_bytes,
        "out": str(out),
    }


def _run_child(out: Path, folder: ModelFolder, limits: Limits) -> dict[str, Any]:
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
    }  # captured on the CPU: no device constant to remove
    with (out / "log").open("w+b") as log:
        child = subprocess.Popen(
            [sys.executable, "-P", str(CHILD), str(out / "request.json")],
            cwd=folder.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            child.wait(timeout=limits.seconds)
        except subprocess.TimeoutExpired:
            raise CaptureFailed(
                f"the model code in {folder.folder} did not finish within {limits.seconds:g} s and was stopped; "
                f"its last output: {_last_output(out)}"
            ) from None
        finally:
            _kill_group(child)
    result_file = out / "result.json"
    if not result_file.is_file():
        raise CaptureFailed(
            f"the model code in {folder.folder} ended its process (exit status {child.returncode}); "
            f"its last output: {_last_output(out)}"
        )
    result = json.loads(result_file.read_text())
    if "error" in result:
        told = f"\n{result['traceback'].rstrip()}" if result["traceback"] else ""
        raise CaptureFailed(f"the model in {folder.folder} cannot be captured: {result['error']}{told}")
    return result


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    """The child and whatever it started: nothing of the user's code outlives the capture."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.wait()


def _last_output(out: Path) -> str:
    text = (out / "log").read_bytes()[-2000:].decode(errors="replace").strip()
    return "\n" + text if text else "(none)"


def _most_of_the_memory() -> int:
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 0.8)


def _exact(spec: ModelSpec, found: Sequence[Sequence[Any]]) -> ModelSpec:
    """The spec with the sizes, ranges and equalities of the captured program in its free dimensions."""
    inputs = tuple(
        replace(
            tensor,
            shape=tuple(
                _exact_dim(spec, tensor, axis, dim, found[i][axis]) for axis, dim in enumerate(tensor.shape)
            ),
        )
        for i, tensor in enumerate(spec.inputs)
    )
    return replace(spec, inputs=inputs)


def _exact_dim(spec: ModelSpec, tensor: TensorSpec, axis: int, dim: Dim, found: Any) -> Dim:
    if dim.fixed or (spec.batched and axis == 0):
        return dim
    if isinstance(found, int):
        return Dim(found, found)
    symbol, low, high = found
    if dim.maximum is not None:  # the operator's own bounds are within the program's: the export held them
        return dim
    return Dim(max(low, dim.minimum), high, dim.name or (symbol if symbol.isidentifier() else None))


def _check_outputs(program: ExportedProgram, spec: ModelSpec) -> None:
    """The outputs are what model.toml says: datatype and fixed sizes. Raises BadFolder naming the output."""
    nodes = {node.name: node for node in program.graph.nodes}
    names = [
        output.arg.name
        for output in program.graph_signature.output_specs
        if output.kind.name == "USER_OUTPUT"
    ]
    for tensor, name in zip(spec.outputs, names, strict=True):
        value = nodes[name].meta["val"]
        fits = len(value.shape) == len(tensor.shape) and all(
            not isinstance(size, int) or dim.admits(size)
            for dim, size in zip(tensor.shape, value.shape, strict=True)
        )
        if value.dtype != tensor.type.torch or not fits:
            came = f"{str(value.dtype).removeprefix('torch.')} {[str(s) for s in value.shape]}"
            raise BadFolder(
                f"output '{tensor.name}' of '{spec.name}': model.toml says {tensor.datatype} "
                f"{tensor.describe_shape()}, the model gives {came}"
            )
