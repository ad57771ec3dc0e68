"""A half file takes and gives the shapes that its model takes and gives, also where their batch is not the first axis.

Everything inside has the batch first (`models/spec/batch_axis.py`). A half that stands in the place of its model has
the model's own layout, and says so in its metadata; whatever runs such a file here puts the batch first again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto

from ...models.errors import BadFolder
from ...models.spec.batch_axis import batch_back, batch_first
from ...models.spec.spec import ModelSpec, TensorSpec
from .custom_nodes import cut, parted
from .output_names import output_names
from .reading.batch_first import BATCH_AXIS, move_batch_first, put_between
from .reading.bounded_file import read_graph, read_model
from .reading.graph import Names, attribute, names_in, replace_all, walk
from .reading.large_files import save

LAYOUT, OWN = "halfeven.layout", "own"  # in the metadata


def give_own_layout(model: ModelProto, spec: ModelSpec) -> None:
    """Give each input and output of a file whose batch is first its own layout, in place."""
    graph, names = model.graph, output_names(spec)
    inputs = [(tensor.name, tensor, True) for tensor in spec.inputs]
    outputs = [(names[tensor.name], tensor, False) for tensor in spec.outputs]
    values = {(value.name, is_input): value for value, is_input in _ends(graph)}
    moves = [each for each in (*inputs, *outputs) if each[1].batch_axis and (each[0], each[2]) in values]
    for name, tensor, is_input in moves:
        if (moved := _moved_at_the_end(graph, name, tensor, is_input)) is not None:
            moved.op_type = "Identity"  # the names around it stay, so the plan of the half names its nodes
            del moved.attribute[:]
        else:
            _add_move(graph, name, tensor, is_input)
        _turn(values[name, is_input], tensor.batch_axis)
    if moves:
        model.metadata_props.add(key=LAYOUT, value=OWN)


def _ends(graph: GraphProto) -> Iterator[tuple[ValueInfoProto, bool]]:
    """The inputs and outputs of a graph, and whether each is an input."""
    yield from ((value, True) for value in graph.input)
    yield from ((value, False) for value in graph.output)


def declare_as(model: ModelProto, original: ModelProto, spec: ModelSpec) -> None:
    """Write the sizes that the original declares where the half has none; the batch stays free."""
    axes = (
        {tensor.name: tensor.batch_axis for tensor in (*spec.inputs, *spec.outputs)} if spec.batched else {}
    )
    declared = {
        (value.name, is_input): value.type.tensor_type.shape.dim for value, is_input in _ends(original.graph)
    }
    for value, is_input in _ends(model.graph):
        dims, own = value.type.tensor_type.shape.dim, declared.get((value.name, is_input), ())
        for axis, (dim, said) in enumerate(zip(dims, own, strict=False) if len(dims) == len(own) else ()):
            if not dim.HasField("dim_value") and axis != axes.get(value.name):
                dim.CopyFrom(said)


def put_as_proven(model: ModelProto, spec: ModelSpec, path: Path) -> None:
    """Make of a file, in place, what the proof asks: cut at custom nodes (`custom_nodes`), and the inverse of
    `give_own_layout`; nothing for a file that has the batch first. ``path`` is named in errors."""
    if parted(model).custom:
        cut(model, {})
    if has_own_layout(model):
        move_batch_first(model.graph, spec, path)


@contextmanager
def batch_in_front(path: Path, spec: ModelSpec) -> Iterator[Path]:
    """The file itself, or one like it that has the batch first, where it has its model's own layout, and that is cut at
    nodes that ONNX Runtime does not know (`custom_nodes`)."""
    try:
        graph = read_graph(path)
        changes = (_moves(spec) and has_own_layout(graph)) or bool(parted(graph).custom)
    except BadFolder:  # whoever runs the file says why it cannot be read
        changes = False
    if not changes:
        yield path
        return
    model = read_model(path, path.parent)
    put_as_proven(model, spec, path)
    with TemporaryDirectory(prefix="halfeven-layout-") as place:
        save(model, Path(place) / path.name)
        yield Path(place) / path.name


def _moves(spec: ModelSpec) -> bool:
    return any(tensor.batch_axis for tensor in (*spec.inputs, *spec.outputs))


def has_own_layout(model: ModelProto) -> bool:
    return any(each.key == LAYOUT and each.value == OWN for each in model.metadata_props)


def _moved_at_the_end(graph: GraphProto, name: str, tensor: TensorSpec, is_input: bool) -> NodeProto | None:
    """The Transpose that `move_batch_first` put there, where it is still next to the end of the graph, and alone."""
    beside = [node for node in walk(graph) if name in (*node.input, *node.output)]
    order = (batch_back if is_input else batch_first)(range(len(tensor.shape)), tensor.batch_axis)
    if [node.op_type for node in beside] != ["Transpose"] or attribute(beside[0], "perm") != list(order):
        return None
    return beside[0] if beside[0].name.startswith(f"{name}{BATCH_AXIS}") else None


def _add_move(graph: GraphProto, name: str, tensor: TensorSpec, is_input: bool) -> None:
    """A Transpose between an input or output and the layout inside, of a file that was written from a program."""
    inner, axes = Names(names_in(graph)).fresh(f"{name}__batch_first"), range(len(tensor.shape))
    order = (batch_first if is_input else batch_back)(axes, tensor.batch_axis)
    put_between(graph, name, inner, f"{inner}__move", order, is_input)


def _turn(value: ValueInfoProto, batch_axis: int) -> None:
    """Declare the sizes of an input or output in the model's own order."""
    dims = value.type.tensor_type.shape.dim
    replace_all(dims, batch_back(list(dims), batch_axis))
