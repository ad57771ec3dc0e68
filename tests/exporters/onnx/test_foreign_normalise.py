"""The graph that everything works on: sorted, constants apart, every value and node with a name of its own."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx.parser
import pytest
from halfeven.exporters.onnx.reading.graph import ForeignProgram, attribute, graphs, walk
from halfeven.exporters.onnx.reading.normalise import normalise

TEXTS = {
    "both branches use one name": """g (float[2] x, bool c) => (float[2] y) { y = If(c)
        <then_branch = a () => (float[2] p) { q = Relu(x) p = Neg(q) },
        else_branch = e () => (float[2] p) { q = Neg(x) p = Relu(q) }> }""",
    "a branch gives an outer value": """g (float[2] x, bool c) => (float[2] y) { h = Relu(x) y = If(c)
        <then_branch = a () => (float[2] h) { }, else_branch = e () => (float[2] p) { p = Neg(h) }> }""",
    "a branch needs what comes later": """g (float[2] x, bool c) => (float[2] y) { y = If(c)
        <then_branch = a () => (float[2] p) { p = Neg(h) },
        else_branch = e () => (float[2] p) { p = Relu(h) }> h = Relu(x) }""",
    "a branch gives a constant": """g (float[2] x, bool c) => (float[2] y) { y = If(c)
        <then_branch = a () => (float[2] p) { p = Constant<value_floats = [1.0, 2.0]>() },
        else_branch = e () => (float[2] p) { p = Neg(x) }> }""",
}


def program(text: str) -> ForeignProgram:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> {text}')
    return normalise(model, Path("model.onnx"))


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_every_value_and_node_has_one_name_and_every_output_a_maker(text: str) -> None:
    found = program(text)
    values = [name for node in walk(found.graph) for name in node.output]
    values += [value.name for graph in graphs(found.graph) for value in graph.input]
    names = Counter([*values, *found.weights])
    assert [name for name, times in names.items() if times > 1] == []
    assert len({node.name for node in found.nodes}) == len(found.nodes)
    for graph in graphs(found.graph):
        made = {name for node in graph.node for name in node.output}
        assert all(value.name in made for value in graph.output)
        assert not graph.initializer and all(node.op_type != "Constant" for node in graph.node)


def test_a_spectrum_has_one_side_where_the_file_does_not_say() -> None:
    """The standard's default, which onnx's shape inference does not take."""
    numbers = ", ".join(["1.0"] * 8)
    found = program(
        f"g (float[1,32,1] x) => (float[1,4,5,2] y) {{ s = Constant<value_int=8>() "
        f"w = Constant<value_floats=[{numbers}]>() y = STFT(x, s, w) }}"
    )
    (node,) = (node for node in walk(found.graph) if node.op_type == "STFT")
    assert attribute(node, "onesided") == 1


def test_inputs_and_outputs_of_the_model_keep_their_names() -> None:
    found = program(
        "g (float[2] x) => (float[2] x, float[2] y, float z) { y = Neg(x) z = Constant<value_float=2.0>() }"
    )
    assert [value.name for value in found.graph.input] == ["x"]
    assert [value.name for value in found.graph.output] == ["x", "y", "z"]
    assert [node.op_type for node in found.graph.node] == ["Neg", "Identity"]
    assert {name: np.asarray(array).tolist() for name, array in found.weights.items()} == {"z__value": 2.0}


@pytest.mark.parametrize("opset", [11, 18])
def test_a_model_keeps_what_its_file_says_of_it_but_for_another_proof(opset: int) -> None:
    """Ultralytics, for one, has the names of its classes there."""
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {opset}]> g (float[n,2] x) => (float[n,2] y) {{ y = Relu(x) }}'
    )
    said = {"names": "{0: 'cat', 1: 'dog'}", "author": "Ä", "halfeven.proof": "of another half"}
    onnx.helper.set_model_props(model, said)
    found = {each.key: each.value for each in normalise(model, Path("model.onnx")).model.metadata_props}
    assert found == {key: said[key] for key in ("names", "author")}
