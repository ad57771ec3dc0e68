"""A foreign ONNX file on the road: FP32 in, half with FP32-kept nodes out, the FP32 set searched for on the oracle.

`convert_onnx` gives both graphs and the facts; `whole_answers`, `half_answers` and `oracle_answers` are what the
exam and the gate (`prove.py`, `gate/parity.py`) ask. ONNX Runtime's CPU never judges half storage; the oracle does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import ModelProto, NodeProto, ValueInfoProto, helper

from ...models.engines.onnx_engine import DEADLY_IN_HALF
from ...models.errors import BadFolder, CannotConvert, ExportFailed
from ...models.package import ModelFolder, Precision
from ...models.spec import ModelSpec
from ..autocast.plan import Kept
from ..inputs.samples import Samples
from ..inputs.synthetic import generate
from ..search.delta_debugging import NOT_ASKED, Budget, Found
from ..search.ranking import RANKED, ranks
from ..threads import fixed_threads
from .file_operations import file_operations
from .graph import BODIES, FLOATING, ForeignProgram, assembled, size_in_bytes, walk
from .index_ranges import with_ranges
from .normalise import normalise
from .oracle import Oracle, to_half_and_back, to_mantissa
from .planning import Planned, plan_half
from .reading import read_model
from .rewrite import HalfGraph
from .signature import hold
from .trials import PLANNING_SAMPLES, answers_alone_differ
from .typing import value_types
from .weights import Entry

Arrays = Mapping[str, np.ndarray]
Answers = Callable[[Arrays], dict[str, np.ndarray]]
Say = Callable[[str], None]

SEARCH = Budget(evaluations=400, operations=1 << 41)
_SMALL_MODEL, _SMALL_CONSTANT = 1 << 20, 1 << 12  # bytes


@dataclass(frozen=True, slots=True)
class ForeignHalf:
    """What became of a foreign file. ``half`` is None where nothing in it is half; then the whole serves.

    ``nodes`` counts the whole's that give floating results (casts between floating types do not count),
    ``half_nodes`` those that compute in half, ``fp32_by_policy`` those in FP32 by list, by the file's own word or
    because half never reaches them; ``casts`` those of the half between floating types, the file's own too;
    ``bytes`` are those of the constants. ``search``: `delta_debugging.outcome`. ``row_operations``: an estimate for
    one row (`operations.py`).
    """

    spec: ModelSpec
    precision: Precision
    program: ForeignProgram
    half_graph: HalfGraph | None
    kept: tuple[Kept, ...]
    nodes: int
    half_nodes: int
    fp32_by_policy: int
    casts: int
    bytes: int
    bytes_fp32: int
    ledger: tuple[Entry, ...]
    found: Found | None
    notes: tuple[str, ...]
    whole_info: tuple[ValueInfoProto, ...]
    half_info: tuple[ValueInfoProto, ...]
    row_operations: int = 0
    search: str = NOT_ASKED

    @property
    def whole(self) -> ModelProto:
        """The FP32 file. Put together at every call: a model is not held in memory twice."""
        return assembled(self.program.model, self.program.weights, self.whole_info)

    @property
    def half(self) -> ModelProto | None:
        """The half file, or None where nothing is half. Put together at every call."""
        graph = self.half_graph
        return assembled(graph.model, graph.weights, self.half_info) if graph else None


def convert_onnx(
    model_path: Path,
    folder: ModelFolder,
    planning: Samples,
    precision: Precision,
    say: Say = lambda _: None,
    budget: Budget = SEARCH,
) -> ForeignHalf:
    """Read, hold against model.toml, normalise, plan, search, rewrite, check.

    ``planning``: samples that choose the FP32 set (disjoint from those that judge); without any they are
    generated. Raises BadFolder, TooLarge or BadSetting for what the operator can mend, ExportFailed where
    ONNX Runtime cannot load what came out.
    """
    program, spec, notes = read_foreign(model_path, folder)
    whole = assembled(program.model, program.weights)
    whole_info = finished(whole, f"{model_path}")
    say(f"{model_path.name}: {len(program.nodes)} nodes at opset {program.opset}")
    planning = planning if planning.count else generate(spec)
    planning = planning.take(slice(0, RANKED if ranks(spec) else PLANNING_SAMPLES))
    _, row = next(planning.batches(1 if spec.batched else 0))
    operations = file_operations(program, row)
    with fixed_threads(operations.of(row)):
        answers = runtime_answers(whole)
        del whole
        if spec.max_batch_size > 1 and (reason := answers_alone_differ(spec, planning, answers)):
            spec, notes = spec.with_max_batch_size(1), [*notes, f"max_batch_size is 1: {reason}"]
        planned = plan_half(program, spec, precision, planning, answers, budget, say, operations)
        del answers  # and with it a copy of the weights
    half_info: tuple[ValueInfoProto, ...] = ()
    if planned.graph is not None:
        half = assembled(planned.graph.model, planned.graph.weights)
        half_info = finished(half, f"the half of {model_path.name}", ExportFailed)
    found = _told(program, spec, precision, planned, notes, whole_info, half_info)
    return replace(found, row_operations=operations.of(row))


def read_foreign(model_path: Path, folder: ModelFolder) -> tuple[ForeignProgram, ModelSpec, list[str]]:
    """The file as a program of ours, the exact spec, and what to tell. Nothing has been run."""
    model = read_model(model_path, folder.folder)
    try:
        program = normalise(model, model_path)
    except ValueError as error:
        raise BadFolder(f"{model_path}: {error}") from error
    spec, notes = hold(program.model, folder.spec, model_path)
    return program, with_ranges(spec, program), [*program.notes, *notes]


def _told(
    program: ForeignProgram,
    spec: ModelSpec,
    precision: Precision,
    planned: Planned,
    notes: list[str],
    whole_info: tuple[ValueInfoProto, ...],
    half_info: tuple[ValueInfoProto, ...],
) -> ForeignHalf:
    nodes = [node for node in program.nodes if _gives_floats(node, program.types)]
    half = sum(node.name in planned.half for node in nodes)
    held = {kept.node for kept in planned.kept}
    weights = planned.graph.weights if planned.graph else program.weights
    return ForeignHalf(
        spec=spec,
        precision=precision,
        program=program,
        half_graph=planned.graph,
        kept=planned.kept,
        nodes=len(nodes),
        half_nodes=half,
        fp32_by_policy=len(nodes) - half - sum(node.name in held for node in nodes),
        casts=_casts(planned.graph) if planned.graph else 0,
        bytes=size_in_bytes(weights.values()),
        bytes_fp32=size_in_bytes(program.weights.values()),
        ledger=planned.ledger,
        found=planned.found,
        search=planned.search,
        notes=(*notes, *planned.notes),
        whole_info=whole_info,
        half_info=half_info,
    )


def _gives_floats(node: NodeProto, types: Mapping[str, int]) -> bool:
    if node.op_type in BODIES or _is_float_cast(node, types):
        return False
    return any(types.get(name) in FLOATING for name in node.output)


def _is_float_cast(node: NodeProto, types: Mapping[str, int]) -> bool:
    return node.op_type == "Cast" and {types.get(node.input[0]), types.get(node.output[0])} <= FLOATING


def _casts(graph: HalfGraph) -> int:
    types = value_types(graph.model, graph.weights)
    return sum(
        _is_float_cast(node, types) and types[node.input[0]] != types[node.output[0]]
        for node in walk(graph.model.graph)
    )


def finished(
    model: ModelProto, what: str, error: type[BadFolder] | type[CannotConvert] = BadFolder
) -> tuple[ValueInfoProto, ...]:
    """Strict shape inference, the full check and a load by ONNX Runtime; gives the value_info, written in, too.

    Raises ``error`` with the reason.
    """
    try:
        found = tuple(inferred(model))
        model.graph.value_info.extend(found)
        onnx.checker.check_model(model, full_check=True)
        _session(model)
    except Exception as reason:
        raise error(f"{what} is no model that can be run: {str(reason)[:600]}") from reason
    return found


def inferred(model: ModelProto) -> list[ValueInfoProto]:
    """What strict shape inference says of the inner values; large constants are only shown to it as inputs."""
    bare = ModelProto()
    bare.CopyFrom(model) if model.ByteSize() < _SMALL_MODEL else _copy_bare(model, bare)
    known = {value.name for value in (*bare.graph.input, *bare.graph.output, *bare.graph.initializer)}
    found = onnx.shape_inference.infer_shapes(bare, strict_mode=True, data_prop=True)
    return [value for value in found.graph.value_info if value.name not in known]


def _copy_bare(model: ModelProto, bare: ModelProto) -> None:
    graph = model.graph
    bare.ir_version = model.ir_version
    bare.opset_import.extend(model.opset_import)
    bare.graph.name = graph.name
    bare.graph.node.extend(graph.node)
    bare.graph.input.extend(graph.input)
    bare.graph.output.extend(graph.output)
    for tensor in graph.initializer:
        if len(tensor.raw_data) <= _SMALL_CONSTANT:
            bare.graph.initializer.append(tensor)
        else:
            value = helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
            bare.graph.input.append(value)


def runtime_answers(model: ModelProto) -> Answers:
    """A model as ONNX Runtime's CPU runs it, in memory."""
    session = _session(model)
    names = [value.name for value in session.get_outputs()]

    def answer(arrays: Arrays) -> dict[str, np.ndarray]:
        feed = {name: np.asarray(array) for name, array in arrays.items()}
        return dict(zip(names, map(np.asarray, session.run(names, feed)), strict=True))

    return answer


def whole_answers(foreign: ForeignHalf) -> Answers:
    """The FP32 whole: the reference R of the gate."""
    return runtime_answers(foreign.whole)


def half_answers(foreign: ForeignHalf) -> Answers:
    """The half as ONNX Runtime's CPU runs it: it keeps chains of half nodes in FP32, so it cannot judge alone."""
    half = foreign.half
    return runtime_answers(foreign.whole if half is None else half)


def oracle_answers(foreign: ForeignHalf, mantissa_only: bool = False) -> Answers:
    """The half with true half storage; ``mantissa_only`` gives the floor: half's mantissa, FP32's exponent."""
    graph = foreign.half_graph or foreign.program
    oracle = Oracle(graph.model, graph.weights, to_mantissa if mantissa_only else to_half_and_back)
    return oracle.run


def _session(model: ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = torch.get_num_threads()  # `threads.fixed_threads`
    return onnxruntime.InferenceSession(
        model.SerializeToString(),
        options,
        providers=["CPUExecutionProvider"],
        disabled_optimizers=DEADLY_IN_HALF,
    )
