"""The valid range of every integer input of a foreign graph that indexes a table (Gather, ScatterND and theirs).

As `models/index_ranges` for programs, here for ONNX operators: from each index back to the input, through views, casts
among integers and constant offsets. ONNX counts indices from the end too, so ``-n`` to ``n - 1`` are valid; OneHot
takes any number. Bodies of control flow may not run, so they give no condition. Source: ONNX operators, "Gather",
"GatherElements", "GatherND", "ScatterElements", "ScatterND".
"""

from collections.abc import Iterator

import numpy as np
from onnx import NodeProto, helper

from ....models.index_ranges.value_bounds import Bounds, intersection, spec_with
from ....models.spec.spec import ModelSpec
from .graph import ONNX, ForeignProgram, attribute
from .shapes import Sizes, known_shapes

_Found = tuple[str, Bounds]  # an input, and the bounds of its elements
_VIEWS = ("Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Expand", "Tile", "Cast")


def with_ranges(spec: ModelSpec, program: ForeignProgram) -> ModelSpec:
    """The spec with the range of each integer input that indexes a table; its own ranges are kept where narrower.

    Raises BadFolder where model.toml admits values that the graph's tables do not have.
    """
    found: dict[str, Bounds] = {}
    for name, bounds in _Needs(program).all():
        found[name] = intersection(found.get(name), bounds)
    return spec_with(spec, [found.get(tensor.name) for tensor in spec.inputs])


class _Needs:
    def __init__(self, program: ForeignProgram) -> None:
        self.program = program
        self.made_by = {name: node for node in program.graph.node for name in node.output}
        self.inputs = {value.name for value in program.graph.input}
        self.shapes: dict[str, Sizes] = known_shapes(program.model, program.weights)
        self.shapes |= {name: list(array.shape) for name, array in program.weights.items()}

    def all(self) -> Iterator[_Found]:
        for node in self.program.graph.node:
            if node.domain not in ONNX:
                continue
            if node.op_type in ("Gather", "GatherElements", "ScatterElements"):
                yield from self.along(node, int(attribute(node, "axis", 0)))  # type: ignore[arg-type]
            elif node.op_type in ("GatherND", "ScatterND"):
                yield from self.by_tuples(node)

    def along(self, node: NodeProto, axis: int) -> Iterator[_Found]:
        size = self.size(node.input[0], axis)
        if size is not None:
            yield from self.of(node.input[1], Bounds.uniform(-size, size - 1, self.rank(node.input[1])))

    def by_tuples(self, node: NodeProto) -> Iterator[_Found]:
        """The bounds of GatherND's indices: their last axis has one index for each of the table's first dimensions."""
        batch = int(attribute(node, "batch_dims", 0))  # type: ignore[arg-type]
        shape, indices = self.shapes.get(node.input[0], []), self.shapes.get(node.input[1], [])
        width = indices[-1] if indices else None
        sizes = shape[batch : batch + width] if width else []
        known = [size for size in sizes if size is not None]
        if width and len(known) == width:
            ends = np.array(known, object).reshape((1,) * (len(indices) - 1) + (width,))
            yield from self.of(node.input[1], Bounds(-ends, ends - 1))

    def of(self, name: str, bounds: Bounds | None) -> Iterator[_Found]:
        """The input range that keeps the elements of value ``name`` within ``bounds``; empty where not known."""
        while bounds is not None and (limits := self.limits(name)) is not None:
            bounds = bounds.clipped(*limits)
            if name in self.inputs:
                yield name, bounds
                return
            node = self.made_by.get(name)
            if node is None or node.domain not in ONNX:
                return
            name, bounds = self.source(node, bounds)

    def source(self, node: NodeProto, bounds: Bounds) -> tuple[str, Bounds | None]:
        """The value whose elements a node takes, and their bounds; None where a node does anything else."""
        name = node.input[0] if node.input else ""
        if node.op_type in _VIEWS:
            copies = node.op_type in ("Identity", "Cast") and bounds.low.ndim == max(self.rank(name), 1)
            return name, bounds if copies else bounds.of_rank(self.rank(name))
        if node.op_type in ("Add", "Sub"):
            name, number = self.offset(node)
            moved = bounds.before_adding(number) if number is not None else None
            if moved is None or moved.low.ndim == max(self.rank(name), 1):
                return name, moved
            return name, moved.of_rank(self.rank(name))
        index = self.program.weights.get(node.input[1]) if node.op_type == "Gather" else None
        if index is not None and index.ndim < 2:  # columns
            axis = int(attribute(node, "axis", 0))  # type: ignore[arg-type]
            places = [int(place) % (self.size(name, axis) or 1) for place in index.flat]
            return name, self.cut(node, axis, places, bounds) if len({*places}) == len(places) else None
        parts = [self.program.weights.get(part) for part in node.input[1:]] if node.op_type == "Slice" else []
        if len(parts) > 2 and all(part is not None and part.size == 1 for part in parts):
            start, end, axis, *step = (int(part.item()) for part in parts)  # type: ignore[union-attr]
            places = range(self.size(name, axis) or 0)[slice(start, end, *step)]
            return name, self.cut(node, axis, list(places), bounds)
        return name, None

    def cut(self, node: NodeProto, axis: int, places: list[int], bounds: Bounds) -> Bounds | None:
        name = node.input[0]
        size, limits, rank = self.size(name, axis), self.limits(name), self.rank(name)
        if size is None or limits is None:
            return None
        inner = bounds.along_new_axis(rank, axis % rank)
        return inner.cut_out(axis % rank, size, places, *limits)

    def offset(self, node: NodeProto) -> tuple[str, int | None]:
        """The value that a constant is added to, and the constant; None where neither is one."""
        one, other = node.input
        if (number := self.constant(other)) is not None:
            return one, number if node.op_type == "Add" else -number
        return other, self.constant(one) if node.op_type == "Add" else None

    def rank(self, name: str) -> int:
        return len(self.shapes.get(name, []))

    def size(self, name: str, axis: int) -> int | None:
        shape = self.shapes.get(name, [])
        return shape[axis] if -len(shape) <= axis < len(shape) else None

    def limits(self, name: str) -> tuple[int, int] | None:
        """The ends of a value's type, where that is of integers."""
        element = self.program.types.get(name, 0)
        dtype = helper.tensor_dtype_to_np_dtype(element) if element else np.dtype(np.object_)
        if dtype.kind not in "iu":
            return None
        info = np.iinfo(dtype.type)
        return int(info.min), int(info.max)

    def constant(self, name: str) -> int | None:
        """The one whole number that fills the constant ``name``; None where its elements differ or are not whole."""
        array = self.program.weights.get(name)
        if array is None or not array.size or array.dtype.kind not in "iu" or (array != array.flat[0]).any():
            return None
        return int(array.flat[0])
