"""The way from the file's graph to the normalised one (`graph.ForeignProgram`).

Functions are inlined, an old opset is converted up, nodes are sorted and named, every value has a unique name over all
graphs, constants are taken out, and half values of the file are widened to the FP32 original.

Sorting and lifting are onnx_ir's passes. Two of its passes are not right here and stay out: NameFixPass lets both
branches of an If use one name, and OutputFixPass renames an input of the model that is an output as well.
"""

from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnx.inliner import inline_local_functions
from onnx.version_converter import convert_version
from onnx_ir.passes.common import (
    LiftConstantsToInitializersPass,
    RemoveInitializersFromInputsPass,
    TopologicalSortPass,
)

from ....models.errors import BadFolder
from .folding import fold
from .graph import (
    BODIES,
    ONNX,
    ForeignProgram,
    Names,
    attribute,
    bodies,
    graphs,
    names_in,
    opset_of,
    replace_all,
    small_constants,
    walk,
)
from .large_files import check, is_large
from .runtime_norms import as_onnx_has_them
from .signature import sizes_of
from .typing import value_types
from .widening import widened

BLOCKED = "com.microsoft.nchwc"  # convolutions on blocks of channels
OLDEST = 13  # below it too many ops take no half
TARGET = 17
_SEQUENCES = ("Sequence", "Optional", "SplitToSequence", "ConcatFromSequence", "StringSplit")
_DEFAULTS = {"STFT": ("onesided", 1), "MeanVarianceNormalization": ("axes", [0, 2, 3])}


def normalise(model: ModelProto, path: Path) -> ForeignProgram:
    """The model normalised. Raises BadFolder for a construct that is not valid or not supported, naming it."""
    notes: list[str] = []
    if blocked := sum(node.domain == BLOCKED for node in walk(model.graph)):
        notes.append(
            f"{blocked} operators of {BLOCKED} stay in FP32: ONNX Runtime's optimiser wrote them for CPUs alone; "
            "convert the file that it was given"
        )
    model.graph.name = model.graph.name or "graph"  # the checker wants one, ONNX Runtime none
    model = in_order(as_onnx_has_them(model), path)
    if model.functions:
        if is_large(model):
            raise BadFolder(
                f"{path} has local functions, and weights of 2 GiB or more, with which they cannot be inlined here: "
                "save it again with its functions inlined"
            )
        notes.append(f"{len(model.functions)} local functions were inlined")
        write_defaults(model)
        model = in_order(inline_local_functions(model, convert_version=True), path)
    model = _raise_opset(model, path, notes)
    unfold(model)
    _write_own_defaults(model)
    _refuse_what_is_not_taken(model, path)
    close_bodies(model)
    model, weights = named_and_lifted(model)
    model.ir_version = min(max(model.ir_version, 8), 10)  # 10: what runtimes of the last years read
    for graph in graphs(model.graph):
        del graph.value_info[:], graph.quantization_annotation[:]
    _drop_another_proof(model)
    model, weights, islands, halved = widened(model, weights, notes)
    fold(model, weights)
    types = value_types(model, weights)
    _state_types(model.graph, types)
    return ForeignProgram(model, weights, types, frozenset(islands), frozenset(halved), tuple(notes))


def _drop_another_proof(model: ModelProto) -> None:
    """Take out what a half says of its proof. All else stays: engines read the names of classes there."""
    said = {each.key: each.value for each in model.metadata_props}
    own = {key: value for key, value in said.items() if not key.startswith("halfeven.")}
    helper.set_model_props(model, own)


def _state_types(graph: GraphProto, types: Mapping[str, int]) -> None:
    """Put the output types of operators of ai.onnx.ml into the graph: ONNX's type inference knows few of them, and
    fails at a node that reads another one."""
    for node in graph.node:
        for name in node.output if node.domain == "ai.onnx.ml" else ():
            graph.value_info.append(helper.make_tensor_value_info(name, types[name], None))


def _check(path: Path, model: ModelProto) -> None:
    """``onnx.checker`` (graphs are sorted by then). Raises BadFolder with its words."""
    try:
        check(model)
    except Exception as error:
        raise BadFolder(f"{path} is not a valid ONNX model: {str(error)[:500]}; export it again") from error


def in_order(model: ModelProto, path: Path) -> ModelProto:
    """The model, checked, with each node after its inputs. A sorted model is not read by onnx_ir here."""
    try:
        _check(path, model)
        return model
    except BadFolder as fault:
        try:
            close_bodies(model)
            whole = ir.from_proto(model)
            TopologicalSortPass()(whole)
        except Exception as error:
            if "cycle" in str(error):
                raise BadFolder(
                    f"{path}: the graph runs in a circle: a node reads what depends on it"
                ) from error
            raise fault from error
    model = ir.to_proto(whole)
    _check(path, model)
    return model


def _raise_opset(model: ModelProto, path: Path, notes: list[str]) -> ModelProto:
    version = opset_of(model)
    if version >= OLDEST:
        return model
    try:
        converted = convert_version(model, TARGET)
        if version <= NEWEST_OLD:
            count_from_the_corner(converted)
        onnx.checker.check_model(converted)
    except Exception as error:
        raise BadFolder(
            f"{path} is of opset {version}, too old for half precision, and cannot be converted to {TARGET}: "
            f"{str(error)[:300]}; export it again with opset {TARGET} or later"
        ) from error
    before, after = (
        {value.name: sizes_of(value) for value in graph.input} for graph in (model.graph, converted.graph)
    )
    if changed := [name for name in before if before[name] != after.get(name)]:
        raise BadFolder(
            f"{path} is of opset {version}, and its conversion to {TARGET} gives input '{changed[0]}' another shape: "
            f"export it again with opset {TARGET} or later"
        )
    notes.append(f"opset {version} was converted to {TARGET}: older ones take too few ops in half")
    return converted


def _write_own_defaults(model: ModelProto) -> None:
    """Write the defaults of which onnx's shape inference knows others than the standard (STFT), or none."""
    for node in walk(model.graph):
        if node.domain in ONNX and node.op_type in _DEFAULTS:
            name, value = _DEFAULTS[node.op_type]
            if attribute(node, name) is None:
                node.attribute.append(helper.make_attribute(name, value))


def _refuse_what_is_not_taken(model: ModelProto, path: Path) -> None:
    if any(graph.sparse_initializer for graph in graphs(model.graph)):
        raise BadFolder(f"{path} has sparse initialisers, which are not taken: save them dense")
    for node in walk(model.graph):
        if node.domain in ONNX and node.op_type.startswith(_SEQUENCES):
            raise BadFolder(
                f"{path}: node '{node.name}' is a {node.op_type}; sequences and optionals are not taken"
            )
        if bodies(node) and node.op_type not in BODIES:
            raise BadFolder(f"{path}: node '{node.name}' is a {node.op_type}, whose body is not looked into")
        if node.op_type == "Constant" and attribute(node, "sparse_value") is not None:
            raise BadFolder(
                f"{path}: node '{node.name}' is a sparse constant, which is not taken: save it dense"
            )


def close_bodies(model: ModelProto) -> None:
    """Every output of a body is made by a node of the same body, and no value is two of its outputs.

    onnx_ir takes a body's output that the outer graph makes for a new value, made by no node.
    """
    names = Names(names_in(model.graph))
    for graph in graphs(model.graph):
        made = {name for node in graph.node if node.op_type != "Constant" for name in node.output}
        for value in graph.output if graph is not model.graph else ():
            if value.name in made:
                made.discard(value.name)
                continue
            own = names.fresh(f"{value.name}__out")
            graph.node.append(helper.make_node("Identity", [value.name], [own]))
            value.name = own


def named_and_lifted(model: ModelProto) -> tuple[ModelProto, dict[str, np.ndarray]]:
    """The model without constants, and its constants by name; names are unique over all graphs.

    Values and named nodes of the main graph keep their names. An initialiser that was an input as well is none.
    """
    whole = ir.from_proto(model)
    for place, value in enumerate(whole.graph.outputs):
        _give_out_constant(whole.graph, place, value)
    main = (*whole.graph.inputs, *whole.graph.initializers.values(), *_made_in(whole.graph))
    _name(whole.graph, "", Names(), Names(value.name for value in main if value.name))
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(whole)
    RemoveInitializersFromInputsPass()(whole)
    weights = {}
    for graph in whole.graphs():
        weights |= {name: _array(value) for name, value in graph.initializers.items()}
        graph.initializers.clear()
    return ir.to_proto(whole), weights


def _give_out_constant(graph: ir.Graph, place: int, value: ir.Value) -> None:
    """An output of the model that is a constant keeps its name; the constant gets another."""
    maker = value.producer()
    if value.is_graph_input() or (maker is not None and maker.op_type != "Constant"):
        return
    given = ir.node("Identity", [value])
    taken = Names([*graph.initializers, *(each.name for each in _made_in(graph) if each.name)])
    name, out = value.name, given.outputs[0]
    value.name = taken.fresh(f"{name}__value")
    out.name, out.type, out.shape = name, value.type, value.shape
    graph.append(given)
    given.name = ""  # `_name` gives it one, as to all nodes
    graph.outputs[place] = out


def _made_in(graph: ir.Graph) -> Iterator[ir.Value]:
    return (value for node in graph for value in node.outputs)


def _name(graph: ir.Graph, prefix: str, nodes: Names, values: Names) -> None:
    """Names that are unique over all graphs: nodes of the main graph first, then those of its bodies."""
    for node in graph:
        node.name = nodes.fresh(prefix + (node.name or node.op_type.lower()))
    for node in graph:
        for attribute_ in node.attributes.values():
            if attribute_.type is ir.AttributeType.GRAPH:
                body = attribute_.as_graph()
                for value in (*body.inputs, *body.initializers.values(), *_made_in(body)):
                    value.name = values.fresh(value.name) if value.name else value.name
                _name(body, f"{node.name}.{attribute_.name}.", nodes, values)


def _array(value: ir.Value) -> np.ndarray:
    assert value.const_value is not None
    if value.const_value.dtype is ir.DataType.STRING:  # text, where onnx_ir has bytes
        return numpy_helper.to_array(ir.to_proto(value.const_value))
    return value.const_value.numpy()


def write_defaults(model: ModelProto) -> None:
    """Write the defaults of local functions into the nodes that call them, in place; those in functions too.

    onnx's inliner forgets them: the attribute would then have the default of the operator inside, another number.
    """
    functions = {(each.domain, each.name, each.overload): each for each in model.functions}
    for node in chain.from_iterable(walk(part) for part in (model.graph, *model.functions)):
        function = functions.get((node.domain, node.op_type, node.overload))
        given = {entry.name for entry in node.attribute}
        if function is not None:
            node.attribute.extend(entry for entry in function.attribute_proto if entry.name not in given)


NEWEST_OLD = 10  # the last opset with the old meaning
_SCALES = 2  # the place of a Resize's input


def count_from_the_corner(converted: ModelProto) -> None:
    """Write the old meaning into each Resize of a model that was converted from opset 10 or older, in place.

    An Upsample, or such a Resize, counts from the corner of a picture; since opset 11 a Resize counts from the middle
    of a pixel unless it says otherwise, which onnx's version converter does not write.

    Source: ONNX operators, "Upsample" and "Resize"; for the nearest place ONNX Runtime's kernels of opset 10, which
    round down where a picture grows and up where it shrinks.
    """
    scales = ChainMap(*(small_constants(each, (TensorProto.FLOAT,)) for each in graphs(converted.graph)))
    for node in walk(converted.graph):
        if node.op_type == "Resize" and node.domain in ONNX:
            old = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": _rounding(node, scales)}
            kept = (entry for entry in node.attribute if entry.name not in old)
            replace_all(node.attribute, [*kept, *(helper.make_attribute(key, old[key]) for key in old)])


def _rounding(node: NodeProto, scales: Mapping[str, np.ndarray]) -> str:
    found = scales.get(node.input[_SCALES]) if len(node.input) > _SCALES else None
    return "ceil" if found is not None and (found <= 1).all() else "floor"


_INTEGERS = (TensorProto.INT32, TensorProto.INT64)
Shapes = Mapping[str, list[int]]  # 0 where a size is free


def unfold(model: ModelProto) -> None:
    """Replace a SplitToSequence by one Split where all its readers are SequenceAt of constant places.

    onnxscript's `fold_constants` does so too, but not without its other changes: see `folding.py`.
    """
    names = Names(names_in(model.graph))
    for graph in graphs(model.graph):
        shapes, constants = _shapes(graph), small_constants(graph, _INTEGERS)
        for node in [node for node in graph.node if _is(node, "SplitToSequence")]:
            readers = [
                reader for part in graphs(graph) for reader in part.node if node.output[0] in reader.input
            ]
            places = [_place(graph, constants, reader) for reader in readers]
            sizes = _sizes(node, shapes, constants)
            if sizes is not None and all(place is not None for place in places):
                _replace(graph, node, sizes, list(zip(places, readers, strict=True)), names)


def _replace(
    graph: GraphProto,
    node: NodeProto,
    sizes: list[int],
    readers: Sequence[tuple[int | None, NodeProto]],
    names: Names,
) -> None:
    parts = [names.fresh(f"{node.output[0]}__{index}") for index in range(len(sizes))]
    given = names.fresh(f"{node.output[0]}__sizes")
    graph.initializer.append(numpy_helper.from_array(np.asarray(sizes, np.int64), given))
    axis = attribute(node, "axis", 0)
    node.CopyFrom(helper.make_node("Split", [node.input[0], given], parts, name=node.name, axis=axis))
    for place, reader in readers:
        assert place is not None
        identity = helper.make_node("Identity", [parts[place]], list(reader.output), name=reader.name)
        reader.CopyFrom(identity)


def _sizes(node: NodeProto, shapes: Shapes, constants: Mapping[str, np.ndarray]) -> list[int] | None:
    """The sizes of the parts, where the file has them; a single number is the size of all parts but the last."""
    given = constants.get(node.input[1]) if len(node.input) > 1 else None
    if given is None:
        return None
    if given.ndim == 1:
        return [int(size) for size in given]
    shape, axis, size = shapes.get(node.input[0], []), attribute(node, "axis", 0), int(given)
    assert isinstance(axis, int)
    whole = shape[axis] if -len(shape) <= axis < len(shape) else 0
    return [min(size, whole - start) for start in range(0, whole, size)] or None


def _place(graph: GraphProto, constants: Mapping[str, np.ndarray], reader: NodeProto) -> int | None:
    if not _is(reader, "SequenceAt") or not any(reader is node for node in graph.node):
        return None
    place = constants.get(reader.input[1])
    return None if place is None else int(place.reshape(-1)[0])


def _is(node: NodeProto, op: str) -> bool:
    return node.op_type == op and node.domain in ONNX


def _shapes(graph: GraphProto) -> dict[str, list[int]]:
    return {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.value_info)
    }
