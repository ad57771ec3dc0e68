"""A graph that was exported for one row is made to take any number of rows.

The batch is followed through the graph by the shapes that ONNX's shape inference finds for one row and for many.
Where a constant says 1 for the batch it is rewritten: targets of Reshape, ends of Slice, sizes of Resize, initial
states and constants that are joined to rows. What comes out is a candidate: `conversion.read_freed` compares its
answers with those to one row at a time, which finds what is not followed here (custom operators, bodies of control
flow).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from onnx import ModelProto, NodeProto, ValueInfoProto, helper

from ....models.capture.batch_place import place_of_batch
from ....models.errors import CannotConvert
from ....models.spec.spec import Dim, ModelSpec
from .graph import ForeignProgram, Names, attribute, names_in, read_by
from .shapes import Sizes, known_shapes
from .typing import value_types

MANY = 1009  # rows: a prime that no size of a model is likely to have as a factor
FREE_SIZE = 64  # assumed of other free dimensions, where their bounds admit it
_STATES = {"RNN": (5,), "GRU": (5,), "LSTM": (5, 6)}  # which inputs are initial states
_LENGTHS = 4  # and which the length of each row


def declare_free(model: ModelProto, spec: ModelSpec) -> None:
    """Declare the batch free where it is 1, in the graph as it was read: before anything is folded by its shapes."""
    tensors = {tensor.name: tensor for tensor in (*spec.inputs, *spec.outputs)}
    for value in (*model.graph.input, *model.graph.output):
        dims, tensor = value.type.tensor_type.shape.dim, tensors.get(value.name)
        if tensor is not None and len(dims) > tensor.batch_axis and dims[tensor.batch_axis].dim_value == 1:
            dims[tensor.batch_axis].dim_param = "batch"


def with_free_batch(program: ForeignProgram, spec: ModelSpec) -> ForeignProgram:
    """The program, its graph changed in place; the batch is the first axis of all inputs and outputs.

    Raises CannotConvert with the reason where an output does not have a row for each row.
    """
    freeing = _Freeing(program.model, dict(program.weights), spec)
    rewritten = freeing.run()
    freeing.check_outputs()
    types = value_types(program.model, freeing.weights)
    how = f" ({rewritten} places that said 1 were rewritten)" if rewritten else ""
    note = f"the file was exported for one row: its batch was made free{how}"
    return replace(program, weights=freeing.weights, types=types, notes=(*program.notes, note))


@dataclass(frozen=True, slots=True)
class Rows:
    """The place of a value's rows: ``axis``; in that axis behind ``before`` elements, where axes were merged."""

    axis: int
    before: int = 1


class _Freeing:
    def __init__(self, model: ModelProto, weights: dict[str, np.ndarray], spec: ModelSpec) -> None:
        self.model, self.weights, self.spec = model, weights, spec
        self.names = Names({*names_in(model.graph), *weights})
        self.nodes = Names(node.name for node in model.graph.node)
        self.one: dict[str, Sizes] = {}
        self.many: dict[str, Sizes] = {}
        self.rows: dict[str, Rows] = {}
        self.made_of_inputs: set[str] = set()
        self.batch = ""  # the value that holds the number of rows, once it is needed
        symbols = {dim.dim_param for value in model.graph.input for dim in value.type.tensor_type.shape.dim}
        self.static = symbols <= {"", "batch"}

    def run(self) -> int:
        """Rewrites nodes, in each pass those whose inputs are right already; gives the number of nodes rewritten."""
        done: set[str] = set()
        while True:
            self.look()
            found = [node for node in self.model.graph.node if node.name not in done and self.rewrites(node)]
            if not found:
                return len(done)
            done |= {node.name for node in found}

    def look(self) -> None:
        """Follow the batch by the shapes that are known now."""
        self.one, self.many = self.shapes(1), self.shapes(MANY)
        self.rows = {}
        self.made_of_inputs = {value.name for value in self.model.graph.input}
        for name in list(self.made_of_inputs):
            self.follow(name, None)
        for node in self.model.graph.node:
            if not self.made_of_inputs.isdisjoint(read_by(node)):
                self.made_of_inputs.update(node.output)
            source = next((name for name in node.input if name in self.rows), None)
            for name in node.output:
                self.follow(name, source, node.op_type in ("Reshape", "Flatten"))

    def shapes(self, rows: int) -> dict[str, Sizes]:
        model = ModelProto()
        model.CopyFrom(self.model)
        for value, tensor in zip(_in_order(model.graph.input, self.spec), self.spec.inputs, strict=True):
            for axis, dim in enumerate(value.type.tensor_type.shape.dim):
                if not dim.HasField("dim_value"):
                    dim.dim_value = rows if axis == 0 else _assumed(tensor.shape[axis])
        del model.graph.output[:]  # what they declare is not asked
        return known_shapes(model, self.weights)

    def follow(self, name: str, source: str | None, is_reshaped: bool = False) -> None:
        one, many = self.one.get(name), self.many.get(name)
        if one is None or many is None or None in one or None in many or len(one) != len(many):
            return
        longer = [axis for axis in range(len(one)) if one[axis] != many[axis]]
        if len(longer) != 1 or many[longer[0]] != MANY * (one[longer[0]] or 0):
            return
        (axis,) = longer
        before = 1
        if source is not None and is_reshaped:
            before = max(1, self.in_front(source) // _size(one[:axis]))
        elif source is not None and (one[axis] or 0) % self.rows[source].before == 0:
            before = self.rows[source].before
        self.rows[name] = Rows(axis, before)

    def in_front(self, name: str) -> int:
        """The number of elements of one row of a value that stand in front of the value's batch, in memory."""
        return _size(self.one[name][: self.rows[name].axis]) * self.rows[name].before

    def rewrites(self, node: NodeProto) -> bool:
        """Rewrite an input of the node that says 1 for the batch; True if there was one."""
        carrying = [name for name in node.input if name in self.rows]
        if not carrying:
            return False
        if node.op_type == "Reshape":
            return self.reshape(node)
        if node.op_type == "Slice":
            return self.slice(node)
        if node.op_type == "Resize" and len(node.input) > 3:
            return self.resize(node)
        if node.op_type == "Concat":
            axis = self.rows[carrying[0]].axis
            return self.repeat(node, dict.fromkeys(range(len(node.input)), axis))
        if node.op_type in _STATES and node.input[0] in self.rows:
            axis = 0 if attribute(node, "layout", 0) else 1
            return self.repeat(node, {_LENGTHS: 0, **dict.fromkeys(_STATES[node.op_type], axis)})
        return False

    def reshape(self, node: NodeProto) -> bool:
        target, one = self.weights.get(node.input[1]), self.one.get(node.output[0])
        if target is None or one is None or None in one or node.input[0] not in self.rows:
            return False
        axis = place_of_batch([size or 0 for size in one], self.in_front(node.input[0]))
        wanted = [size if place != axis else MANY * (size or 0) for place, size in enumerate(one)]
        if axis is None or self.many.get(node.output[0]) == wanted:
            return False
        new, came = target.copy(), self.one[node.input[0]]
        if (
            not attribute(node, "allowzero", 0)
            and self.rows[node.input[0]].axis == axis
            and came[axis] == one[axis]
        ):
            new[axis] = 0  # as many as the input has there
        elif -1 not in target:
            new[axis] = -1
        elif self.static:
            new = np.array(one, target.dtype)
            new[axis] = -1
        else:
            return False
        node.input[1] = self.constant(node.input[1], new)
        return True

    def slice(self, node: NodeProto) -> bool:
        """Make a Slice that takes the only row take all rows; True if it was changed."""
        rows, one = self.rows.get(node.input[0]), self.one[node.input[0]]
        starts, ends = (self.weights.get(name) for name in node.input[1:3])
        axes = self.weights.get(node.input[3]) if len(node.input) > 3 and node.input[3] else None
        if rows is None or starts is None or ends is None or one[rows.axis] != 1:
            return False
        places = np.arange(len(starts)) if axes is None else axes % len(one)
        at = places == rows.axis
        if not at.any() or node.output[0] in self.rows or self.one.get(node.output[0]) is None:
            return False
        node.input[1] = self.constant(node.input[1], np.where(at, 0, starts).astype(starts.dtype))
        node.input[2] = self.constant(
            node.input[2], np.where(at, np.iinfo(ends.dtype).max, ends).astype(ends.dtype)
        )
        return True

    def resize(self, node: NodeProto) -> bool:
        rows, sizes = self.rows.get(node.input[0]), self.weights.get(node.input[3])
        if rows is None or sizes is None or len(sizes) <= rows.axis or sizes[rows.axis] != 1:
            return False
        node.input[3] = self.sizes(node, sizes.tolist(), rows.axis)
        return True

    def repeat(self, node: NodeProto, axes: Mapping[int, int]) -> bool:
        """Give inputs (place → axis of the batch) that are the same for every row as many rows as there are."""
        there = [place for place in axes if place < len(node.input)]
        places = [place for place in there if self.is_single(node.input[place], axes[place])]
        for place in places:
            name = node.input[place]
            shape = self.weights[name].shape if name in self.weights else self.one[name]
            repeated = self.names.fresh(f"{name}__rows")
            sizes = self.sizes(node, shape, axes[place])
            self.put(node, helper.make_node("Expand", [name, sizes], [repeated]))
            node.input[place] = repeated
        return bool(places)

    def is_single(self, name: str, axis: int) -> bool:
        """True if a value has one row however many the inputs have, because it is not computed from the inputs."""
        if not name or name in self.made_of_inputs:
            return False
        shape = self.weights[name].shape if name in self.weights else self.one.get(name, ())
        return None not in shape and len(shape) > axis and shape[axis] == 1

    def sizes(self, reader: NodeProto, sizes: Sequence[int | None], axis: int) -> str:
        """A shape with the number of rows on ``axis``, as a value in front of ``reader``."""
        if not self.batch:
            shape, self.batch = self.names.fresh("input__shape"), self.names.fresh("batch")
            first = self.constant("first", np.array([0], np.int64))
            made = helper.make_node("Gather", [shape, first], [self.batch], self.nodes.fresh("batch"), axis=0)
            self.model.graph.node.insert(0, made)
            source = helper.make_node(
                "Shape", [self.spec.inputs[0].name], [shape], self.nodes.fresh("input_shape")
            )
            self.model.graph.node.insert(0, source)
        parts = [(sizes[:axis], "before"), (sizes[axis + 1 :], "behind")]
        before, behind = (
            [self.constant(what, np.array(part, np.int64))] if part else [] for part, what in parts
        )
        name = self.names.fresh("rows_shape")
        self.put(reader, helper.make_node("Concat", [*before, self.batch, *behind], [name], axis=0))
        return name

    def put(self, reader: NodeProto, node: NodeProto) -> None:
        """Insert a node in front of the node ``reader``, which reads its result."""
        node.name = self.nodes.fresh(node.output[0])
        place = next(i for i, each in enumerate(self.model.graph.node) if each.name == reader.name)
        self.model.graph.node.insert(place, node)

    def constant(self, like: str, array: np.ndarray) -> str:
        name = self.names.fresh(f"{like}__rows")
        self.weights[name] = array
        return name

    def check_outputs(self) -> None:
        """Raises CannotConvert where an output is known to have its rows elsewhere, or none."""
        for tensor in self.spec.outputs:
            one, many, rows = (
                self.one.get(tensor.name),
                self.many.get(tensor.name),
                self.rows.get(tensor.name),
            )
            if one is None or many is None or None in one or None in many:
                continue
            if rows == Rows(0) and one[0] == 1:
                continue
            if rows is None or one[rows.axis] != 1:
                raise CannotConvert(f"output '{tensor.name}' has no row for each row of the inputs")
            raise CannotConvert(
                f"output '{tensor.name}' has the batch on axis {rows.axis}: write batch_axis = {rows.axis} for it in "
                "model.toml"
            )


def _in_order(values: Sequence[ValueInfoProto], spec: ModelSpec) -> list[ValueInfoProto]:
    by_name = {value.name: value for value in values}
    return [by_name[tensor.name] for tensor in spec.inputs]


def _assumed(dim: Dim) -> int:
    return max(dim.minimum, FREE_SIZE if dim.maximum is None else min(FREE_SIZE, dim.maximum))


def _size(sizes: Sizes) -> int:
    return prod(size or 0 for size in sizes)
