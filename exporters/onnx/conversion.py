"""A foreign ONNX file as it was read, with the part of its graph that model.toml asks for, and its half as it is
written."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from onnx import GraphProto, ModelProto, NodeProto, TensorShapeProto, ValueInfoProto, helper, shape_inference

from ...models.errors import BadFolder, CannotConvert, ExportFailed
from ...models.files.guarded_reading import guarded
from ...models.folder.package import ModelFolder
from ...models.spec.spec import ModelSpec, TensorSpec
from ..graph.traffic import Half
from ..inputs.samples import Samples
from .precision.file_graph import FileGraph
from .precision.rewrite import HalfGraph
from .reading.batch_first import keep_squeezed_batch, with_batch_first
from .reading.bounded_file import read_model
from .reading.graph import (
    BODIES,
    FLOATING,
    ForeignProgram,
    assembled,
    drop_unread,
    names_in,
    replace_all,
    size_in_bytes,
    walk,
)
from .reading.index_ranges import with_ranges
from .reading.large_files import weights_as_inputs
from .reading.normalise import normalise
from .reading.rows_freed import declare_free, with_free_batch
from .reading.signature import hold
from .reading.typing import value_types
from .runtime import answers_alone_differ, finished, runtime_answers


@dataclass(frozen=True, slots=True)
class ForeignHalf(Half):
    """A foreign file and its half, ``half``: None where nothing in it is half; then the original serves.

    In FP32 by policy are nodes that are so by list, by the file's own word or because half never reaches them; the
    file's own casts are among ``casts`` too.
    """

    program: ForeignProgram
    half_graph: HalfGraph | None
    original_info: tuple[ValueInfoProto, ...]
    half_info: tuple[ValueInfoProto, ...]

    @property
    def original(self) -> ModelProto:
        """The FP32 file. Put together at every call: a model is not held in memory twice."""
        return assembled(self.program.model, self.program.weights, self.original_info)

    @property
    def half(self) -> ModelProto | None:
        """The half file, or None where nothing is half. Put together at every call."""
        graph = self.half_graph
        return assembled(graph.model, graph.weights, self.half_info) if graph else None


class NotPlanned(BadFolder):
    """A file whose graph cannot be planned here. ONNX Runtime may run it all the same: it is then served as it is."""

    code = "bad_model_graph"


@guarded("an ONNX file")
def read_selected(path: Path, folder: ModelFolder) -> tuple[ModelProto, list[str], tuple[NodeProto, ...]]:
    """The file's graph with the outputs that model.toml names, under its names; what to tell; and the file's own nodes
    (`ForeignProgram.given`)."""
    model = read_model(path, folder.folder)
    given = tuple(
        NodeProto(name=node.name, op_type=node.op_type, output=node.output if graph is model.graph else ())
        for graph in (model.graph, *model.functions)
        for node in walk(graph)
    )
    if folder.spec.batched:
        keep_squeezed_batch(model)
    notes = select(model, folder.spec, folder.file_names, path)
    _give_axes(model, folder.spec)
    return model, notes, given


def _give_axes(model: ModelProto, spec: ModelSpec) -> None:
    """Make the outputs' shapes in the file agree with model.toml. An output without a shape gets as many free axes as
    model.toml says. Where model.toml has a free axis behind the batch, a fixed size in the file is removed: a file may
    state a wrong one, and a wrong one cannot be planned."""
    tensors = {tensor.name: tensor for tensor in spec.outputs}
    for value in model.graph.output:
        shape, tensor = value.type.tensor_type.shape, tensors.get(value.name)
        if tensor is None:
            continue
        if not value.type.tensor_type.HasField("shape"):
            shape.SetInParent()
            shape.dim.extend([TensorShapeProto.Dimension() for _ in tensor.shape])
        for axis, (dim, known) in enumerate(zip(shape.dim, tensor.shape, strict=False)):
            if axis != tensor.batch_axis and not known.fixed and dim.HasField("dim_value"):
                dim.ClearField("dim_value")


@guarded("an ONNX file")
def read_foreign(
    model_path: Path, folder: ModelFolder, free_batch: bool = False
) -> tuple[ForeignProgram, ModelSpec, list[str]]:
    """The file as a program of ours, the exact spec, and what to tell. Nothing has been run.

    ``free_batch``: a batch of 1 is made free. Raises NotPlanned for a graph that is not valid or not taken, BadFolder
    where it is not what model.toml says, CannotConvert where the batch cannot be free.
    """
    model, taken_out, given = read_selected(model_path, folder)
    if free_batch:
        declare_free(model, folder.spec)
    try:
        program = replace(normalise(model, model_path), given=given)
    except BadFolder as error:
        raise NotPlanned(str(error)) from error
    except ValueError as error:
        raise NotPlanned(f"{model_path}: {error}") from error
    program = with_batch_first(program, folder.spec, model_path)
    if free_batch:
        program = with_free_batch(program, folder.spec)
    spec, notes = hold(program.model, folder.spec, model_path)
    return program, with_ranges(spec, program), [*taken_out, *program.notes, *notes]


def written(
    program: ForeignProgram, graph: FileGraph, original_info: tuple[ValueInfoProto, ...]
) -> ForeignHalf:
    """The conversion of a planned graph. ``program``: the file as read.

    Raises ExportFailed where ONNX Runtime cannot load the half.
    """
    found, held = graph.dtypes.half, {kept.node for kept in graph.kept}
    half_graph = graph.written if found else None
    nodes = [node for node in program.nodes if _gives_floats(node, program.types)]
    half = sum(node.name in found for node in nodes)
    half_info: tuple[ValueInfoProto, ...] = ()
    if half_graph is not None:
        model = assembled(half_graph.model, half_graph.weights)
        half_info = finished(model, f"the half of {graph.spec.name}", ExportFailed)
    weights = half_graph.weights if half_graph else program.weights
    return ForeignHalf(
        program=program,
        half_graph=half_graph,
        kept=tuple(graph.kept),
        nodes=len(nodes),
        half_nodes=half,
        fp32_by_policy=len(nodes) - half - sum(node.name in held for node in nodes),
        casts=_casts(half_graph) if half_graph else 0,
        bytes=size_in_bytes(weights.values()),
        bytes_fp32=size_in_bytes(program.weights.values()),
        original_info=original_info,
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


SIZES = (2, 3, 16)  # rows of the batches that are compared, as far as max_batch_size admits them

Read = tuple[ForeignProgram, ModelSpec, list[str]]


def read_freed(path: Path, folder: ModelFolder, samples: Samples) -> Read:
    """The model as `read_foreign` gives it; a batch of 1 is made free, and the notes say so, or why not.

    Raises BadFolder and TooLarge as `read_foreign` does.
    """
    fixed = read_foreign(path, folder)
    if fixed[1].max_batch_size == folder.spec.max_batch_size:
        return fixed
    try:
        free = read_foreign(path, folder, free_batch=True)
        if (reason := _difference(fixed[0], *free[:2], samples)) is None:
            return free
    except (BadFolder, CannotConvert) as error:
        reason = str(error)
    program, spec, notes = fixed
    return program, spec, [*notes, f"its batch was not made free: {reason}"]


def _difference(fixed: ForeignProgram, free: ForeignProgram, spec: ModelSpec, samples: Samples) -> str | None:
    if samples.count < 2:
        return "one sample does not show whether rows are answered apart; give two or more"
    original = assembled(free.model, free.weights)
    finished(original, "the graph with a free batch")
    alone = runtime_answers(assembled(fixed.model, fixed.weights))
    return answers_alone_differ(spec, samples, runtime_answers(original), SIZES, alone)


CONSTANTS_ALONE = 4  # the first ir_version in which an initialiser need not be an input as well


def select(model: ModelProto, spec: ModelSpec, file_names: Mapping[str, str], path: Path) -> list[str]:
    """Make named inner values outputs, take out what no output needs, and rename inputs and outputs, in place;
    gives what to tell.

    ``file_names``: a tensor's name in model.toml → its name in the file, where the two differ. An initialiser that is
    an input as well is no input. Raises BadFolder where a new name is that of another value of the graph.
    """
    graph = model.graph
    constants = {tensor.name for tensor in graph.initializer}
    notes = []
    optional = [value.name for value in graph.input if value.name in constants]
    if optional and model.ir_version >= CONSTANTS_ALONE:
        notes.append(f"inputs that have a value in the file are constants: {', '.join(optional)}")
    _keep(graph.input, {value.name for value in graph.input} - constants)
    if constants:
        model.ir_version = max(model.ir_version, CONSTANTS_ALONE)
    wanted = {file_names.get(tensor.name, tensor.name): tensor for tensor in spec.outputs}
    given = [value.name for value in graph.output]
    if inner := _add_inner(model, wanted):
        notes.append(f"values inside of the graph are outputs, as model.toml asks: {', '.join(inner)}")
    if (
        wanted
        and (left := [name for name in given if name not in wanted])
        and wanted.keys() <= {*given, *inner}
    ):
        notes.append(f"outputs that model.toml does not name were taken out: {', '.join(left)}")
        _keep(graph.output, set(wanted))
    needed = drop_unread(graph)
    _keep(graph.input, needed | {file_names.get(tensor.name, tensor.name) for tensor in spec.inputs})
    taken = names_in(graph)
    for new, old in file_names.items():
        if new != old and new in taken:
            raise BadFolder(
                f"{path}: '{new}', the new name of '{old}', is that of another value of the graph"
            )
        _rename(graph, old, new)
    return notes


def _add_inner(model: ModelProto, wanted: Mapping[str, TensorSpec]) -> list[str]:
    """Add the wanted values that nodes of the main graph compute to the graph's outputs; returns the names added."""
    graph = model.graph
    given = {value.name for value in graph.output}
    inner = [name for node in graph.node for name in node.output if name in wanted and name not in given]
    known = _inferred(model) if inner else {}
    for name in inner:
        declared = helper.np_dtype_to_tensor_dtype(wanted[name].type.numpy)
        type_ = known.get(name) or declared
        graph.output.append(helper.make_tensor_value_info(name, type_, None))
    return inner


def _inferred(model: ModelProto) -> dict[str, int]:
    """The element type of each inner value, as far as ONNX's shape inference finds it. The inference takes models of at
    most 2 GiB, so large constants are passed to it as inputs."""
    found = shape_inference.infer_shapes(weights_as_inputs(model)).graph
    return {value.name: value.type.tensor_type.elem_type for value in found.value_info}


def _keep(values, names: set[str]) -> None:  # type: ignore[no-untyped-def]
    replace_all(values, [value for value in values if value.name in names])


def _rename(graph: GraphProto, old: str, new: str) -> None:
    """Rename an input or output by a node that passes the value on: inner values, those of bodies too, keep their
    names."""
    for value in graph.input:
        if value.name == old:
            value.name = new
            first = helper.make_node("Identity", [new], [old], name=f"{new}.named")
            replace_all(graph.node, [first, *graph.node])
            return
    for value in graph.output:
        if value.name == old:
            value.name = new
            graph.node.append(helper.make_node("Identity", [old], [new], name=f"{new}.named"))
