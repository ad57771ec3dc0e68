"""The valid range of every integer input of a foreign graph that indexes a table (Gather, ScatterND and theirs).

As `models/index_ranges` for programs, here for ONNX operators: from each index back to the inputs, through operators
with an inverse. ONNX counts indices from the end too, so ``-n`` to ``n - 1`` are valid; OneHot takes any number. Bodies
of control flow may not run, so they give no condition. Source: ONNX operators, "Gather", "GatherElements", "GatherND",
"ScatterElements", "ScatterND".
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from onnx import NodeProto, helper

from ....models.index_ranges.input_ranges import spec_with
from ....models.index_ranges.value_bounds import COMPARISONS, MIRRORED, OPPOSITE, Bounds, intersection
from ....models.spec import ModelSpec
from .graph import ONNX, ForeignProgram, attribute
from .shapes import Sizes, known_shapes

_Found = tuple[str, Bounds]  # an input, and the bounds of its elements
_COMPARED = {"Less": "lt", "LessOrEqual": "le", "Greater": "gt", "GreaterOrEqual": "ge", "Equal": "eq"}


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
        shape = self.shapes.get(node.input[0], [])
        size = shape[axis] if -len(shape) <= axis < len(shape) else None
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

    def of(self, name: str, bounds: Bounds) -> Iterator[_Found]:
        """The input ranges that keep the elements of value ``name`` within ``bounds``; empty where not known."""
        limits = self.limits(name)
        bounds = bounds if limits is None else bounds.clipped(*limits)
        if name in self.inputs:
            if limits is not None:
                yield name, bounds
            return
        node = self.made_by.get(name)
        rule = _RULES.get(node.op_type) if node is not None and node.domain in ONNX else None
        if node is not None and rule is not None:
            yield from rule(self, node, bounds)

    def rank(self, name: str) -> int:
        return len(self.shapes.get(name, []))

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
        if (
            array is None
            or array.size == 0
            or array.dtype.kind not in "iuf"
            or (array != array.flat[0]).any()
        ):
            return None
        number = float(array.flat[0])
        return int(array.flat[0]) if number.is_integer() else None

    def uniform(self, name: str, bounds: Bounds | None) -> Iterator[_Found]:
        """The ranges that an operand needs; uniform bounds are spread over an operand of any shape."""
        if bounds is not None and bounds.is_uniform:
            yield from self.of(name, bounds.uniform_of(self.rank(name)))
        elif bounds is not None and bounds.low.ndim == self.rank(name):
            yield from self.of(name, bounds)

    # Each element of the input is somewhere in the result.

    def moved(self, node: NodeProto, bounds: Bounds) -> Iterator[_Found]:
        same = self.shapes.get(node.input[0]) == self.shapes.get(node.output[0], [])
        if bounds.is_uniform or (same and node.op_type in ("Identity", "Cast")):
            yield from self.uniform(node.input[0], bounds)

    def cast(self, node: NodeProto, bounds: Bounds) -> Iterator[_Found]:
        if self.program.types.get(node.output[0]) != 9:  # every number but 0 is true
            yield from self.moved(node, bounds)

    def joined(self, node: NodeProto, bounds: Bounds) -> Iterator[_Found]:
        if bounds.is_uniform:
            for name in node.input:
                yield from self.uniform(name, bounds)

    # Some places along an axis are taken.

    def gathered(self, node: NodeProto, bounds: Bounds) -> Iterator[_Found]:
        """Columns, by a constant index."""
        index = self.program.weights.get(node.input[1])
        axis = int(attribute(node, "axis", 0))  # type: ignore[arg-type]
        if index is None or index.ndim > 1 or len(set(index.flat)) != index.size:
            return
        kept = bounds
        if index.ndim == 0:
            rank = self.rank(node.input[0])
            kept = bounds.uniform_of(rank) if bounds.is_uniform else None
        if kept is not None:
            yield from self.cut(node.input[0], axis, [int(place) for place in index.flat], kept)

    def sliced(self, node: NodeProto, bounds: Bounds) -> Iterator[_Found]:
        parts = [self.program.weights.get(name) if name else None for name in node.input[1:]]
        parts += [None] * (4 - len(parts))
        start, end, axes, steps = parts
        if start is None or end is None or axes is None or len(start) != 1:
            return
        axis, step = int(axes[0]), 1 if steps is None else int(steps[0])
        size = self.size(node.input[0], axis)
        if size is not None:
            places = range(size)[slice(int(start[0]), int(end[0]), step)]
            yield from self.cut(node.input[0], axis, places, bounds)

    def cut(self, name: str, axis: int, places: Sequence[int] | range, bounds: Bounds) -> Iterator[_Found]:
        size, limits, rank = self.size(name, axis), self.limits(name), self.rank(name)
        if size is None or limits is None:
            return
        kept = bounds.cut_out(axis % rank, size, [place % size for place in places], *limits)
        if kept is not None:
            yield from self.of(name, kept)

    def size(self, name: str, axis: int) -> int | None:
        shape = self.shapes.get(name, [])
        return shape[axis] if -len(shape) <= axis < len(shape) else None

    # Arithmetic with constants.

    def added(self, node: NodeProto, bounds: Bounds) -> Iterator[_Found]:
        one, other = node.input
        if (number := self.constant(other)) is not None:
            yield from self.uniform(one, bounds.before_adding(number if node.op_type == "Add" else -number))
        elif (number := self.constant(one)) is not None and node.op_type == "Add":
            yield from self.uniform(other, bounds.before_adding(number))
        elif number is not None:
            yield from self.uniform(other, bounds.before_subtracting_from(number))

    def multiplied(self, node: NodeProto, bounds: Bounds) -> Iterator[_Found]:
        for one, other in (node.input, reversed(node.input)):
            if (factor := self.constant(other)) is not None:
                yield from self.uniform(one, bounds.before_multiplying(factor))

    def divided(self, node: NodeProto, bounds: Bounds) -> Iterator[_Found]:
        divisor = self.constant(node.input[1])
        if divisor is not None and self.limits(node.output[0]) is not None:  # of integers: towards zero
            yield from self.uniform(node.input[0], bounds.before_dividing(divisor, floor=False))

    def negated(self, node: NodeProto, bounds: Bounds) -> Iterator[_Found]:
        yield from self.uniform(node.input[0], bounds.before_subtracting_from(0))

    def clamped(self, node: NodeProto, bounds: Bounds) -> Iterator[_Found]:
        names = [*node.input, "", ""]
        least, most = names[1:3] if node.op_type == "Clip" else (names[1], names[1])
        least, most = least if node.op_type != "Min" else "", most if node.op_type != "Max" else ""
        ends = [self.constant(end) if end else None for end in (least, most)]
        limits = self.limits(node.input[0])
        unknown = any(name and end is None for name, end in zip((least, most), ends, strict=True))
        if limits is not None and not unknown and (node.op_type == "Clip" or len(node.input) == 2):
            yield from self.uniform(node.input[0], bounds.before_clamping(ends[0], ends[1], *limits))

    def chosen(self, node: NodeProto, bounds: Bounds) -> Iterator[_Found]:
        """A constant in place of what a comparison with a number finds."""
        condition, one, other = node.input
        number, source, opposite = self.constant(one), other, False
        if number is None:
            number, source, opposite = self.constant(other), one, True
        maker = self.made_by.get(condition)
        while maker is not None and maker.op_type == "Not":
            maker, opposite = self.made_by.get(maker.input[0]), not opposite
        limits = self.limits(source)
        if number is None or maker is None or maker.op_type not in _COMPARED or limits is None:
            return
        comparison, (compared, with_) = _COMPARED[maker.op_type], maker.input
        if with_ == source:
            compared, with_, comparison = with_, compared, MIRRORED[comparison]
        limit = self.constant(with_)
        if compared == source and limit is not None and bounds.holds(number, number):
            comparison = OPPOSITE[comparison] if opposite else comparison
            assert comparison in COMPARISONS
            yield from self.uniform(source, bounds.before_choosing(comparison, limit, *limits))


_Rule = Callable[[_Needs, NodeProto, Bounds], Iterable[_Found]]
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(
        ("Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Expand", "Tile"), _Needs.moved
    ),
    "Cast": _Needs.cast, "Concat": _Needs.joined, "Gather": _Needs.gathered, "Slice": _Needs.sliced,
    "Add": _Needs.added, "Sub": _Needs.added, "Mul": _Needs.multiplied, "Div": _Needs.divided,
    "Neg": _Needs.negated, "Where": _Needs.chosen,
    "Clip": _Needs.clamped, "Max": _Needs.clamped, "Min": _Needs.clamped,
}  # fmt: skip
