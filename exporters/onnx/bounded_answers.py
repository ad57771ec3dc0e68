"""Answers of a file whose Loops run as long as its inputs say, and whose values are as large as these say: what the
samples never need is refused, not waited for.

A conversion asks inputs that it made itself. One of zeros may never meet the condition that ends a Loop. One of numbers
four times as large may need as many passes as a lifetime has, or more memory than any machine has where a length is an
exponential. The bounds are counts, so they are the same on every machine.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from ...models.errors import NotRun
from ...models.spec.spec import ModelSpec
from ..inputs.samples import Samples
from ..question import ELEMENTS_AT_LEAST, PASSES_AT_LEAST, ROOM, Answers, Arrays
from .reading.graph import ONNX, Names, bodies, names_in, opset_of, replace_all
from .runtime import runtime_answers

_MIN_TAKES_INTEGERS = 12  # since this opset
# The inputs that say how large the result of an operation becomes.
_SIZES = {
    "ConstantOfShape": (0,), "Expand": (1,), "OneHot": (1,), "Pad": (1,), "Range": (0, 1, 2), "Resize": (2, 3),
    "Tile": (1,),
}  # fmt: skip


@dataclass(slots=True)
class _Count:
    """Counts of one kind in a graph: the outputs ``names``, and the input ``most``, which is given ``bound``; at first
    nothing is bounded. The bound is never less than ``at_least``."""

    most: str
    bound: np.ndarray
    at_least: int
    names: list[str] = field(default_factory=list)

    def value(self, name: str) -> ValueInfoProto:
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(self.bound.dtype), [])

    def taken_from(self, found: dict[str, np.ndarray]) -> float:
        return max(float(found.pop(name)) for name in self.names)


def bounded_answers(model: ModelProto, spec: ModelSpec, samples: Samples) -> Answers:
    """`runtime_answers` of a file, which raise NotRun for inputs with which a Loop of the main graph makes far more
    passes than with any sample, or a size that is computed there far more elements. What is inside of other bodies is
    not bounded. The model is changed."""
    loops, sizes = _open_loops(model), _open_sizes(model)
    if not (loops or sizes) or opset_of(model) < _MIN_TAKES_INTEGERS:
        return runtime_answers(model)
    names = Names(names_in(model.graph))
    passes = _Count(names.fresh("most_passes"), np.array(np.iinfo(np.int64).max), PASSES_AT_LEAST)
    elements = _Count(names.fresh("most_elements"), np.array(np.inf, np.float32), ELEMENTS_AT_LEAST)
    nodes = list[NodeProto]()
    for place, node in enumerate(model.graph.node):
        after = list[NodeProto]()
        if place in loops:
            before, after = _with_passes(node, passes, names)
            nodes += before
        elif place in sizes:
            nodes += _with_elements(node, sizes[place], elements, names)
        nodes += [node, *after]
    kinds = [kind for kind in (passes, elements) if kind.names]
    replace_all(model.graph.node, nodes)
    for kind in kinds:
        model.graph.input.append(kind.value(kind.most))
        model.graph.output.extend(map(kind.value, kind.names))
    answers = runtime_answers(model)

    def asked(arrays: Arrays) -> tuple[dict[str, np.ndarray], list[float]]:
        found = answers({**arrays, **{kind.most: kind.bound for kind in kinds}})
        return found, [kind.taken_from(found) for kind in kinds]

    def answer(arrays: Arrays) -> dict[str, np.ndarray]:
        found, counts = asked(arrays)
        for kind, count in zip(kinds, counts, strict=True):
            if kind is passes and count >= kind.bound:
                raise NotRun(
                    f"a Loop of '{spec.name}' makes {count:g} passes or more with these inputs, more than {ROOM} times "
                    "as many as with any sample"
                )
        return found

    seen = [counts for arrays in _each(spec, samples) if (counts := _counts(asked, arrays))]
    for place, kind in enumerate(kinds):
        most = max((counts[place] for counts in seen), default=0.0)
        kind.bound = np.array(max(kind.at_least, ROOM * most), kind.bound.dtype)
    return answer


def is_unbounded(model: ModelProto) -> bool:
    """True for a file with a Loop in its main graph that the file itself does not bound, or with a size that its inputs
    decide."""
    return bool(_open_loops(model) or _open_sizes(model))


def _open_loops(model: ModelProto) -> set[int]:
    """The places in the main graph of the Loops that the file itself does not bound."""
    known = {one.name: one for one in model.graph.initializer}

    def is_open(node: NodeProto) -> bool:
        bound = known.get(node.input[0])
        return bound is None or int(numpy_helper.to_array(bound).max()) > PASSES_AT_LEAST

    nodes = enumerate(model.graph.node)
    return {
        place for place, node in nodes if node.op_type == "Loop" and node.domain in ONNX and is_open(node)
    }


def _open_sizes(model: ModelProto) -> dict[int, tuple[int, ...]]:
    """The places in the main graph of the operations whose result is as large as numbers in the inputs say, with the
    places of the sizes among their own inputs. What is computed from shapes alone is no such size."""
    constant = {one.name for one in model.graph.initializer}
    from_inputs = {value.name for value in model.graph.input} - constant
    found = dict[int, tuple[int, ...]]()
    for place, node in enumerate(model.graph.node):
        if node.op_type in ("Shape", "Size"):
            continue
        if bodies(node) or not from_inputs.isdisjoint(node.input):
            from_inputs.update(filter(None, node.output))
        sizes = _SIZES.get(node.op_type, ()) if node.domain in ONNX else ()
        if not from_inputs.isdisjoint(name for at, name in enumerate(node.input) if at in sizes):
            found[place] = tuple(at for at in sizes if at < len(node.input) and node.input[at])
    return found


def _with_passes(loop: NodeProto, passes: _Count, names: Names) -> tuple[list[NodeProto], list[NodeProto]]:
    """The nodes before and after a Loop that give it at most so many passes and count those that it makes."""
    (body,), own, count = bodies(loop).values(), loop.input[0], names.fresh(f"{passes.most}__count")
    each, every = (names.fresh(f"{count}__{what}") for what in ("pass", "passes"))
    passes.names.append(count)
    body.node.append(helper.make_node("Identity", [body.input[0].name], [each]))
    loop.output.extend([""] * (len(body.output) - 1 - len(loop.output)))
    body.output.append(helper.make_tensor_value_info(each, TensorProto.INT64, []))
    loop.output.append(every)
    loop.input[0] = names.fresh(f"{count}__bound") if own else passes.most
    before = [helper.make_node("Min", [own, passes.most], [loop.input[0]])] if own else []
    return before, [helper.make_node("Size", [every], [count])]


def _with_elements(
    node: NodeProto, sizes: tuple[int, ...], elements: _Count, names: Names
) -> list[NodeProto]:
    """The nodes before an operation that count the elements that its sizes make, and end the run above the bound.

    The count is the product of all sizes, of a Range the number of its steps, each and 1. Above the bound a size is
    given another shape than it has, which ONNX Runtime refuses.
    """
    count, nodes = names.fresh(f"{elements.most}__count"), list[NodeProto]()
    elements.names.append(count)

    def add(op: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        output = output or names.fresh(f"{count}__{op.lower()}")
        nodes.append(helper.make_node(op, inputs, [output], **attributes))
        return output

    def constant(array: np.ndarray) -> str:
        return add("Constant", value=numpy_helper.from_array(array))

    numbers = [add("Cast", node.input[at], to=TensorProto.FLOAT) for at in sizes]
    if node.op_type == "Range":
        start, limit, step = numbers
        numbers = [add("Div", add("Sub", limit, start), step)]
    one = constant(np.array(1, np.float32))
    products = [add("ReduceProd", add("Add", add("Abs", number), one), keepdims=0) for number in numbers]
    add("Max", *products, output=count)
    beyond = add("Cast", add("Greater", count, elements.most), to=TensorProto.INT64)
    first, more = constant(np.array([0])), constant(np.array([2]))
    another = add("Slice", more, first, add("Reshape", beyond, constant(np.array([1]))))
    at = sizes[0] if node.op_type != "Range" else 1
    shape = add("Concat", add("Shape", node.input[at]), another, axis=0)
    node.input[at] = add("Reshape", node.input[at], shape)
    return nodes


def _each(spec: ModelSpec, samples: Samples) -> Iterator[Arrays]:
    """The samples in batches, as they are asked later."""
    for rows in sorted({1, spec.max_batch_size}) if spec.batched else [0]:
        yield from (arrays for _, arrays in samples.batches(min(rows, samples.count)))


def _counts(asked: Callable[[Arrays], tuple[object, list[float]]], arrays: Arrays) -> list[float]:
    try:
        return asked(arrays)[1]
    except NotRun:  # whoever asks it next says so
        return []
