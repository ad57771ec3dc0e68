"""A half whose answers differ in shape from sample to sample is proven, written and verified as any other."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from halfeven.exporters.conversion.convert import Options
from halfeven.exporters.exported.other_engine import answers_file, prove_engine
from halfeven.exporters.half_files.half_file import proof_folder, proof_of, verify, write_half
from halfeven.exporters.inputs.samples import stored_samples
from halfeven.models.errors import BadInput
from onnx import TensorProto, helper, numpy_helper

from tests.exporters.half_files.onnx_net import samples, written
from tests.exporters.half_files.verifier import verified

pytestmark = pytest.mark.slow  # a conversion


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows are answered where their first number is above 0; the other output has one shape, the last is the input."""
    folder, draw = tmp_path_factory.mktemp("rows"), np.random.default_rng(5)
    weights = {"w": draw.normal(0, 0.3, (4, 16)), "v": draw.normal(0, 0.3, (16, 3))}
    nodes = [
        helper.make_node("Gather", ["x", "first"], ["lead"], axis=1),
        helper.make_node("Greater", ["lead", "zero"], ["above"]),
        helper.make_node("Compress", ["x", "above"], ["found"], axis=0),
        helper.make_node("MatMul", ["found", "w"], ["hidden"]),
        helper.make_node("Tanh", ["hidden"], ["bent"]),
        helper.make_node("MatMul", ["bent", "v"], ["y"]),
        helper.make_node("MatMul", ["x", "w"], ["z"]),
    ]
    constants = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()]
    constants += [numpy_helper.from_array(np.array(value), name) for name, value in
                  (("first", np.int64(0)), ("zero", np.float32(0)))]  # fmt: skip
    graph = helper.make_graph(
        nodes,
        "rows",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [6, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["found", 3]),
         helper.make_tensor_value_info("z", TensorProto.FLOAT, [6, 16]),
         helper.make_tensor_value_info("x", TensorProto.FLOAT, [6, 4])],
        constants,
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 18)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), folder / "rows.onnx")
    np.savez(folder / "samples.npz", x=draw.normal(size=(40, 6, 4)).astype(np.float32))
    options = Options(samples=folder / "samples.npz")
    made = write_half(folder / "rows.onnx", folder / "rows.fp16.onnx", options)
    assert made["verdict"] == "equal", made
    return Path(made["file"])


def test_such_an_output_has_an_array_for_each_row(half: Path) -> None:
    with (
        np.load(proof_folder(half) / "expected.npz") as answers,
        np.load(proof_folder(half) / "inputs.npz") as rows,
    ):
        assert answers["z"].shape == (len(rows["x"]), 6, 16) and "y" not in answers
        for row, x in enumerate(rows["x"]):
            assert answers[f"y[{row}]"].shape == (int((x[:, 0] > 0).sum()), 3)


def test_gate_and_verifier_agree_on_it(half: Path) -> None:
    assert verify(half)["status"] == "equal"
    code, said = verified(half)
    assert code == 0, said


def test_an_output_may_have_the_name_of_another_ones_row(tmp_path: Path) -> None:
    model = onnx.load(written(tmp_path / "net.onnx"))
    model.graph.node.append(helper.make_node("Relu", ["y"], ["y[0]"]))
    model.graph.output.append(helper.make_tensor_value_info("y[0]", TensorProto.FLOAT, ["n", 4]))
    onnx.save(model, tmp_path / "net.onnx")
    half, options = tmp_path / "half.onnx", Options(samples=samples(tmp_path / "x.npz"))
    assert write_half(tmp_path / "net.onnx", half, options)["verdict"] == "equal"
    assert verify(half)["status"] == "equal" and verified(half)[0] == 0


def test_it_may_not_where_the_rows_of_the_other_one_differ_in_shape(half: Path, tmp_path: Path) -> None:
    """The file of rows would have two arrays of one name."""
    model = onnx.load(half.with_name("rows.onnx"))
    for node in model.graph.node:
        node.output[:] = ["y[0]" if name == "z" else name for name in node.output]
    model.graph.output[1].name = "y[0]"
    onnx.save(model, tmp_path / "rows.onnx")
    with pytest.raises(BadInput, match=r"'y\[0\]' is the name of a tensor, and of a row of 'y'"):
        write_half(
            tmp_path / "rows.onnx", tmp_path / "half.onnx", Options(samples=half.with_name("samples.npz"))
        )


def test_a_file_of_its_answers_is_judged_row_by_row(half: Path, tmp_path: Path) -> None:
    version = proof_of(half)
    answers = dict(np.load(proof_folder(half) / "expected.npz"))
    for right in (True, False):
        if not right:
            answers["y[3]"] = answers["y[3]"] + np.float32(1)
        np.savez(tmp_path / "answers.npz", **answers)
        proof = prove_engine(version, stored_samples(version), answers_file(tmp_path / "answers.npz"))
        assert proof["status"] == ("equal" if right else "refused")
