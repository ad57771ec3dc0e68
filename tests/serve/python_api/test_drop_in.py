"""`halfeven.fp16` and the functions of other converters: they take what those take, and what they give is proven."""

import contextlib
import shutil
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import halfeven as he
import numpy as np
import onnx
import onnxruntime
import pytest
from halfeven import drop_in
from halfeven.exporters.onnx.reading.graph import opset_of
from halfeven.models.errors import BadInput, BadSamples, BadSetting, Conflict, ParityRefused
from halfeven.serve.python_api import drop_in as drop_in_functions
from onnx import ModelProto, TensorProto, helper, numpy_helper

from tests.exporters.half_files.onnx_net import answers, samples, written
from tests.exporters.onnx.onnx_files import parsed

pytestmark = pytest.mark.slow  # a conversion each


@pytest.fixture
def net(tmp_path: Path) -> Path:
    return written(tmp_path / "net.onnx")


def halves(model: ModelProto) -> set[str]:
    return {one.name for one in model.graph.initializer if one.data_type == TensorProto.FLOAT16}


def ops(model: ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def ends(model: ModelProto) -> list[int]:
    """The element types of all inputs and outputs."""
    return [value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)]


def asked(model: ModelProto, x: np.ndarray) -> list[np.ndarray]:
    """ONNX Runtime's answers to the input in the datatype that the model takes."""
    (given,) = model.graph.input
    half = given.type.tensor_type.elem_type == TensorProto.FLOAT16
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return [
        np.asarray(found) for found in session.run(None, {given.name: x.astype(np.float16) if half else x})
    ]


def check_equal(model: ModelProto, net: Path) -> None:
    x = np.random.normal(size=(5, 16)).astype(np.float32)
    expected = answers(onnx.load(net), x)
    np.testing.assert_allclose(asked(model, x)[0], expected, atol=4 * 2**-11 * np.abs(expected).max())
    onnx.checker.check_model(model, full_check=True)


def test_fp16_writes_the_file_and_says_what_was_found(net: Path, tmp_path: Path) -> None:
    x = np.random.normal(size=(24, 16)).astype(np.float32)
    made = he.fp16(net, tmp_path / "half.onnx", {"x": x})
    assert made.verdict == "equal" and made.file == tmp_path / "half.onnx"
    assert made.proof is not None and (made.proof / "parity.json").is_file() and "passed" in str(made)


# The cases of onnxconverter_common's own tests: test_float16.py, test_auto_mixed_precision.py and …_model_path.py.


def test_inputs_and_outputs_become_half_unless_they_are_kept(net: Path) -> None:
    """All of them become half by default, none with ``keep_io_types=True``, all but the named ones with a list; and no
    Cast is left over."""
    given = onnx.load(net)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for keep, types, expected in (
            (False, [10, 10], ["MatMul", "Relu", "MatMul"]),
            (["y"], [10, 1], ["MatMul", "Relu", "MatMul", "Cast"]),
            (True, [1, 1], ["Cast", "MatMul", "Relu", "MatMul", "Cast"]),
        ):
            made = drop_in.convert_float_to_float16(given, keep_io_types=keep)
            assert ends(made) == types and ops(made) == expected and len(halves(made)) == 2
            check_equal(made, net)
    assert given == onnx.load(net)  # the caller's model is as it was


@pytest.mark.parametrize("end", ["x", "y"])
def test_inputs_and_outputs_beyond_the_range_of_half_stay_so_only_where_they_are_kept(
    end: str, net: Path
) -> None:
    model, scale = onnx.load(net), np.float32(1e6 if end == "y" else 1e-6)
    for tensor in model.graph.initializer:
        if tensor.name == ("last" if end == "y" else "first"):
            tensor.CopyFrom(numpy_helper.from_array(scale * numpy_helper.to_array(tensor), tensor.name))
    rows = {"x": (np.random.normal(size=(16, 16)) / min(scale, 1)).astype(np.float32)}
    with pytest.raises((ParityRefused, BadSamples)):
        drop_in.auto_convert_mixed_precision(model, rows)
    onnx.save(model, net)
    check_equal(drop_in.auto_convert_mixed_precision(model, rows, keep_io_types=True), net)


LOOP = """g (float[n,4] x) => (float[4] total, float[n,4] sums) {
    size = Shape(x) rows = Gather(size, zero) start = Expand(nought, four)
    total, sums = Loop(rows, true, start) <body = b (int64 i, bool c, float[4] t) => (bool o, float[4] s, float[4] p) {
        row = Gather(x, i) s = Add(t, row) p = Identity(s) o = Identity(c)
    }>
}"""


@pytest.mark.parametrize("keep", [False, True])
def test_a_loop_whose_body_reads_an_outer_value(keep: bool) -> None:
    constants = {"zero": np.int64(0), "four": np.array([4]), "true": np.True_, "nought": np.float32(0)}
    model = parsed(LOOP, {name: np.asarray(value) for name, value in constants.items()})
    made = drop_in.convert_float_to_float16(model, keep_io_types=keep)
    x = np.array([[2, 3, 1, 0], [4, 5, 1, 0], [6, 7, 1, 0]], np.float32)
    for expected, came in zip(asked(model, x), asked(made, x), strict=True):
        assert came.dtype == (np.float32 if keep else np.float16)
        np.testing.assert_allclose(came, expected, rtol=1e-3)


def test_nodes_of_the_lists_stay_in_fp32_and_what_is_ignored_is_named(net: Path) -> None:
    with pytest.warns(UserWarning, match="ignores min_positive_val, force_fp16_initializers"):
        kept = drop_in.convert_float_to_float16_model_path(
            str(net),
            1e-6,
            keep_io_types=True,
            node_block_list=["first_product"],
            force_fp16_initializers=True,
        )
    check_equal(kept, net)
    assert len(halves(kept)) == 1
    model = onnx.load(net)
    model.graph.node[0].name = "/layers[0]/MatMul"
    kept = drop_in.convert_float_to_float16(
        model, node_block_list=["/layers[0]/MatMul", "/layers[1]/MatMul"], op_block_list=["Resize"]
    )
    assert len(halves(kept)) == 1 and ends(kept) == [10, 10]
    check_equal(kept, net)
    blocked = ["MatMul", "Relu"]
    with pytest.warns(UserWarning, match="gives the model back in FP32: nothing is half"):
        kept_all = drop_in.convert_float_to_float16(model, keep_io_types=True, op_block_list=blocked)
    assert kept_all == model
    with pytest.raises(ParityRefused, match="no half of the model is proven equal"):
        drop_in.convert_float_to_float16(model, op_block_list=blocked)
    with pytest.raises(BadInput, match="has half values already: expected one in FP32"):
        drop_in.convert_float_to_float16(kept)
    with pytest.raises(BadInput, match="expected an ONNX ModelProto or the path of a file, got a bytes"):
        drop_in.convert_float_to_float16(net.read_bytes())  # type: ignore[arg-type]


def test_a_list_may_name_nodes_that_are_folded(net: Path) -> None:
    model = onnx.load(net)
    constant = helper.make_node(
        "Constant", [], ["first"], "first_weight", value=model.graph.initializer.pop(0)
    )
    model.graph.node.insert(0, constant)
    made = drop_in.convert_float_to_float16(model, op_block_list=["Constant", "Relu"])
    assert ops(made).count("Cast") == 2 and len(halves(made)) == 2
    onnx.save(model, net)
    made = drop_in.convert_to_mixed_precision(net, nodes_to_exclude=["first.*"])
    assert len(halves(made)) == 1


def test_the_automatic_converter_judges_by_its_feed(net: Path) -> None:
    """The caller's own rule holds beside the gate."""
    feed, seen = {"x": np.random.normal(size=(8, 16)).astype(np.float32)}, list[tuple[Any, Any]]()

    def validate(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> bool:
        seen.append((one[0].dtype, other[0].dtype))
        return np.allclose(one[0], other[0], rtol=0.01, atol=0.05)

    made = drop_in.auto_convert_mixed_precision(onnx.load(net), feed, validate, keep_io_types=True)
    check_equal(made, net)
    said = {each.key: each.value for each in made.metadata_props}["halfeven.verdict"]
    assert said.startswith("Equal on 4 of your samples")
    made = drop_in.auto_convert_mixed_precision(onnx.load(net), feed, validate, rtol=0.01, atol=0.05)
    check_equal(made, net)
    assert ends(made) == [10, 10] and seen == [(np.float32, np.float32), (np.float32, np.float16)]
    with pytest.raises(ParityRefused, match="validate_fn, rtol or atol refuse its answers"):
        drop_in.auto_convert_mixed_precision(onnx.load(net), feed, rtol=1e-9)


def test_the_callers_rule_compares_the_outputs_that_the_half_has(net: Path) -> None:
    """A sequence is left out of a half. The model may be given by its path."""
    feed = {"x": np.random.normal(size=(8, 16)).astype(np.float32)}
    model, integers = onnx.load(net), parsed("g (int64[n,4] x) => (int64[n,4] y) { y = Abs(x) }", {})
    for one, kind in ((model, TensorProto.FLOAT), (integers, TensorProto.INT64)):
        one.graph.node.append(helper.make_node("SequenceConstruct", ["y"], ["s"]))
        one.graph.output.append(helper.make_tensor_sequence_value_info("s", kind, None))
    onnx.save(model, net)
    with pytest.warns(UserWarning, match="leaves out s:"):
        made = drop_in.auto_convert_mixed_precision(net, feed, rtol=0.01, atol=0.05)
    assert len(halves(made)) == 2 and [value.name for value in made.graph.output] == ["y"]
    feed = {"x": np.arange(32).reshape(8, 4)}
    with pytest.warns(UserWarning, match="gives the model back in FP32"):
        kept = drop_in.auto_convert_mixed_precision(integers, feed, rtol=0.01, keep_io_types=True)
    assert [value.name for value in kept.graph.output] == ["y", "s"]


def test_the_half_has_the_models_sizes_and_an_input_that_it_lacks_is_named(net: Path) -> None:
    model = onnx.load(net)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 1
    first = model.graph.initializer[0]
    model.graph.input.append(helper.make_tensor_value_info(first.name, first.data_type, list(first.dims)))
    with pytest.warns(UserWarning, match=f"leaves out {first.name}:"):
        made = drop_in.convert_float_to_float16(model, keep_io_types=True)
    assert [value.name for value in made.graph.input] == ["x"]
    sizes = [
        value.type.tensor_type.shape.dim[0].dim_value for value in (*made.graph.input, *made.graph.output)
    ]
    assert sizes == [1, 1]


def test_the_automatic_converter_from_file_to_file(
    net: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is cut off leaves what an earlier one wrote."""
    feed, target = {"x": np.random.normal(size=(8, 16)).astype(np.float32)}, tmp_path / "half.onnx"
    cpu = ["CPUExecutionProvider"]
    for _ in range(2):
        drop_in.auto_convert_mixed_precision_model_path(
            str(net), feed, str(target), cpu, "weights.data", rtol=0.01, atol=0.05
        )
    check_equal(onnx.load(target), net)
    np.testing.assert_allclose(answers(target, feed["x"]), answers(net, feed["x"]), rtol=0.01, atol=0.05)
    assert (tmp_path / "weights.data").stat().st_size <= 2 * 4096  # of one half, not of two
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def cut_off(model: ModelProto, path: Path, **more: Any) -> None:
        path.write_bytes(b"a part")
        raise OSError("No space left on device")

    monkeypatch.setattr(onnx, "save", cut_off)
    half = onnx.load(target)
    monkeypatch.setattr(drop_in_functions, "auto_convert_mixed_precision", lambda *_: half)
    with pytest.raises(OSError, match="No space left"):
        drop_in.auto_convert_mixed_precision_model_path(str(net), feed, str(target), cpu, "weights.data")
    assert before == {file.name: file.read_bytes() for file in tmp_path.iterdir()}


@pytest.mark.parametrize("inputs", ["float[4,8] x", "float[n,8] x, float s"])
def test_what_a_session_takes_judges_also_with_a_fixed_batch_or_a_number(inputs: str, tmp_path: Path) -> None:
    feed = {"x": np.random.normal(size=(4, 8)).astype(np.float32), "s": np.float32(2)}
    feed = {name: array for name, array in feed.items() if f" {name}" in inputs}
    last = "y = Mul(h, s)" if "s" in feed else "y = Relu(h)"
    weights = {"w": np.random.normal(size=(8, 3)).astype(np.float32)}
    model = parsed(f"g ({inputs}) => (float[r,3] y) {{ h = MatMul(x, w) {last} }}", weights)
    onnx.save(model, tmp_path / "net.onnx")
    shapes = list[tuple[int, ...]]()

    def validate(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> bool:
        shapes.extend((one[0].shape, other[0].shape))
        return np.allclose(one[0], other[0], rtol=0.01, atol=0.05)

    made = drop_in.auto_convert_mixed_precision(model, feed, validate)  # type: ignore[arg-type]
    assert halves(made) and shapes == [(4, 3), (4, 3)]
    target = tmp_path / "half.onnx"
    drop_in.auto_convert_mixed_precision_model_path(tmp_path / "net.onnx", feed, target)  # type: ignore[arg-type]
    assert halves(onnx.load(target))


def test_calibration_data_are_whole_batches_where_the_model_fixes_them(tmp_path: Path) -> None:
    weights = {"w": np.random.normal(size=(8, 3)).astype(np.float32)}
    onnx.save(
        parsed("g (float[4,8] x) => (float[4,3] y) { y = MatMul(x, w) }", weights), tmp_path / "net.onnx"
    )
    (tmp_path / "batches").mkdir()
    for batch in range(4):
        np.savez(tmp_path / f"batches/{batch}.npz", x=np.random.normal(size=(4, 8)).astype(np.float32))
    made = drop_in.convert_to_mixed_precision(tmp_path / "net.onnx", calibration_data=tmp_path / "batches")
    said = {each.key: each.value for each in made.metadata_props}["halfeven.verdict"]
    assert said.startswith("Equal on 2 of your samples")


def test_a_feed_of_doubles_is_taken_and_the_file_is_the_same_each_time(net: Path) -> None:
    """NumPy's own arrays are FP64. No name of a temporary folder is in the file."""
    feed = {"x": np.random.normal(size=(8, 16))}
    made = [
        drop_in.auto_convert_mixed_precision(onnx.load(net), feed, rtol=0.01, atol=0.05) for _ in range(2)
    ]
    assert made[0] == made[1]


def test_rows_are_samples_also_where_the_model_takes_one_at_a_time(tmp_path: Path) -> None:
    """Nobody's rule is asked, so the model need not run with all rows at once."""
    model = onnx.load(dense(tmp_path / "dense.onnx"))
    made = drop_in.auto_convert_mixed_precision(
        model, {"X": np.random.normal(size=(8, 5)).astype(np.float32)}
    )
    assert halves(made) and ends(made) == [10, 10]


# The cases of ModelOpt AutoCast's own tests: test_autocast.py, test_nodeclassifier.py, test_referencerunner.py.


DENSE = """g (float[1,5] X) => (float[1,3] Y) { h = Gemm(X, w, b) a = Add(h, c) Y = Relu(a) }"""
CONVOLVED = {
    "IsInf": """g (float[1,4,8,8] x) => (float[1,4,8,8] y) {
        c = Conv<pads=[1,1,1,1]>(x, k) i = IsInf(c) y = Where(i, nought, c)
    }""",
    "Resize": """g (float[1,4,8,8] x) => (float[1,4,16,16] y) {
        c = Conv<pads=[1,1,1,1]>(x, k) y = Resize(c, , twice)
    }""",
}  # fmt: skip


def dense(path: Path, opset: int = 20) -> Path:
    shapes = {"w": (5, 3), "b": (3,), "c": (1, 3)}
    weights = {name: np.random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    weights["c"] += 6  # The Relu silences no output: the proof refuses a half of one that is nearly always 0.
    onnx.save(parsed(DENSE, weights, opset=opset), path)
    return path


@pytest.mark.parametrize("keep", [True, False])
def test_a_dense_net_is_half_throughout(keep: bool, tmp_path: Path) -> None:
    made = drop_in.convert_to_mixed_precision(str(dense(tmp_path / "net.onnx")), keep_io_types=keep)
    inner = ["Gemm", "Add", "Relu"]
    assert ops(made) == (["Cast", *inner, "Cast"] if keep else inner)
    assert ends(made) == ([TensorProto.FLOAT] * 2 if keep else [TensorProto.FLOAT16] * 2)
    onnx.checker.check_model(made, full_check=True)


@pytest.mark.parametrize(("op", "opset"), [("IsInf", 13), ("IsInf", 21), ("Resize", 19)])
def test_a_convolution_is_half_beside_an_operation_that_may_not_be(
    op: str, opset: int, tmp_path: Path
) -> None:
    arrays = {"k": np.random.normal(size=(4, 4, 3, 3)), "nought": 0.0, "twice": [1, 1, 2, 2]}
    model = parsed(CONVOLVED[op], {k: np.asarray(v, np.float32) for k, v in arrays.items()}, opset=opset)
    onnx.save(model, tmp_path / "net.onnx")
    made = drop_in.convert_to_mixed_precision(tmp_path / "net.onnx", keep_io_types=True)
    (convolution,) = [node for node in made.graph.node if node.op_type == "Conv"]
    assert convolution.input[1] in halves(made)
    x = np.random.normal(size=(1, 4, 8, 8)).astype(np.float32)
    np.testing.assert_allclose(asked(made, x)[0], asked(model, x)[0], atol=0.05)


@pytest.mark.parametrize("opset", [13, 21])
def test_the_opset_is_raised_and_not_lowered(opset: int, tmp_path: Path) -> None:
    path = dense(tmp_path / "net.onnx")
    ignored = pytest.warns(UserWarning, match="opset=13: it is lower than the original model's opset 20")
    with ignored if opset < 20 else nullcontext():
        made = drop_in.convert_to_mixed_precision(str(path), opset=opset)
    assert opset_of(made) == max(opset, 20)
    onnx.checker.check_model(made)


def test_what_cannot_be_done_is_refused_before_a_conversion(net: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"opset=99: expected one up to"):
        drop_in.convert_to_mixed_precision(str(net), opset=99)
    with pytest.raises(BadInput, match="there is no folder"):
        drop_in.auto_convert_mixed_precision_model_path(str(net), {}, str(tmp_path / "none" / "half.onnx"))


def test_a_name_of_no_precision_is_refused(tmp_path: Path) -> None:
    for name in ("int8", "fp8", "fp32", "typo"):
        with pytest.raises(BadInput, match=name):
            drop_in.convert_to_mixed_precision(str(dense(tmp_path / "net.onnx")), name)


def test_bf16_keeps_inputs_and_outputs(net: Path) -> None:
    """A second warning says that the model stays in FP32 where ONNX Runtime has no kernels for bf16, as on x86."""
    with pytest.warns(UserWarning) as warned, contextlib.suppress(ParityRefused):
        made = drop_in.convert_to_mixed_precision(str(net), "bf16")
        assert ends(made) == [TensorProto.FLOAT] * 2
    assert "ignores keep_io_types=False for bf16" in str(warned[0].message)
    assert all("no bf16 kernel in this ONNX Runtime (3 of 3)" in str(one.message) for one in list(warned)[1:])


def test_calibration_data_judges_and_excluded_nodes_stay_in_fp32(net: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="ignores data_max, trt_plugins$"):
        made = drop_in.convert_to_mixed_precision(
            str(net),
            nodes_to_exclude=["last_p.*t$"],
            calibration_data=str(samples(tmp_path / "x.npz")),
            data_max=1000,
            init_max=float(np.finfo(np.float16).max),
            trt_plugins=["plugin.so"],
            providers=["cpu"],
        )
    check_equal(made, net)
    assert len(halves(made)) == 1 and ends(made) == [10, 10]
    (tmp_path / "batches").mkdir()
    for batch in ("1", "2"):
        samples(tmp_path / "batches" / f"{batch}.npz", rows=6)
    made = drop_in.convert_to_mixed_precision(
        str(net), op_types_to_exclude=["Relu"], calibration_data=tmp_path / "batches"
    )
    said = {each.key: each.value for each in made.metadata_props}["halfeven.verdict"]
    assert said.startswith("Equal on 6 of your samples") and ops(made).count("Cast") == 2


def test_batches_of_several_lengths_are_named_by_file_and_input(tmp_path: Path) -> None:
    model = parsed("g (float[n,l] x) => (float[n,l] y) { y = Relu(x) }")
    onnx.save(model, tmp_path / "net.onnx")
    (tmp_path / "batches").mkdir()
    for batch, length in enumerate((8, 8, 12)):
        np.savez(tmp_path / f"batches/{batch}.npz", x=np.ones((4, length), np.float32))
    with pytest.raises(BadSamples, match=r"2\.npz: input 'x' has rows of \[12\], and of \[8\] in 0\.npz"):
        drop_in.convert_to_mixed_precision(tmp_path / "net.onnx", calibration_data=tmp_path / "batches")


@pytest.mark.parametrize("kind", ["other names", "no npz", "an array", "no batch"])
def test_calibration_data_of_another_kind_is_named(kind: str, net: Path, tmp_path: Path) -> None:
    path = tmp_path / ("none" if kind == "no batch" else "x.npz")
    if kind == "other names":
        np.savez(path, wrong=np.ones((4, 16), np.float32))
    elif kind == "an array":
        with path.open("wb") as file:
            np.save(file, np.ones((4, 16), np.float32))
    elif kind == "no npz":
        path.write_text('{"x": [[1.0]]}')
    else:
        path.mkdir()
    with pytest.raises(BadSamples):
        drop_in.convert_to_mixed_precision(str(net), calibration_data=str(path))


def test_a_model_without_a_search_of_nodes(net: Path) -> None:
    made = drop_in.convert_to_f16(onnx.load(net), op_block_list=["Relu"])
    assert ends(made) == [1, 1] and ops(made) == ["Cast", "MatMul", "Cast", "Relu", "Cast", "MatMul", "Cast"]
    check_equal(made, net)
    with pytest.warns(UserWarning, match="ignores tensor_block_dict"):
        made = drop_in.convert_to_f16(onnx.load(net), keep_io_types=False, tensor_block_dict={"Relu": {}})
    assert ends(made) == [10, 10]


def test_a_mistake_is_named_before_anything_is_converted(net: Path, tmp_path: Path) -> None:
    (tmp_path / "text.onnx").write_text("no model")
    with pytest.raises(BadInput, match=r"text\.onnx cannot be read as an ONNX file"):
        drop_in.convert_float_to_float16(tmp_path / "text.onnx")
    with pytest.raises(BadInput, match="opset='21': expected a number"):
        drop_in.convert_to_mixed_precision(str(net), opset="21")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"halfeven\.drop_in takes an ONNX ModelProto"):
        he.fp16(onnx.load(net), tmp_path / "half.onnx")  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match=r"none\.onnx"):
        drop_in.convert_float_to_float16(tmp_path / "none.onnx")
    with pytest.raises(BadSetting, match=r"'\(' is no regular expression"):
        drop_in.convert_to_mixed_precision(net, nodes_to_exclude=["("])
    large = written(tmp_path / "large.onnx")
    onnx.save(onnx.load(large), large, save_as_external_data=True, location="large.data", size_threshold=0)
    with pytest.raises(BadInput, match=r"weights are in another file, the first is 'first'.*onnx\.load"):
        drop_in.convert_float_to_float16(onnx.load(large, load_external_data=False))
    feed = {"x": np.ones((4, 16), np.float32)}
    (tmp_path / "mine.data").write_text("mine")
    for target, location, error in (
        (net, None, BadInput),
        (tmp_path / "half.onnx", "half.onnx", BadInput),
        (tmp_path / "half.onnx", "./half.onnx", BadInput),
        (tmp_path / "half.onnx", "net.onnx", Conflict),
        (tmp_path / "half.onnx", "deep/w.data", BadInput),
        (tmp_path / "half.onnx", "mine.data", Conflict),
    ):
        with pytest.raises(error):
            drop_in.auto_convert_mixed_precision_model_path(net, feed, target, location=location)
    assert (tmp_path / "mine.data").read_text() == "mine"
    shutil.copyfile(large, tmp_path / "copy.onnx")  # it has the same file of weights
    before = (tmp_path / "large.data").read_bytes()
    for target, location, error in (
        (tmp_path / "large.data", None, BadInput),
        (tmp_path / "copy.onnx", "large.data", Conflict),
    ):
        with pytest.raises(error):
            drop_in.auto_convert_mixed_precision_model_path(large, feed, target, location=location)
    assert (tmp_path / "large.data").read_bytes() == before


def test_a_single_name_needs_no_list(net: Path, tmp_path: Path) -> None:
    made = drop_in.convert_float_to_float16(onnx.load(net), keep_io_types=True, op_block_list="Relu")
    assert ops(made).count("Cast") > 2
    kept = he.fp16(net, tmp_path / "half.onnx", samples(tmp_path / "x.npz"), keep="op:Relu")
    assert kept.file is not None and ops(onnx.load(kept.file)) == ops(made)
    with pytest.warns(UserWarning, match="ignores 'zzz' of keep_io_types"):
        made = drop_in.convert_float_to_float16(onnx.load(net), keep_io_types=["y", "zzz"])
    assert ends(made) == [TensorProto.FLOAT16, TensorProto.FLOAT]
    assert ends(drop_in.convert_float_to_float16(onnx.load(net), keep_io_types="y")) == ends(made)
