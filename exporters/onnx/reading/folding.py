"""Values that are computed from constants alone are computed once, here, and become constants.

Each node runs by itself in ONNX Runtime, in FP32, as the original would run it at every call. A value that is random,
quantised, or much larger than its inputs stays in the graph.

onnxscript's `fold_constants` is not right here: it computes with numpy, whose Exp, Tanh, Erf, Softmax and Pow differ
from ONNX Runtime's in the last bits, and it takes out a Cast of float to float, by which the file asks for FP32.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np
from onnx import ModelProto, NodeProto, helper

from ...policy.classes import Trait, has
from .graph import FLOATING, ONNX, bodies, graphs, rename_reads, replace_all, walk
from .one_node import Key, key_of, session
from .shapes import settle_sizes
from .typing import value_types

SMALL = 1 << 16  # bytes: constants up to this size are made whatever they are made of
_ENDLESS = (1 << 31) - 1  # as exporters write the end of an axis
GROWTH = 4  # times the bytes of its inputs may a larger one have


def fold(model: ModelProto, weights: dict[str, np.ndarray]) -> None:
    """Fold the FP32 model in place; ``weights`` gains the new constants and loses those that no node reads any more."""
    _settle_types(model, weights)
    before = set(weights)
    _Folding(model, weights).run()
    if settle_sizes(model, weights):
        _Folding(model, weights).run()
    _drop_idle(model, weights)
    read = {name for graph in graphs(model.graph) for node in graph.node for name in node.input}
    for name in before | set(weights):
        if name not in read:
            del weights[name]


def _settle_types(model: ModelProto, weights: dict[str, np.ndarray]) -> None:
    """A CastLike reads a value for its type alone, which is known: then it need not read it."""
    types = value_types(model, weights)
    for node in walk(model.graph):
        if node.op_type == "CastLike" and node.domain in ONNX and types.get(node.input[1]):
            to = types[node.input[1]]
            same = types.get(node.input[0]) == to
            plain = helper.make_node("Identity" if same else "Cast", [node.input[0]], list(node.output))
            if not same:
                plain.attribute.append(helper.make_attribute("to", to))
            plain.name = node.name
            node.CopyFrom(plain)


def _drop_idle(model: ModelProto, weights: Mapping[str, np.ndarray]) -> None:
    """Remove a Cast to the type that a value has, and a Slice of all elements: they change nothing.

    A Cast of float to float stays: the file asks for FP32 by it. Only readers that do not depend on the precision
    read past it.
    """
    types = value_types(model, weights)
    given = {value.name for graph in graphs(model.graph) for value in graph.output}
    looked_at = {
        name for node in walk(model.graph) if not _ignores_precision(node, weights) for name in node.input
    }
    for graph in graphs(model.graph):
        for node in list(graph.node):
            if node.op_type in ("Cast", "Slice") and given.isdisjoint(node.output):
                idle = _takes_all(node, weights)
                if node.op_type == "Cast" and types.get(node.input[0]) == (
                    type_ := types.get(node.output[0])
                ):
                    idle = type_ not in FLOATING or node.output[0] not in looked_at
                if idle:
                    rename_reads(model.graph, node.output[0], node.input[0])
                    graph.node.remove(node)


def _ignores_precision(node: NodeProto, weights: Mapping[str, np.ndarray]) -> bool:
    """True if the result of a node is the same for numbers rounded to half as for the FP32 numbers."""
    zero = any((weights[name] == 0).all() for name in node.input if name in weights)
    is_seen = has(node.op_type, Trait.SEES_SIZES, Trait.SEES_PRECISION)
    return is_seen or (has(node.op_type, Trait.COMPARES) and zero)


def _takes_all(node: NodeProto, weights: Mapping[str, np.ndarray]) -> bool:
    """True if a Slice goes from the first to the last, one by one."""
    if node.op_type != "Slice" or len(node.input) < 3:
        return False
    start, end = (weights.get(name) for name in node.input[1:3])
    steps = weights.get(node.input[4], None) if len(node.input) > 4 else np.ones(1)
    if start is None or end is None or steps is None:
        return False
    return bool((start == 0).all() and (end >= _ENDLESS).all() and (steps == 1).all())


class _Folding:
    def __init__(self, model: ModelProto, weights: dict[str, np.ndarray]) -> None:
        self.model, self.weights = model, weights
        self.readers = Counter(name for node in walk(model.graph) for name in set(node.input))
        self.made: dict[tuple[Key, tuple[str, ...]], list[str]] = {}

    def run(self) -> None:
        for graph in graphs(self.model.graph):
            declared = {value.name for value in graph.output}
            gone = [node for node in graph.node if declared.isdisjoint(node.output) and self.folds(node)]
            if gone:
                names = {node.name for node in gone}
                replace_all(graph.node, [node for node in graph.node if node.name not in names])

    def folds(self, node: NodeProto) -> bool:
        """Compute a node of constants; True where its outputs are constants now and the node can be removed."""
        inputs = [name for name in node.input if name]
        if not inputs or bodies(node) or node.domain not in ONNX or has(node.op_type, Trait.NOT_FOLDED):
            return False
        if any(name not in self.weights or self.weights[name].dtype == object for name in inputs):
            return False
        if node.op_type == "Identity":
            self.stands_for(node.input[0], node.output[0])
            return True
        types = [helper.np_dtype_to_tensor_dtype(self.weights[n].dtype) if n else 0 for n in node.input]
        key = key_of(node, types, self.model.opset_import, self.model.ir_version)
        if known := self.made.get((key, tuple(node.input))):
            for old, new in zip(node.output, known, strict=True):
                self.stands_for(new, old)
            return True
        found = self.computed(key, node)
        if found is None or not self.is_worth_it(inputs, found.values()):
            return False
        self.made[key, tuple(node.input)] = list(node.output)
        self.weights.update(found)
        self.readers.subtract(set(inputs))
        return True

    def computed(self, key: Key, node: NodeProto) -> dict[str, np.ndarray] | None:
        """The node's outputs; None where ONNX Runtime cannot run it."""
        feed = {f"i{slot}": self.weights[name] for slot, name in enumerate(node.input) if name}
        names = [name for name in node.output if name]
        try:
            results = session(key).run(None, feed)
        except Exception:
            return None
        arrays = [result for result in results if isinstance(result, np.ndarray)]
        return dict(zip(names, arrays, strict=True)) if len(arrays) == len(names) else None

    def is_worth_it(self, inputs: list[str], results: Iterable[np.ndarray]) -> bool:
        """True if folding a node makes the file no larger: its large inputs have no other reader, so that its result
        replaces them. A tied table that is transposed for one reader would be stored twice."""
        size = sum(array.nbytes for array in results)
        sources = {name: self.weights[name].nbytes for name in inputs}
        shared = any(self.readers[name] > 1 for name, bytes_ in sources.items() if bytes_ > SMALL)
        return size <= SMALL or (size <= GROWTH * sum(sources.values()) and not shared)

    def stands_for(self, constant: str, name: str) -> None:
        """Let all readers of ``name`` read ``constant``."""
        rename_reads(self.model.graph, name, constant)
        self.readers[constant] += self.readers.pop(name, 0) - 1
