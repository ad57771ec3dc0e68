"""The oracle rounds where half storage rounds: held against ONNX Runtime's own kernels by another way."""

# ruff: noqa: E501  (graphs in their own lines)

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from halfeven.exporters.inputs.samples import Samples
from halfeven.exporters.onnx.precision.oracle import Oracle, to_half_and_back, to_mantissa
from halfeven.exporters.onnx.precision.rewrite import HalfConstants, rounded
from halfeven.exporters.onnx.reading.graph import HALVES
from halfeven.exporters.onnx.reading.typing import value_types
from halfeven.models.errors import ExportFailed
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tests.exporters.onnx.onnx_files import ConvertedFile, convert, errors_u, gap_u, parsed
from tests.exporters.onnx.traps import FOREIGN, f32

EDGES = [
    65504.0,
    65519.99,
    65520.0,
    -65520.0,
    2.0**-24,
    2.0**-25,
    -(2.0**-25) * 1.001,
    1e-8,
    -1e-8,
    -0.0,
    3e38,
]
EDGES += [1.0 + 2.0**-11, 1.0 + 3 * 2.0**-11, np.inf, -np.inf, np.nan]


def spread(count: int = 20000) -> np.ndarray:
    random = np.random.default_rng()
    return np.concatenate(
        [random.standard_normal(count) * 10.0 ** random.uniform(-9, 6, count), EDGES]
    ).astype(np.float32)


def cast_pair(type_: int) -> onnxruntime.InferenceSession:
    """FP32 → half → FP32 in ONNX Runtime with its optimiser off."""
    name = TensorProto.DataType.Name(type_).lower()
    model = parsed(f"g (float[n] x) => (float[n] y) {{ h = Cast<to={type_}>(x) y = Cast<to=1>(h) }}")
    assert name in ("float16", "bfloat16")
    return _unoptimised(model)


def _unoptimised(model: ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


@pytest.mark.parametrize("type_", HALVES.values())
def test_rounding_is_bit_for_bit_that_of_onnx_runtimes_casts(type_: int) -> None:
    x = spread()
    expected = np.asarray(cast_pair(type_).run(None, {"x": x})[0])
    came = to_half_and_back(x, type_)
    number = ~np.isnan(x)
    assert np.array_equal(expected[number].view(np.int32), came[number].view(np.int32))
    assert np.isnan(came[~number]).all()


@pytest.mark.parametrize("type_", HALVES.values())
def test_the_mantissa_alone_rounds_as_half_does_and_knows_no_range(type_: int) -> None:
    x = spread()
    came = to_mantissa(x, type_)
    middle = (np.abs(x) > 1e-4) & (np.abs(x) < 6e4)
    assert np.array_equal(came[middle], to_half_and_back(x, type_)[middle])
    finite = np.isfinite(x) & (np.abs(x) < 1e38)
    u = 2.0**-11 if type_ == TensorProto.FLOAT16 else 2.0**-8
    assert (np.abs(came[finite] - x[finite]) <= u * np.abs(x[finite])).all()
    assert np.array_equal(came[~np.isfinite(x)], x[~np.isfinite(x)], equal_nan=True)


def with_cast_pairs(half: ModelProto) -> ModelProto:
    """The half in FP32, with a pair of casts behind every half value: the oracle by another way."""
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in half.graph.initializer}
    types = value_types(half, weights)
    model = ModelProto()
    model.CopyFrom(half)
    del model.graph.value_info[:], model.graph.initializer[:], model.graph.node[:]
    for name, array in weights.items():
        wide = array.astype(np.float32) if array.dtype == np.float16 else array
        model.graph.initializer.append(numpy_helper.from_array(wide, name))
    for node in half.graph.node:
        fresh = NodeProto.FromString(node.SerializeToString())
        for entry in fresh.attribute:
            if (entry.name, entry.i) == ("to", TensorProto.FLOAT16):
                entry.i = TensorProto.FLOAT
        rounds = [slot for slot, name in enumerate(node.output) if types.get(name) == TensorProto.FLOAT16]
        for slot in rounds:
            fresh.output[slot] = f"{node.output[slot]}!"
        model.graph.node.append(fresh)
        for slot in rounds:
            name = node.output[slot]
            model.graph.node.append(
                helper.make_node("Cast", [f"{name}!"], [f"{name}?"], to=TensorProto.FLOAT16)
            )
            model.graph.node.append(helper.make_node("Cast", [f"{name}?"], [name], to=TensorProto.FLOAT))
    return model


FLAT = ["mlp", "masks with fully masked rows", "convolutions and batch norm", "an LSTM", "a Resize with scales", "a norm whose squares overflow"]  # fmt: skip


def converted(name: str, path: Path, level: str = "O1") -> tuple[ConvertedFile, dict[str, np.ndarray]]:
    trap, random = FOREIGN[name], np.random.default_rng()
    return convert(path, trap.model(), trap.inputs(random, 16), level), trap.inputs(random, 5)


@pytest.mark.slow
@pytest.mark.parametrize("name", FLAT)
def test_the_oracle_answers_bit_for_bit_as_the_graph_with_cast_pairs(name: str, tmp_path: Path) -> None:
    foreign, fresh = converted(name, tmp_path, "O3")
    assert foreign.half is not None
    session = _unoptimised(with_cast_pairs(foreign.half))
    expected = session.run(None, fresh)
    came = foreign.oracle_answers()(fresh)
    for value, other in zip(foreign.half.graph.output, expected, strict=True):
        assert np.array_equal(came[value.name], np.asarray(other))


def test_the_oracle_sees_the_overflow_that_onnx_runtimes_cpu_hides() -> None:
    text = "g (float16[n,4] x) => (float16[n,4] y) { a = Mul(x, big) y = Div(a, big) }"
    model = parsed(text, {"big": np.array(30000, np.float16)})
    x = {"x": np.full((2, 4), 5, np.float16)}
    weights = {"big": np.array(30000, np.float16)}
    del model.graph.initializer[:]
    assert np.isinf(Oracle(model, weights).run(x)["y"]).all()
    assert (Oracle(model, weights, to_mantissa).run(x)["y"] == 5).all()


@pytest.mark.parametrize(
    "name", ["a Loop with FP32 state", "a Scan", "an If in a Loop", "an If that captures"]
)
def test_control_flow_without_half_answers_as_onnx_runtime(name: str, tmp_path: Path) -> None:
    trap = FOREIGN[name]
    samples = trap.inputs(np.random.default_rng(), 8)
    foreign = convert(tmp_path, trap.model(), samples, "O0", max_batch_size=trap.max_batch_size)
    assert foreign.half is None and foreign.half_nodes == 0
    for row in range(8):
        inputs = {k: v[row] if trap.max_batch_size == 0 else v[row : row + 1] for k, v in samples.items()}
        expected, came = foreign.original_answers()(inputs), foreign.oracle_answers()(inputs)
        for key in expected:
            assert gap_u([(expected[key], came[key])], 2.0**-11) < 0.01


def test_a_scan_backwards_and_a_loop_without_a_trip_answer_as_onnx_runtime(tmp_path: Path) -> None:
    text = (
        "g (float[4,6] x, int64 n) => (float[6] last, float[6,4] all, float[6] s) { last, all = Scan<num_scan_inputs=1,"
        " scan_input_directions=[1], scan_output_axes=[1], scan_output_directions=[1], body = b (float[6] s0, float[6] row)"
        " => (float[6] s1, float[6] o) { s1 = Add(s0, row) o = Mul(s1, row) }>(start, x) go = Constant<value = bool {1}>()"
        " s = Loop(n, go, last) <body = c (int64 i, bool k, float[6] a) => (bool k2, float[6] a2)"
        " { k2 = Identity(k) a2 = Tanh(a) }> }"
    )
    random = np.random.default_rng()
    samples = {"x": random.standard_normal((6, 4, 6)).astype(np.float32), "n": random.integers(0, 3, 6)}
    foreign = convert(
        tmp_path, parsed(text, {"start": np.zeros(6, np.float32)}), samples, "O0", max_batch_size=0
    )
    for row in range(6):
        inputs = {name: array[row] for name, array in samples.items()}
        expected, came = foreign.original_answers()(inputs), foreign.oracle_answers()(inputs)
        assert all(np.allclose(expected[name], came[name], rtol=1e-5, atol=1e-6) for name in expected)


GROWING = """g (float[n,8] x) => (float[n,1] y) { h = MatMul(x, w) s = Sigmoid(h) z = Sub(s, s) a = Add(z, one)
    y = Loop(endless, yes, a) <body = b (int64 i, bool c, float[1,1] p) => (bool o, float[1,1] q)
    { d = Mul(s, tiny) q = Add(p, d) r = ReduceMax<keepdims=0>(q) o = Less(r, most) }> }"""


@pytest.mark.slow
def test_a_loop_that_half_never_ends_is_refused_and_its_sum_stays_in_fp32(tmp_path: Path) -> None:
    """In FP16 nothing is added to 1: each addend is less than half a step."""
    random = np.random.default_rng()
    numbers = {"one": 1.0, "tiny": 4e-4, "most": 1.003, "w": random.uniform(-0.1, 0.1, (8, 1))}
    weights = {name: f32(number) for name, number in numbers.items()}
    weights |= {"yes": np.array(True), "endless": np.array(np.iinfo(np.int64).max)}
    samples = {"x": f32(random.standard_normal((8, 8)))}
    foreign = convert(tmp_path, parsed(GROWING, weights), samples, "O3", max_batch_size=1)
    assert [kept.node for kept in foreign.kept] == ["loop.body.add"]
    assert errors_u(foreign, {"x": samples["x"][:1]})["y"] <= 4.0
    half = foreign.maker.graph(foreign.maker.settled.precision, Samples(samples)).half()
    with pytest.raises(ExportFailed, match=r"'loop' \(Loop\) makes more than \d+ passes"):
        half({"x": samples["x"][:1]})


@pytest.mark.parametrize("type_", ["bool", "double", "int32", "float"])
def test_what_a_loop_without_a_pass_gives_has_its_type(type_: str) -> None:
    """(ONNX Runtime runs no Scan of no rows.)"""
    text = f"""g (float[6] x, int64 n, bool yes) => ({type_}[a,6] all) {{ last, all = Loop(n, yes, x) <body =
        b (int64 i, bool k, float[6] s0) => (bool k2, float[6] s1, {type_}[6] o) {{ k2 = Identity(k) s1 = Tanh(s0)
        o = Cast<to={TensorProto.DataType.Value(type_.upper())}>(s0) }}> }}"""
    given = {"x": np.zeros(6, np.float32), "n": np.array(0), "yes": np.array(True)}
    expected = np.asarray(_unoptimised(parsed(text)).run(["all"], given)[0])
    came = Oracle(parsed(text), {}).run(given)["all"]
    assert (came.dtype, came.shape) == (expected.dtype, expected.shape)


def test_weights_round_as_torchs_half_does_with_sign_and_zeros_and_no_clamp() -> None:
    x = spread()
    with np.errstate(over="ignore"):
        came = rounded(x, "fp16")
    expected = torch.from_numpy(x).half().numpy()
    assert np.array_equal(came.view(np.int16), expected.view(np.int16))
    tiny = rounded(np.array([-1e-9, 1e-9, -1e-7, 7e4], np.float32), "fp16")
    assert np.array_equal(np.signbit(tiny), [True, False, True, False])
    assert (tiny[:2] == 0).all() and tiny[2] != 0 and np.isinf(tiny[3])


def test_the_ledger_says_what_half_would_cost() -> None:
    healthy = f32(np.random.default_rng().standard_normal((16, 16)))
    dead_row = f32(healthy * 0.05)
    dead_row[3] = 2e-7  # three and a third of the least that half has
    bias, big, mask = f32([0.5, -0.25, 1e-7]), f32([7e4]), f32([-np.inf, 0])
    numbers = {"tiny": healthy * f32(1e-7), "eps": f32(1e-6), "gone": f32(1e-9)}
    ledger = HalfConstants(
        {"w": healthy, "row": dead_row, "b": bias, "big": big, "mask": mask} | numbers, "fp16"
    )
    asked = ["w", "row", "b", "big", "mask", *numbers]  # of row and b a share of the norm: the samples decide
    assert {name for name in asked if ledger.entry(name).over_budget} == {"tiny", "gone", "big"}
    assert ledger.entry("w").error_u < 1 and ledger.entry("big").saturated == 1
    assert "'tiny' does not fit in half" in ledger.entry("tiny").reason
    assert "would become zero" in ledger.entry("gone").evidence
    assert "would become infinite" in ledger.entry("big").evidence


@pytest.mark.slow
def test_a_half_run_by_onnx_runtime_gives_the_specs_datatypes(tmp_path: Path) -> None:
    foreign, fresh = converted("an output that is read inside", tmp_path)
    answers = foreign.half_answers()(fresh)
    assert {array.dtype for array in answers.values()} == {np.dtype(np.float32)}
    assert foreign.half is not None
    assert [value.type.tensor_type.elem_type for value in foreign.half.graph.output] == [1, 1, 1]
    onnx.checker.check_model(foreign.half, full_check=True)
