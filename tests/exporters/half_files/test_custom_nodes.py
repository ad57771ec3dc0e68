"""A half of a file with nodes that ONNX Runtime does not know: they stand in it in FP32, and all else is proven."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from halfeven.exporters.conversion.convert import Options
from halfeven.exporters.exported.file_rows import write_npz
from halfeven.exporters.half_files.half_file import EQUAL, write_half
from halfeven.exporters.onnx.custom_nodes import cut, join
from halfeven.exporters.onnx.runtime import loaded
from halfeven.models.errors import BadFolder, BadSamples
from halfeven.serve.python_api import drop_in
from onnx import ModelProto, TensorProto, ValueInfoProto, helper, numpy_helper

from tests.command_line import run
from tests.exporters.half_files.verifier import verified_here
from tests.exporters.onnx.onnx_files import U, parsed

REAL = {"Wave": "Sin", "Scale": "Mul"}  # what computes the same as an operation of the plugin
DOMAIN = "trt.plugins"
# c is read in half and by a custom node.
NETS = {
    "in the middle": "h = MatMul (x, w1) p = trt.plugins.Wave (h) y = MatMul (p, w2)",
    "with a branch around": "h = MatMul (x, w1) p = trt.plugins.Scale (h, c) s = Add (p, h) y = MatMul (s, w2)",
    "two in a chain": """h = MatMul (x, w1) q = trt.plugins.Wave (h) p = trt.plugins.Scale (q, c) s = Sub (p, c)
        y = MatMul (s, w2)""",
    "of an input that no other node reads": """h = MatMul (x, w1) p = trt.plugins.Scale (h, z) s = Add (p, h)
        y = MatMul (s, w2)""",
    "at the end": "h = MatMul (x, w1) s = Mul (h, c) t = MatMul (s, w2) y = trt.plugins.Wave (t)",
}
pytestmark = pytest.mark.slow  # conversions


def net(text: str) -> ModelProto:
    random = np.random.default_rng(5)
    sizes = {"w1": (16, 32), "w2": (32, 4), "c": (1, 32)}
    weights = {name: (random.normal(size=size) / 8).astype(np.float32) for name, size in sizes.items()}
    inputs = "float[n,16] x, float[n,32] z" if " z)" in text else "float[n,16] x"
    return parsed(f"g ({inputs}) => (float[n,4] y) {{ {text} }}", weights, more=f', "{DOMAIN}" : 1')


def runnable(model: ModelProto) -> ModelProto:
    """The model with ONNX's own operations in place of the plugin's, all of whose tensors are outputs."""
    real = ModelProto.FromString(model.SerializeToString())
    custom = [node for node in real.graph.node if node.domain == DOMAIN]
    beside = {name for node in custom for name in (*node.input, *node.output)}
    beside -= {each.name for each in (*real.graph.initializer, *real.graph.output, *real.graph.input)}
    for node in custom:
        node.op_type, node.domain = REAL[node.op_type], ""
    real.graph.output.extend(ValueInfoProto(name=name) for name in beside)
    return real


def answered(model: ModelProto, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = loaded(runnable(model).SerializeToString())
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, map(np.asarray, session.run(names, dict(inputs))), strict=True))


def rows(model: ModelProto, count: int = 48) -> dict[str, np.ndarray]:
    sizes = {value.name: value.type.tensor_type.shape.dim[1].dim_value for value in model.graph.input}
    return {name: np.random.normal(size=(count, size)).astype(np.float32) for name, size in sizes.items()}


def prepared(folder: Path, name: str) -> tuple[Path, Path]:
    """The file, and its samples with all that the plugin answered inside of it."""
    model = net(NETS[name])
    onnx.save(model, folder / "net.onnx")
    inputs = rows(model)
    found = answered(model, inputs)
    write_npz(folder / "s.npz", inputs | {each: found[each] for each in "pq" if each in found})
    return folder / "net.onnx", folder / "s.npz"


@pytest.mark.parametrize("name", NETS)
def test_all_but_the_custom_nodes_is_half_and_answers_as_fp32_does(name: str, tmp_path: Path) -> None:
    source, samples = prepared(tmp_path, name)
    facts = write_half(source, tmp_path / "half.onnx", Options(samples=samples))
    assert facts["verdict"] == EQUAL, facts["reason"]
    whole, half = onnx.load(source), onnx.load(tmp_path / "half.onnx")
    custom = [[node for node in model.graph.node if node.domain == DOMAIN] for model in (whole, half)]
    assert [(n.op_type, list(n.output)) for n in custom[0]] == [
        (n.op_type, list(n.output)) for n in custom[1]
    ]
    onnx.checker.check_model(half)
    for own, as_given in ((half.graph.input, whole.graph.input), (half.graph.output, whole.graph.output)):
        assert [value.name for value in own] == [value.name for value in as_given]
    assert facts["forms"]["onnx"]["half_nodes"] >= 2
    held = {tensor.name: tensor.data_type for tensor in half.graph.initializer}
    read = {name for node in custom[1] for name in node.input}
    assert {held[name] for name in read & held.keys()} <= {TensorProto.FLOAT}
    outputs = loaded(runnable(half).SerializeToString()).get_outputs()
    assert {value.type for value in outputs} == {"tensor(float)"}  # also what the custom nodes read and give
    inputs = rows(whole)
    fp32, ours = answered(whole, inputs)["y"], answered(half, inputs)["y"]
    assert np.abs(ours - fp32).max() < 4 * U["fp16"] * np.abs(fp32).max()


def test_the_proof_says_what_was_not_run_in_every_command(tmp_path: Path) -> None:
    source, samples = prepared(tmp_path, "two in a chain")
    half, lock = tmp_path / "half.onnx", tmp_path / "halfeven.lock"
    code, facts, said = run("fp16", source, "-o", half, "--samples", samples)
    assert code == 0, said
    assert facts["around"] == {
        "nodes": ["trt.plugins.Wave 'q'", "trt.plugins.Scale 'p'"], "recorded": ["p"], "read": ["h"]
    }  # fmt: skip
    proof = tmp_path / "half.proof"
    sentence = "proven is all but trt.plugins.Wave 'q', trt.plugins.Scale 'p', given what they answered (p)"
    stated = {each.key: each.value for each in onnx.load(half).metadata_props}
    assert sentence in stated["halfeven.verdict"]
    assert (proof / "README.md").read_text().count(sentence) == 2  # the headline, and a section of its own
    assert json.loads((proof / "manifest.json").read_text())["around"] == facts["around"]
    code, facts, said = run("verify", half, "--card")
    assert code == 0 and sentence in facts["card"], said
    code, facts, said = run("lock", half, "-o", lock)
    assert code == 0 and sentence in facts["halves"][0]["summary"], said
    assert run("check", "--lock", lock)[0] == 0
    assert run("prove", proof, "--against", half)[0] == 0
    for change in (other_constant, one_more):
        onnx.save(change(onnx.load(half)), tmp_path / "other.onnx")
        code, _, said = run("prove", proof, "--against", tmp_path / "other.onnx")
        assert code == 2 and "they are not those of" in said, said
    code, _, said = run("prove", proof, "--against", samples)
    assert code == 2 and "does not judge answers of the whole model" in said and sentence in said
    code, said = verified_here(half)
    assert code == 3 and "this verifier does not run trt.plugins.Wave 'q'" in said


def other_constant(model: ModelProto) -> ModelProto:
    [scale] = [node for node in model.graph.node if node.op_type == "Scale"]
    [tensor] = [each for each in model.graph.initializer if each.name in scale.input]
    tensor.CopyFrom(numpy_helper.from_array(2 * numpy_helper.to_array(tensor), tensor.name))
    return model


def one_more(model: ModelProto) -> ModelProto:
    [wave] = [node for node in model.graph.node if node.op_type == "Wave"]
    model.graph.node.insert(0, helper.make_node("Evil", ["x"], ["evil"], domain=DOMAIN))
    wave.input.append("evil")
    return model


def test_a_drop_in_warns_of_the_nodes_that_were_not_run() -> None:
    with pytest.warns(UserWarning, match="proven is all but trt.plugins.Wave 'y'"):
        drop_in.convert_float_to_float16(net(NETS["at the end"]), keep_io_types=True)


def test_recorded_answers_that_are_missing_are_named_with_their_shape(tmp_path: Path) -> None:
    model = net(NETS["with a branch around"])
    onnx.save(model, tmp_path / "bare.onnx")
    model.graph.value_info.append(helper.make_tensor_value_info("p", TensorProto.FLOAT, ["n", 32]))
    onnx.save(model, tmp_path / "stated.onnx")
    np.savez(tmp_path / "x.npz", x=rows(model, 8)["x"])
    for name, array in (("bare", "'p'"), ("stated", r"'p' \[n, 32\]")):
        for samples in (None, tmp_path / "x.npz"):
            with pytest.raises(
                BadSamples, match=f"does not know trt.plugins.Scale 'p'.*the arrays {array} too"
            ):
                write_half(tmp_path / f"{name}.onnx", tmp_path / "half.onnx", Options(samples=samples))
    with pytest.raises(BadSamples, match=r"misspelt\.npz: cannot be read \(No such file"):
        write_half(tmp_path / "bare.onnx", tmp_path / "half.onnx", Options(samples=tmp_path / "misspelt.npz"))
    assert not (tmp_path / "half.onnx").exists()


def test_the_constants_of_a_custom_node_stand_in_the_half_in_the_order_in_which_it_reads_them() -> None:
    names = [f"c{place}" for place in range(8)]
    whole = net(f"h = MatMul (x, w1) y = trt.plugins.Many (h, {', '.join(names)})")
    whole.graph.initializer.extend(numpy_helper.from_array(np.ones(1, np.float32), name) for name in names)
    half = ModelProto.FromString(whole.SerializeToString())
    cut(half, {})
    del half.graph.initializer[:]
    join(half, whole)
    assert [tensor.name for tensor in half.graph.initializer] == names


def test_a_custom_node_in_a_body_is_refused(tmp_path: Path) -> None:
    text = """h = MatMul (x, w1) m = ReduceMax <keepdims = 0> (h) l = Less (m, m) y = If (l) <
        then_branch = a () => (float[n,4] u) { v = trt.plugins.Wave (h) u = MatMul (v, w2) },
        else_branch = b () => (float[n,4] u) { u = MatMul (h, w2) } >"""
    onnx.save(net(text), tmp_path / "net.onnx")
    with pytest.raises(
        BadFolder, match=r"does not know trt.plugins.Wave 'v', which is in the body of a node"
    ):
        write_half(tmp_path / "net.onnx", tmp_path / "half.onnx", Options())
