"""Capture: a model folder becomes an exported FP32 program, in a child process, once.

The child (`child.py`) runs the operator's code under a time and a memory limit. It writes an archive, which is checked
like any other before torch opens it here.
"""

import copy
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from torch.export import ExportedProgram, _trace
from torch.fx import GraphModule

from ..archive.archive import load_program
from ..errors import BadFolder, CaptureFailed, DamagedFile
from ..files.tensor_file import save_tensors
from ..folder.package import ModelFolder
from ..index_ranges.input_ranges import with_ranges
from ..machine.usable_cores import prepare_libraries
from ..order.lacking_memory import exit_words, mentions_lacking_memory
from ..order.one_order import one_order
from ..program import runnable, source_line, walk
from ..spec.batch_axis import batch_back
from ..spec.datatypes import DATATYPES
from ..spec.spec import Dim, ModelSpec, TensorSpec
from . import child, describing, failures
from .regions import foreign_op, inline_regions
from .result_file import disk_full, read_result
from .sources import without_compiler

CHILD, DESCRIBING = "halfeven.models.capture.child", "halfeven.models.capture.describing"


@dataclass(frozen=True, slots=True)
class Captured:
    """An FP32 program with its weights, the spec with the sizes that the capture found, notes for the operator, and the
    SHA-256 of each Python file of the operator's that was imported."""

    program: ExportedProgram
    spec: ModelSpec
    notes: tuple[str, ...]
    imported: Mapping[str, str]


def capture(folder: ModelFolder, samples: Mapping[str, np.ndarray]) -> Captured:
    """Run ``folder``'s code on a few samples and trace it.

    ``samples`` holds one array per input, samples first. Raises CaptureFailed with the tail of the user's own traceback
    where the code raises or cannot be traced, OrderEnded where a bound of the order ends it.
    """
    if folder.kind == "onnx":
        raise CaptureFailed(
            f"{folder.folder / folder.source} is an ONNX file: it is converted as the graph that it is, "
            "there is no module to capture"
        )
    with tempfile.TemporaryDirectory(prefix="halfeven-capture-") as name:
        out = Path(name)
        first = {key: np.ascontiguousarray(value[:8]) for key, value in samples.items()}
        save_tensors(out / "samples.safetensors", first)
        request = _request(folder, out)
        result = _result_of(CHILD, request, folder.module)
        weights = load_file(out / "weights.safetensors")  # tied ones are stored once and stay one
        state = {name: weights[stored] for name, stored in result["state"].items()}
        program = normalise(_loaded(out / "program.pt2", state, folder))
    spec = _exact(folder.spec, result["dims"]).with_max_batch_size(result["max_batch_size"])
    spec = with_ranges(_with_outputs(program, spec, folder.guessed is not None), runnable(program))
    return Captured(program, spec, tuple(result["notes"]), result.get("imported", {}))


def describe(
    folder: Path,
    source: str,
    names: Sequence[str],
    samples: Path,
    weights: str | None = None,
    module: nn.Module | None = None,
) -> dict[str, Any]:
    """The inputs and outputs of a source without a model.toml: the result of `describing.py`.

    ``samples``: a safetensors file of example inputs, where ``names`` has some, in forward's order. ``weights``: the
    file of a module's weights, which must fit it. ``module``: as in `ModelFolder`. Raises as `capture` does.
    """
    with tempfile.TemporaryDirectory(prefix="halfeven-describe-") as name:
        request = {
            "folder": str(folder),
            "source": source,
            "path": [],
            "names": list(names),
            "samples": str(samples),
            "weights": weights,
            "out": name,
        }
        return _result_of(DESCRIBING, request, module)


def _result_of(script: str, request: Mapping[str, Any], module: nn.Module | None) -> dict[str, Any]:
    """The result of a script for one request: of a child that runs the operator's code, or, for a module that is alive
    in this process, of this process."""
    if module is not None:
        return result_here(script == CHILD, request, module)
    out = Path(request["out"])
    (out / "request.json").write_text(json.dumps(request))
    return _run_child(script, out, Path(request["folder"]))


def _loaded(path: Path, state: Mapping[str, torch.Tensor], folder: ModelFolder) -> ExportedProgram:
    try:
        return load_program(path, state)
    except DamagedFile as error:
        raise CaptureFailed(
            f"the program captured from {folder.folder} is not one that a server may load: "
            f"{str(error).removeprefix(f'{path}: ')}; write that part of forward with other operations, or serve "
            'the model uncaptured with form = "live"'
        ) from error


def normalise(program: ExportedProgram) -> ExportedProgram:
    """Remove the nodes that tie a program to the device and dtype of its capture.

    ``_assert_tensor_metadata`` pins dtypes and devices. A ``view`` needs the memory layout that the CPU's kernels gave
    its input; other kernels for attention or convolutions give another, and a ``reshape`` takes any. Regions are taken
    in (`regions.py`), control flow stays. Dropout stays: training needs it (`program.runnable` leaves it out). Raises
    CaptureFailed for a construct with a body that is not known.
    """
    inline_regions(program)
    for name, node in list(walk(program.graph_module)):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            node.graph.erase_node(node)
        elif node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
        elif (op := foreign_op(node)) is not None:
            raise CaptureFailed(
                f"the captured program holds '{op}' ('{name}'){source_line(node)}, whose body cannot be "
                'converted: take it out of forward, or serve the model uncaptured with form = "live"'
            )
    for module in program.graph_module.modules():
        if isinstance(module, GraphModule):
            module.recompile()
    return program


def _request(folder: ModelFolder, out: Path) -> dict[str, Any]:
    return {
        "folder": str(folder.folder),
        "source": folder.source,
        "path": [str(path) for path in folder.path],
        "weights": str(folder.weights) if folder.weights else None,
        "samples": str(out / "samples.safetensors"),
        "inputs": [
            {
                "name": t.name,
                "dims": [[dim.minimum, dim.maximum] for dim in t.shape],
                "declared": f"{t.datatype} {t.as_called().describe_shape()}",
            }
            for t in folder.spec.inputs
        ],
        "outputs": [t.name for t in folder.spec.outputs],
        "batch_axes": folder.spec.batch_axes,
        "max_batch_size": folder.spec.max_batch_size,
        "out": str(out),
    }


def _run_child(module: str, out: Path, folder: Path) -> dict[str, Any]:
    # Captured on the CPU: no device constant to remove.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    prepare_libraries(environment)
    code = f"the model code in {folder}"
    with (out / "log").open("w+b") as log, one_order() as order:
        child = order.start(
            [sys.executable, "-PB", "-m", module, str(out / "request.json"), str(os.getpid())],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            child.wait(timeout=order.left_s)
        except subprocess.TimeoutExpired:
            raise order.out_of_time(f"{code} (its last output: {_last_output(out)})") from None
        finally:
            _kill_group(child)
        result = read_result(out)
        if result.get("out_of_memory"):
            raise order.out_of_memory(f"{code} ({result['error']}\n{result['traceback'].rstrip()})")
        if not result and (order.was_killed_for_memory() or mentions_lacking_memory(_last_output(out))):
            raise order.out_of_memory(code)
    if not result:
        raise CaptureFailed(
            f"{code} ended its process ({exit_words(child.returncode)}); its last output: {_last_output(out)}"
        )
    if "error" in result:
        traceback = result["traceback"]
        frames = f"\n{traceback}{_kept(result.get('every_frame', ''))}" if traceback else ""
        raise CaptureFailed(f"the model in {folder} cannot be captured: {result['error']}{frames}")
    return result


def _kept(every_frame: str) -> str:
    """A sentence with the file that has the full traceback; empty where none can be written."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="halfeven-traceback-", suffix=".txt", delete=False, errors="replace"
        ) as file:
            file.write(every_frame)
    except OSError:
        return ""
    return f"the full traceback is in {file.name}"


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    """Kill the child and every process that it started: none outlives the capture."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _last_output(out: Path) -> str:
    with (out / "log").open("rb") as log:  # may be large
        log.seek(max(0, log.seek(0, os.SEEK_END) - 2000))
        text = log.read().decode(errors="replace").strip()
    return "\n" + text if text else "(none)"


def _exact(spec: ModelSpec, found: Sequence[Sequence[Any]]) -> ModelSpec:
    """The spec with the sizes, ranges and equalities of the captured program in its free dimensions.

    Raises BadFolder where model.toml promises sizes that the program does not take.
    """
    names = _equal_names(spec, found)
    inputs = tuple(
        replace(
            tensor, shape=tuple(_exact_dim(spec, tensor, axis, sizes, names) for axis in range(len(sizes)))
        )
        for tensor, sizes in zip(spec.inputs, found, strict=True)
    )
    return replace(spec, inputs=inputs)


def _equal_names(spec: ModelSpec, found: Sequence[Sequence[Any]]) -> dict[str, str]:
    """The program's symbol → the name of all dimensions that have it: the operator's, or the symbol's."""
    names: dict[str, str] = {}
    seen: set[str] = set()
    for tensor, sizes in zip(spec.inputs, found, strict=True):
        for dim, size in list(zip(tensor.shape, sizes, strict=True))[1 if spec.batched else 0 :]:
            if isinstance(size, int):
                continue
            if dim.name is not None:
                names.setdefault(size[0], dim.name)
            elif size[0] in seen and Dim.is_name(size[0]):
                names.setdefault(size[0], size[0])
            seen.add(size[0])
    return names


def _exact_dim(
    spec: ModelSpec, tensor: TensorSpec, axis: int, sizes: Sequence[Any], names: Mapping[str, str]
) -> Dim:
    dim, size = tensor.shape[axis], sizes[axis]
    if dim.fixed or (spec.batched and axis == 0):
        return dim
    symbol, low, high = (None, size, size) if isinstance(size, int) else size
    taken = Dim(low, high, None if symbol is None else names.get(symbol))
    if dim.maximum is not None and not (taken.admits(dim.minimum) and taken.admits(dim.maximum)):
        raise BadFolder(
            f"input '{tensor.name}' of '{spec.name}': model.toml says {dim.to_json()} for axis {axis}, the "
            f"captured program takes {replace(taken, name=None).to_json()} there; write that, or -1"
        )
    high = high if dim.maximum is None else dim.maximum
    return Dim(max(low, dim.minimum), high, taken.name or dim.name)


def _with_outputs(program: ExportedProgram, spec: ModelSpec, guessed: bool) -> ModelSpec:
    """The outputs are what model.toml says: datatype and fixed sizes. Raises BadFolder naming the output.

    Of ``guessed`` ones, seen in two runs, a size that both had is free where the program says so (the number of rows
    that a mask selects).
    """
    nodes, outputs = {node.name: node for node in program.graph.nodes}, list[TensorSpec]()
    names = [
        output.arg.name
        for output in program.graph_signature.output_specs
        if output.kind.name == "USER_OUTPUT"
    ]
    for tensor, name in zip(spec.outputs, names, strict=True):
        value = nodes[name].meta["val"]
        if guessed:
            sizes = zip(tensor.shape, value.shape, strict=False)
            shape = tuple(dim if isinstance(size, int) or not dim.fixed else Dim() for dim, size in sizes)
            tensor = replace(tensor, shape=shape)
        outputs.append(tensor)
        fits = len(value.shape) == len(tensor.shape) and all(
            dim.admits(size) if isinstance(size, int) else not dim.fixed
            for dim, size in zip(tensor.shape, value.shape, strict=True)
        )
        if value.dtype != tensor.type.torch or not fits:
            came = batch_back(value.shape, tensor.batch_axis)
            sizes = ",".join(str(size if isinstance(size, int) else -1) for size in came)
            names = {datatype.torch: datatype.name for datatype in DATATYPES.values()}
            raise BadFolder(
                f"output '{tensor.name}' of '{spec.name}': model.toml says {tensor.datatype} "
                f"{tensor.as_called().describe_shape()}, the model gives {names.get(value.dtype, value.dtype)} "
                f"[{sizes}]: write that under [[outputs]], or change what forward gives"
            )
    return replace(spec, outputs=tuple(outputs))


def result_here(is_captured: bool, request: Mapping[str, Any], module: nn.Module) -> dict[str, Any]:
    """The result of ``child`` for ``module``, or that of ``describing``, in this process: the module is alive here, and
    the caller's own. Raises CaptureFailed.

    The module itself is left as it is: what is traced is a copy with the same weights, not copied where they lie on the
    CPU. Settings of torch that the scripts change are put back.
    """
    asked = {**request, "path": sorted(_folders(module))}
    try:
        with _settings_kept():
            asked["module"] = _copied(module)
            if is_captured:
                return child.captured(torch, asked, Path(request["out"]))
            return describing.looked_at(torch, asked)
    except Exception as error:
        found = failures.described(error, asked)
        if full := found.get("disk_full"):
            raise disk_full(full) from error
        trace = f"\n{found['traceback'].rstrip()}" if found["traceback"] else ""
        raise CaptureFailed(
            f"the module {type(module).__name__} cannot be captured: {found['error']}{trace}"
        ) from error


def _folders(module: nn.Module) -> set[str]:
    """The folders of the code of the module and of its parts that are not torch's: their lines are shown."""
    own = {type(part).forward for part in module.modules() if not type(part).__module__.startswith("torch.")}
    codes = (getattr(forward, "__code__", None) for forward in own)
    return {str(Path(code.co_filename).parent) for code in codes if code is not None}


def _copied(module: nn.Module) -> nn.Module:
    """A copy on the CPU whose parameters share the memory of the module's. Buffers are copied, because a forward may
    write into them, and so are tensors that are plain attributes: `copy.deepcopy` refuses those with a history."""
    module = without_compiler(module)
    if any(one.is_meta for one in (*module.parameters(), *module.buffers())):
        raise failures.Refused("it lies on the device meta, which holds no numbers: load its weights first")
    plain = [one for part in module.modules() for one in vars(part).values() if isinstance(one, torch.Tensor)]
    with torch.no_grad():
        known: dict[int, Any] = {
            id(one): nn.Parameter(one.detach().cpu(), requires_grad=one.requires_grad)
            for one in module.parameters()
            if not isinstance(one, nn.UninitializedParameter)
        }
        known |= {id(one): one.detach().clone().cpu() for one in (*plain, *module.buffers())}
        return copy.deepcopy(module, known)


@contextmanager
def _settings_kept() -> Iterator[None]:
    """Torch's settings that `child.prepare` changes, and its random numbers, are after the block as before it. Warnings
    and log lines of torch about its own tracing are not shown, as those of a child are not; TORCH_LOGS asks for them.
    """
    transformer = sys.modules["torch.nn.modules.transformer"]
    causal, fast = vars(transformer)["_detect_is_causal_mask"], torch.backends.mha.get_fastpath_enabled()
    logs = [] if "TORCH_LOGS" in os.environ else _torch_s_handlers()
    levels, tracing = [handler.level for handler in logs], vars(sys.modules[_trace.__name__])
    try:
        for handler in logs:
            handler.setLevel(logging.ERROR)
        tracing["print"] = lambda *_, **__: None  # it writes the graph so far to stderr
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        tracing.pop("print", None)
        for handler, level in zip(logs, levels, strict=True):
            handler.setLevel(level)
        vars(transformer)["_detect_is_causal_mask"] = causal
        torch.backends.mha.set_fastpath_enabled(fast)


def _torch_s_handlers() -> list[logging.Handler]:
    """All that write torch's log lines: most of its loggers have one of their own."""
    named = [one for name, one in logging.root.manager.loggerDict.items() if f"{name}.".startswith("torch.")]
    return [handler for one in named if isinstance(one, logging.Logger) for handler in one.handlers]
