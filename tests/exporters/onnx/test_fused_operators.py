"""Operators that ONNX Runtime's optimiser makes of several (``com.microsoft``) are half as what they are made of."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from halfeven.exporters.onnx.reading.normalise import BLOCKED, normalise
from onnx import ModelProto

from tests.command_line import run
from tests.exporters.onnx.onnx_files import convert, errors_u, parsed
from tests.exporters.onnx.traps import normal

LAYER = """g (float[n,s,64] x) => (float[n,s,64] y) {
    q = MatMul(x, wq)
    k = MatMul(x, wk)
    v = MatMul(x, wv)
    r = com.microsoft.RotaryEmbedding<num_heads=4>(q, start, cos, sin)
    a = com.microsoft.MultiHeadAttention<num_heads=4>(r, k, v)
    o = com.microsoft.FusedMatMul<alpha=0.5>(a, wo)
    m = com.microsoft.SkipSimplifiedLayerNormalization<epsilon=1e-6>(x, o, scale)
    f = com.microsoft.FusedMatMul(m, w1)
    b = com.microsoft.BiasGelu(f, bias)
    e = com.microsoft.QuickGelu(b)
    y = MatMul(e, w2)
}"""
FP32_AT_O1 = {"SkipSimplifiedLayerNormalization"}


def layer(random: np.random.Generator, text: str = LAYER) -> ModelProto:
    angles = np.outer(np.arange(32), 10.0 ** (-np.arange(8) / 2)).astype(np.float32)
    weights = {name: normal(random, 64, 64, scale=0.125) for name in ("wq", "wk", "wv", "wo", "w1", "w2")}
    weights |= {"scale": 1 + normal(random, 64, scale=0.1), "bias": normal(random, 64, scale=0.1)}
    weights |= {"cos": np.cos(angles), "sin": np.sin(angles), "start": np.zeros(1, np.int64)}
    return parsed(
        text, {name: weights[name] for name in weights if name in text}, more=', "com.microsoft" : 1'
    )


@pytest.mark.slow
def test_every_fused_operator_that_takes_a_half_computes_in_half(
    tmp_path: Path, random: np.random.Generator
) -> None:
    inputs = {"x": normal(random, 16, 12, 64)}
    converted = convert(tmp_path, layer(random), inputs)
    ops = {node.name: node.op_type for node in converted.program.nodes}
    half = converted.maker.settled.dtypes.half
    assert {op for name, op in ops.items() if name not in half} == FP32_AT_O1
    assert not converted.kept
    assert max(errors_u(converted, {"x": normal(random, 4, 9, 64)}).values()) < 4.0


@pytest.mark.slow
def test_a_file_of_fused_operators_is_served_in_half(tmp_path: Path, random: np.random.Generator) -> None:
    onnx.save(layer(random), tmp_path / "net.onnx")
    code, facts, said = run("convert", tmp_path / "net.onnx", "--store", tmp_path / "store", "--level", "O2")
    assert code == 0 and facts["forms"]["onnx"]["half_nodes"] >= 10, said


@pytest.mark.slow
def test_a_fused_operator_of_which_nothing_is_known_stays_in_fp32(
    tmp_path: Path, random: np.random.Generator
) -> None:
    text = """g (float[n,8,8] x) => (float[n,8,8] y)
        { a = MatMul(x, w) b = com.microsoft.Inverse(a) y = MatMul(b, w) }"""
    model = parsed(
        text, {"w": normal(random, 8, 8) + np.eye(8, dtype=np.float32) * 8}, more=', "com.microsoft" : 1'
    )
    converted = convert(tmp_path, model, {"x": normal(random, 16, 8, 8) + np.eye(8, dtype=np.float32) * 8})
    half = converted.maker.settled.dtypes.half
    assert {node.op_type: node.name in half for node in converted.program.nodes} == {
        "MatMul": True,
        "Inverse": False,
    }


def test_a_file_that_was_optimised_for_cpus_alone_is_named_as_one(
    tmp_path: Path, random: np.random.Generator
) -> None:
    text = (
        "g (float[n,16,8,8] x) => (float[n,16,8,8] y) { y = Conv<kernel_shape=[3,3],pads=[1,1,1,1]>(x, w) }"
    )
    onnx.save(parsed(text, {"w": normal(random, 16, 16, 3, 3)}), tmp_path / "plain.onnx")
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(tmp_path / "optimised.onnx"), 4
    onnxruntime.InferenceSession(tmp_path / "plain.onnx", options, providers=["CPUExecutionProvider"])
    model = onnx.load(tmp_path / "optimised.onnx")
    if all(node.domain != BLOCKED for node in model.graph.node):
        pytest.skip("this processor has no blocked convolutions")
    program = normalise(model, tmp_path / "optimised.onnx")
    assert "convert the file that it was given" in program.notes[0]
