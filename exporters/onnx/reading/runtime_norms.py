"""Normalisations that ONNX Runtime has in ONNX's own domain before ONNX has them, or without that ONNX has them at all.

ONNX Runtime's optimiser writes them: a LayerNormalization at an opset below 17, and SimplifiedLayerNormalization (a
root mean square) at any. ONNX's checker, its shape inference and its conversion of opsets know neither.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnx.version_converter import convert_version

from ....models.errors import BadFolder
from .graph import ONNX, Names, attribute, graphs, names_in, opset_of, replace_all, walk

SINCE = 17  # the first opset of ONNX with a LayerNormalization
_APART = "halfeven.later"  # the domain of what the conversion of opsets is to leave alone
_EPSILON = 1e-5
# The first opset whose GroupNormalization is valid: that of 18 is withdrawn, and torch wrote it.
GROUPS_SINCE = 21
AXES_AS_INPUT = 18  # the first opset whose ReduceMean has its axes as an input


def as_onnx_has_them(model: ModelProto) -> ModelProto:
    """The model with ONNX's own operators for them. Raises BadFolder where its opset cannot be converted."""
    names = Names(names_in(model.graph))
    for graph in graphs(model.graph):
        _write_out(graph, names, opset_of(model))
    early = [
        node for node in walk(model.graph) if node.op_type == "LayerNormalization" and node.domain in ONNX
    ]
    if not early or opset_of(model) >= SINCE:
        return model
    for node in early:
        node.domain = _APART
    model.opset_import.append(helper.make_opsetid(_APART, 1))
    try:
        model = convert_version(model, SINCE)
    except Exception as error:
        raise BadFolder(
            f"a LayerNormalization stands at opset {opset_of(model)}, where ONNX has none, and the file cannot be "
            f"converted to {SINCE}: {str(error)[:300]}; export it again with opset {SINCE} or later"
        ) from error
    for node in walk(model.graph):
        if node.domain == _APART:
            node.domain = ""
    replace_all(model.opset_import, [entry for entry in model.opset_import if entry.domain != _APART])
    return model


def _write_out(graph: GraphProto, names: Names, opset: int) -> None:
    """Each SimplifiedLayerNormalization of one output, and each GroupNormalization of an opset whose own ONNX withdrew,
    as the nodes that it is made of."""
    scales = {tensor.name: tensor.data_type for tensor in graph.initializer}

    def written(node: NodeProto) -> Iterable[NodeProto]:
        if _is_root_mean_square(node):
            element = scales.get(node.input[1], TensorProto.FLOAT)
            return _RootMeanSquare(node, graph, names, opset).nodes(element)
        if node.op_type == "GroupNormalization" and node.domain in ONNX and opset < GROUPS_SINCE:
            return _GroupNorm(node, graph, names, opset).nodes()
        return (node,)

    nodes = [each for node in graph.node for each in written(node)]
    if len(nodes) > len(graph.node):
        replace_all(graph.node, nodes)


def _is_root_mean_square(node: NodeProto) -> bool:
    return (
        node.op_type == "SimplifiedLayerNormalization"
        and node.domain in ONNX
        and not any(node.output[1:])
        and attribute(node, "axis", -1) == -1
        and attribute(node, "stash_type", TensorProto.FLOAT) == TensorProto.FLOAT
    )


@dataclass(frozen=True, slots=True)
class _Written:
    """A node that other nodes take the place of."""

    node: NodeProto
    graph: GraphProto
    names: Names
    opset: int

    def step(self, op: str, inputs: Sequence[str], **attributes: Any) -> NodeProto:
        output = self.names.fresh(f"{self.node.output[0]}__{op.lower()}")
        label = f"{self.node.name or self.node.output[0]}.{output}"
        return helper.make_node(op, inputs, [output], label, **attributes)

    def constant(self, part: str, number: np.ndarray | np.float32) -> str:
        name = self.names.fresh(f"{self.node.output[0]}__{part}")
        self.graph.initializer.append(numpy_helper.from_array(np.asarray(number), name))
        return name


class _GroupNorm(_Written):
    """The groups are the channels of an InstanceNormalization. Before opset 21 a group has one scale and one bias."""

    def nodes(self) -> Iterator[NodeProto]:
        value, scale, bias = self.node.input
        yield (shape := self.step("Shape", [value]))
        places = self.constant("groups", np.array([0, attribute(self.node, "num_groups"), -1]))
        yield (grouped := self.step("Reshape", [value, places]))
        epsilon = attribute(self.node, "epsilon", _EPSILON)
        yield (even := self.step("InstanceNormalization", [grouped.output[0], scale, bias], epsilon=epsilon))
        last = self.step("Reshape", [even.output[0], shape.output[0]])
        last.output[0] = self.node.output[0]
        yield last


class _RootMeanSquare(_Written):
    """x / sqrt(mean(x²) + epsilon) · scale, in FP32 inside as ONNX Runtime computes it."""

    def nodes(self, element: int) -> Iterator[NodeProto]:
        """``element``: the type of the values and of the scale."""
        (value, scale), narrow = self.node.input[:2], element != TensorProto.FLOAT
        if narrow:
            yield (cast := self.step("Cast", [value], to=TensorProto.FLOAT))
            value = cast.output[0]
        yield (square := self.step("Pow", [value, self.constant("two", np.float32(2.0))]))
        axes = self.constant("axes", np.array([-1])) if self.opset >= AXES_AS_INPUT else None
        yield (mean := self.step("ReduceMean", [square.output[0], *filter(None, [axes])], keepdims=1,
                                 **({} if axes else {"axes": [-1]})))  # fmt: skip
        number = attribute(self.node, "epsilon", _EPSILON)
        assert isinstance(number, float)
        epsilon = self.constant("epsilon", np.float32(number))
        yield (total := self.step("Add", [mean.output[0], epsilon]))
        yield (root := self.step("Sqrt", [total.output[0]]))
        yield (even := self.step("Div", [value, root.output[0]]))
        if narrow:
            yield (even := self.step("Cast", [even.output[0]], to=element))
        last = self.step("Mul", [even.output[0], scale])
        last.output[0] = self.node.output[0]
        yield last
