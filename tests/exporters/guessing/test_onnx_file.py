"""model.toml is guessed of a bare ONNX file: shapes, batch, sizes that run, values that an input may have."""

# ruff: noqa: E501  (graphs in their own lines)

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from halfeven.exporters.guessing.bare import folder_at, guess_at
from halfeven.exporters.guessing.guess import Guess
from halfeven.exporters.guessing.onnx_file import guess_onnx
from halfeven.exporters.guessing.writing import write_folder
from halfeven.models.errors import BadFolder
from halfeven.models.spec.spec import Dim, ModelSpec, TensorSpec
from halfeven.models.store.store import Store
from onnx import ModelProto

from tests.command_line import run
from tests.exporters.onnx.onnx_files import parsed
from tests.exporters.onnx.small_files import mlp
from tests.exporters.onnx.traps import normal


def guessed(tmp_path: Path, model: ModelProto) -> ModelSpec:
    onnx.save(model, tmp_path / "net.onnx")
    return folder_at(tmp_path / "net.onnx").spec


def shapes(spec: ModelSpec) -> list[list[int | str]]:
    return [[dim.to_json() for dim in tensor.shape] for tensor in (*spec.inputs, *spec.outputs)]


@pytest.mark.slow
def test_a_bare_file_is_converted_with_what_was_guessed_said(tmp_path: Path) -> None:
    onnx.save(mlp(), tmp_path / "net.onnx")
    (tmp_path / "notes.txt").write_text("what lies beside a bare file is not the model's")
    code, facts, said = run("convert", tmp_path / "net.onnx", "--store", tmp_path / "store")
    assert code == 0 and facts["model"] == "net" and facts["forms"]["onnx"]["half_nodes"] == 3, said
    assert any(note.startswith("guessed: input 'x' FP32 [-1,8]") for note in facts["notes"])
    version = Store(tmp_path / "store").version("net", 1)
    kept = {file.name: file.read_text() for file in (version.folder / "source").iterdir()}
    assert list(kept) == ["model.toml"] and "# confirm: " in kept["model.toml"]
    (tmp_path / "notes.txt").write_text("changed")
    _, again, said = run("convert", tmp_path / "net.onnx", "--store", tmp_path / "store")
    assert again["version"] == 1, said


@pytest.mark.slow
def test_a_folder_with_a_colon_in_its_name_is_no_function_of_a_file(tmp_path: Path) -> None:
    (folder := tmp_path / "20:30").mkdir()
    onnx.save(mlp(), folder / "net.onnx")
    assert guess_at(str(folder / "net.onnx")).spec == guess_onnx(folder / "net.onnx").spec


@pytest.mark.slow
def test_a_model_toml_beside_the_file_that_names_it_is_what_counts(tmp_path: Path) -> None:
    onnx.save(mlp(), tmp_path / "net.onnx")
    text = guess_onnx(tmp_path / "net.onnx").toml().replace('name = "net"', 'name = "mine"')
    (tmp_path / "model.toml").write_text(text)
    assert folder_at(tmp_path / "net.onnx").spec.name == "mine"
    (tmp_path / "model.toml").write_text(text.replace("net.onnx", "other.onnx"))
    onnx.save(mlp(), tmp_path / "other.onnx")
    assert folder_at(tmp_path / "net.onnx").spec.name == "net"


@pytest.mark.parametrize(
    ("kind", "way_out"), [("string", "extract_model"), ("bfloat16", "cast it in the file")]
)
def test_an_input_that_is_not_taken_is_refused_with_a_way_out(
    kind: str, way_out: str, tmp_path: Path
) -> None:
    with pytest.raises(BadFolder, match=f"input 'x' is a .* tensor.*{way_out}"):
        guessed(tmp_path, parsed(f"g ({kind}[n,8] x, float[n,8] z) => (float[n,8] y) {{ y = Relu(z) }}"))


PAIRS = "g (float[n,8] x) => (float[n,m] y) { t = Transpose<perm=[1,0]>(x) y = MatMul(x, t) }"


def test_a_file_that_pairs_every_row_with_every_row_is_not_batched(tmp_path: Path) -> None:
    spec = guessed(tmp_path, parsed(PAIRS))
    assert spec.max_batch_size == 0 and shapes(spec) == [["n", 8], [-1, -1]]


def test_an_axis_that_has_as_many_places_as_there_are_rows_by_chance_does_not_unbatch(tmp_path: Path) -> None:
    spec = guessed(tmp_path, parsed("g (float[n,k] x) => (float[n,m] y) { y = Concat<axis=1>(x, x) }"))
    assert spec.max_batch_size > 1 and shapes(spec) == [[-1, "k"], [-1, -1]]


def test_a_free_axis_written_as_minus_1_is_free(tmp_path: Path) -> None:
    model = mlp()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_value = -1
    assert shapes(guessed(tmp_path, model)) == [[-1, 8], [-1, 4]]


@pytest.mark.slow
def test_a_free_axis_whose_symbol_is_no_name_in_model_toml_is_free_without_one(tmp_path: Path) -> None:
    model = parsed("g (float[n,t] x) => (float[n,t] y) { y = Relu(x) }")
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[1].dim_param = "长度"
    assert shapes(guessed(tmp_path, model))[0] == [-1, -1]


HIDDEN = "g (float[n,8] x) => (float[n,8] y) { h = Neg(x) y = Relu(h) }"


@pytest.mark.slow
def test_an_output_that_was_added_by_its_name_alone_is_one_of_the_outputs(tmp_path: Path) -> None:
    model = parsed(HIDDEN)
    model.graph.output.extend([onnx.ValueInfoProto(name="h"), model.graph.output[0]])
    assert shapes(guessed(tmp_path, model)) == [[-1, 8], [-1, 8], [-1, 8]]
    code, facts, said = run("convert", tmp_path / "net.onnx", "--store", tmp_path / "store")
    assert code == 0 and facts["forms"]["onnx"]["nodes"] == 2, said


@pytest.mark.slow
def test_an_output_without_a_shape_has_the_axes_of_a_run(tmp_path: Path) -> None:
    """ONNX has no shape for an operator of another domain."""
    text = "g (float[n,8] x) => (float[n,8] y) { h = MatMul(x, w) y = com.microsoft.Gelu(h) }"
    weights = {"w": normal(np.random.default_rng(), 8, 8)}
    model = parsed(text, weights, more=', "com.microsoft" : 1')
    model.graph.output[0].type.tensor_type.ClearField("shape")
    onnx.save(model, tmp_path / "net.onnx")
    code, facts, said = run("convert", tmp_path / "net.onnx", "--store", tmp_path / "store")
    assert code == 0 and facts["forms"]["onnx"]["half_nodes"] > 0, said


@pytest.mark.slow
def test_an_output_with_a_wrong_size_in_the_file_has_the_size_that_it_runs_with(
    tmp_path: Path, random: np.random.Generator
) -> None:
    graph = "g (float[n,8] x) => (float[n,5] y) { h = MatMul(x, w) y = Relu(h) }"
    onnx.save(parsed(graph, {"w": normal(random, 8, 4)}), tmp_path / "net.onnx")
    code, facts, said = run("convert", tmp_path / "net.onnx", "--store", tmp_path / "store")
    assert code == 0 and facts["forms"]["onnx"]["half_nodes"] == 2, said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("g (bfloat16[n,8] x) => (float[n,8] y) { y = Cast<to=1>(x) }", "input 'x' is a BF16 tensor"),
        ("g (float[n,8] x) => (bfloat16[n,8] y) { y = Cast<to=16>(x) }", "'y' is a BF16 tensor"),
    ],
)
def test_bf16_is_refused_by_name_since_onnx_runtime_takes_no_arrays_of_it(
    text: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(BadFolder, match=said):
        guessed(tmp_path, parsed(text))


def test_an_input_without_a_shape_is_refused_by_name(tmp_path: Path) -> None:
    model = parsed(HIDDEN)
    model.graph.input[0].type.tensor_type.ClearField("shape")
    with pytest.raises(BadFolder, match="input 'x' has no shape in the file"):
        guessed(tmp_path, model)


@pytest.mark.slow
def test_what_has_no_row_for_each_row_is_not_batched(tmp_path: Path) -> None:
    text = "g (float[n,8] x, float[2,k,8] s) => (float[n,8] y, float[2,k,8] t) { y = Relu(x) t = Tanh(s) }"
    spec = guessed(tmp_path, parsed(text))
    assert spec.max_batch_size == 0 and shapes(spec)[:2] == [["n", 8], [2, "k", 8]]
    spec = guessed(tmp_path, parsed("g (float[n,8] x) => (float y) { y = ReduceSum<keepdims=0>(x) }"))
    assert spec.max_batch_size == 0 and shapes(spec) == [["n", 8], []]


NAMED = "g (float[n,t,4] x, float[2,n,8] h) => (float[n,8] y, float[2,n,8] hn)"
UNNAMED = "g (float[?,?,4] x, float[2,?,8] h) => (float[?,8] y, float[2,?,8] hn)"
OF_ONE = "g (float[1,5,4] x, float[2,1,8] h) => (float[1,8] y, float[2,1,8] hn)"
LAYERS = """{
    first, second = Split<axis=0, num_outputs=2>(h)
    s = Transpose<perm=[1,0,2]>(x)
    a, ha = GRU<hidden_size=8>(s, w1, r, "", "", first)
    b = Squeeze(a, one)
    c, hc = GRU<hidden_size=8>(b, w2, r, "", "", second)
    hn = Concat<axis=0>(ha, hc)
    y = Squeeze(hc, zero)
}"""


@pytest.mark.slow
@pytest.mark.parametrize("signature", [NAMED, UNNAMED, OF_ONE])
def test_a_recurrent_state_has_its_batch_on_axis_1(signature: str, tmp_path: Path) -> None:
    random = np.random.default_rng()
    weights = {
        "w1": normal(random, 1, 24, 4),
        "w2": normal(random, 1, 24, 8),
        "r": normal(random, 1, 24, 8, scale=0.3),
    }
    model = parsed(signature + LAYERS, {**weights, "one": np.array([1]), "zero": np.array([0])}, opset=18)
    onnx.save(model, tmp_path / "net.onnx")
    code, _, said = run("init", tmp_path / "net.onnx", tmp_path / "folder")
    assert code == 0, said
    found = tomllib.loads((tmp_path / "folder/model.toml").read_text())
    axes = {tensor["name"]: tensor.get("batch_axis", 0) for tensor in (*found["inputs"], *found["outputs"])}
    assert axes == {"x": 0, "h": 1, "y": 0, "hn": 1} and found["max_batch_size"] > 1
    assert found["inputs"][1]["shape"] == [2, -1, 8] == found["outputs"][1]["shape"]
    code, _, said = run("convert", tmp_path / "folder", "--store", tmp_path / "store")
    assert code == 0, said
    spec = Store(tmp_path / "store").version("net", 1).spec()
    assert spec.max_batch_size == found["max_batch_size"] and spec.inputs[1].batch_axis == 1


def test_an_axis_that_has_the_name_of_the_batch_and_no_rows_in_the_answers_is_none(tmp_path: Path) -> None:
    text = "g (float[n,8] x, float[4,n] a) => (float[4,8] y) { y = MatMul(a, x) }"
    spec = guessed(tmp_path, parsed(text))
    assert spec.max_batch_size == 0 and shapes(spec)[:2] == [["n", 8], [4, "n"]]


def test_a_first_axis_of_1_everywhere_is_the_batch(tmp_path: Path) -> None:
    spec = guessed(tmp_path, parsed("g (float[1,8] x) => (float[1,8] y) { y = Relu(x) }"))
    assert spec.max_batch_size > 0 and shapes(spec) == [[-1, 8], [-1, 8]]


@pytest.mark.slow
def test_sizes_that_a_free_axis_needs_are_found_by_running(tmp_path: Path) -> None:
    fixed = parsed(
        "g (float[n,t] x) => (float[n,4] y) { y = MatMul(x, w) }",
        {"w": normal(np.random.default_rng(), 48, 4)},
    )
    assert shapes(guessed(tmp_path, fixed)) == [[-1, 48], [-1, 4]]
    least = parsed(
        "g (float[n,t] x) => (float[n,?] y) { c = Unsqueeze(x, one) d = Conv<kernel_shape=[40]>(c, k) y = Squeeze(d, one) }",
        {"one": np.array([1]), "k": normal(np.random.default_rng(), 1, 1, 40)},
    )
    assert shapes(guessed(tmp_path, least)) == [[-1, "t=40.."], [-1, -1]]


@pytest.mark.slow
def test_a_size_that_is_none_of_the_usual_ones_is_asked_for(tmp_path: Path) -> None:
    weights = {"w": normal(np.random.default_rng(), 1575, 4)}
    model = parsed("g (float[n,t] x) => (float[n,4] y) { h = Relu(x) y = MatMul(h, w) }", weights)
    with pytest.raises(BadFolder, match=r"did not run with any sizes .*x \[n,t\].*--samples INPUTS"):
        guessed(tmp_path, model)
    x = np.random.default_rng().standard_normal((3, 1575)).astype(np.float32)
    assert shapes(guess_onnx(tmp_path / "net.onnx", samples={"x": x}).spec)[0] == [-1, 1575]


GRAPH_NET = """g (float[atoms,8] x, int64[2,bonds] ends) => (float[atoms,4] y) {
    first = Constant<value_ints=[0]>() second = Constant<value_ints=[1]>() from0 = Gather(ends, first) from = Squeeze(from0, first)
    to0 = Gather(ends, second) to = Squeeze(to0, first) sent = Gather(x, from) axis = Constant<value_ints=[1]>()
    to1 = Unsqueeze(to, axis) shape = Shape(sent) where = Expand(to1, shape) h = ScatterElements<axis=0, reduction="add">(x, where, sent)
    y = MatMul(h, w) }"""
OVER_ROWS = "g (float[n,8] x) => (float[n,4] y) { first = Constant<value_ints=[0]>() m = ReduceMean<axes=[0]>(x) d = Sub(x, m) y = MatMul(d, w) }"


@pytest.mark.parametrize(
    ("text", "opset"), [(GRAPH_NET, 16), (OVER_ROWS, 17)], ids=["graph net", "mean over rows"]
)
def test_rows_that_are_answered_otherwise_alone_are_no_batch(text: str, opset: int, tmp_path: Path) -> None:
    """The server would answer a graph node by node."""
    spec = guessed(tmp_path, parsed(text, {"w": normal(np.random.default_rng(), 8, 4)}, opset=opset))
    assert not spec.batched and not any(tensor.batch_axis for tensor in spec.inputs)


def test_a_scale_over_the_whole_batch_makes_rows_no_less_rows(tmp_path: Path) -> None:
    text = """g (float[n,8] x) => (float[n,4] y) {
        q, s, z = DynamicQuantizeLinear(x) d = DequantizeLinear(q, s, z) y = MatMul(d, w) }"""
    assert guessed(tmp_path, parsed(text, {"w": normal(np.random.default_rng(), 8, 4)})).batched


def test_an_id_that_is_compared_as_padding_is_not_the_only_one(tmp_path: Path) -> None:
    text = """g (int64[n,t] ids) => (float[n,t,4] y) { none = Constant<value_ints=[0]>() padding = Equal(ids, none)
        e = Gather(table, ids) last = Constant<value_ints=[2]>() p = Unsqueeze(padding, last) y = Where(p, nothing, e) }"""
    weights = {"table": normal(np.random.default_rng(), 200, 4), "nothing": np.zeros(1, np.float32)}
    (ids,) = guessed(tmp_path, parsed(text, weights)).inputs
    assert ids.range is None or ids.range.high[0] > 0


def test_a_size_with_which_an_output_loses_an_axis_is_too_small(tmp_path: Path) -> None:
    """The convolution leaves one of three steps, and the Squeeze drops its axis."""
    text = """g (float[steps,8] x) => (float[u,4] y) {
        i = Constant<value_ints=[0,1]>() c = Unsqueeze(x, i) d = Conv<kernel_shape=[3,8]>(c, k)
        t = Transpose<perm=[0,2,1,3]>(d) y = Squeeze(t) }"""
    model = parsed(text, {"k": normal(np.random.default_rng(), 4, 1, 3, 8)})
    assert shapes(guessed(tmp_path, model)) == [["steps=4..", 8], [-1, 4]]


def test_pictures_of_which_no_size_is_stated_have_the_channels_and_sizes_that_run(tmp_path: Path) -> None:
    """Optimum names the axes of pictures so: [batch, num_channels, height, width]."""
    text = """g (float[n,num_channels,height,width] x) => (float[n,4] y) {
        c = Conv<kernel_shape=[16,16],strides=[16,16]>(x, k) f = Reshape(c, flat) a = Add(f, e) y = MatMul(a, w) }"""
    random = np.random.default_rng()
    weights = {"k": normal(random, 2, 3, 16, 16, scale=0.1), "flat": np.array([0, -1]), "e": normal(random, 72),
               "w": normal(random, 72, 4)}  # fmt: skip
    spec = guessed(tmp_path, parsed(text, weights))
    assert spec.batched and [dim.minimum for dim in spec.inputs[0].shape[1:]] == [3, 96, 96]


def test_a_cache_of_four_heads_is_no_picture_and_may_be_short(tmp_path: Path) -> None:
    graph = "g (float[n,4,1,8] q, float[n,4,past,8] keys) => (float[n,4,all,8] present, float[n,4,1,8] y) { present = Concat<axis=2>(keys, q) t = Transpose<perm=[0,1,3,2]>(present) a = MatMul(q, t) s = Softmax<axis=-1>(a) y = MatMul(s, present) }"
    spec = guessed(tmp_path, parsed(graph))
    past = spec.inputs[1].shape[2]
    assert spec.batched and (past.minimum, past.fixed) == (1, False)


@pytest.mark.slow
def test_a_size_that_ends_the_process_of_onnx_runtime_is_one_that_does_not_run(tmp_path: Path) -> None:
    """A Scan over nothing divides by zero there."""
    frames = """g (float[n,t] x) => (float[n,u,10] y) {
        s = Shape<start=1,end=2>(x) rest = Sub(s, six) over = Mod(rest, four) end = Sub(s, over)
        first = Slice(x, zero, six, one, one) cut = Slice(x, six, end, one, one) rows = Reshape(cut, frame)
        last, y = Scan<num_scan_inputs=1, scan_input_axes=[1], scan_output_axes=[1], body = b (float[n,6] state, float[n,4] row) => (float[n,6] next, float[n,10] both) { both = Concat<axis=-1>(state, row) next = Slice(both, four, far, one, one) }>(first, rows) }"""
    numbers = {"zero": [0], "one": [1], "four": [4], "six": [6], "far": [2**62], "frame": [0, -1, 4]}
    model = parsed(frames, {name: np.array(value) for name, value in numbers.items()})
    assert shapes(guessed(tmp_path, model)) == [[-1, "t=10.."], [-1, -1, 10]]


@pytest.mark.slow
def test_a_batch_is_as_large_as_its_largest_value_allows(tmp_path: Path) -> None:
    """256 MiB hold 16 rows of 16 MiB each; of rows that are a little larger they hold 8, as a power of two."""
    for columns, rows in ((1 << 18, 64), (1 << 22, 16), ((1 << 22) + 1, 8)):
        text = "g (float[n,1] x) => (float[n,1] y) { a = Expand(x, to) y = ReduceMax<axes=[1]>(a) }"
        model = parsed(text, {"to": np.array([1, columns])})
        assert guessed(tmp_path, model).max_batch_size == rows


@pytest.mark.slow
def test_a_number_without_axes_is_an_input_like_any_other(tmp_path: Path) -> None:
    """The adversarial samples of such an input are numbers too."""
    onnx.save(
        parsed("g (float[8,16] x, float least) => (float[8,4] y) { c = Max(x, least) y = MatMul(c, w) }",
               {"w": normal(np.random.default_rng(), 16, 4)}),
        tmp_path / "net.onnx",
    )  # fmt: skip
    code, facts, said = run("convert", tmp_path / "net.onnx", "--store", tmp_path / "store")
    assert code == 0 and facts["forms"]["onnx"]["passed"], said


@pytest.mark.slow
def test_axes_that_must_be_equal_share_a_name(tmp_path: Path) -> None:
    text = "g (float[?,?] x, float[8,?] s) => (float[48,8] y) { t = Transpose<perm=[1,0]>(x) u = Transpose<perm=[1,0]>(s) v = MatMul(t, u) y = MatMul(w, v) }"
    model = parsed(text, {"w": normal(np.random.default_rng(), 48, 48)})
    spec = guessed(tmp_path, model)
    first, second = spec.inputs[0].shape[0], spec.inputs[1].shape[1]
    assert first == second and first.name is not None and not first.fixed
    assert spec.inputs[0].shape[1].minimum == spec.inputs[0].shape[1].maximum == 48


def test_an_integer_that_is_compared_with_a_constant_has_that_value(tmp_path: Path) -> None:
    text = """g (float[n,8] x, int64 rate) => (float[n,8] y) {
        is = Equal(rate, r)
        y = If<then_branch = a () => (float[n,8] p) { p = Relu(x) }, else_branch = b () => (float[n,8] q) { q = Reshape(x, bad) }>(is) }"""
    model = parsed(text, {"r": np.array(16000), "bad": np.array([7, 7, 7])})
    ranges = [tensor.range for tensor in guessed(tmp_path, model).inputs]
    assert ranges[0] is None and ranges[1] is not None and ranges[1].to_json() == [16000, 16000]


def test_a_softmax_over_classes_gives_probabilities(tmp_path: Path) -> None:
    spec = guessed(tmp_path, parsed("g (float[n,8] x) => (float[n,8] y) { y = Softmax(x) }"))
    assert spec.outputs[0].kind == "probabilities"


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    (tmp_path / "net.docx").write_bytes(b"no")
    with pytest.raises(BadFolder, match=r"nothing that is taken without one"):
        folder_at(tmp_path / "net.docx")
    (tmp_path / "net.onnx").write_bytes(b"no")
    with pytest.raises(BadFolder, match="not an ONNX"):
        folder_at(tmp_path / "net.onnx")


@pytest.mark.parametrize("name", ["nothing.onnx", "nothing.pt2"])
def test_a_file_that_is_not_there_is_called_so(name: str, tmp_path: Path) -> None:
    with pytest.raises(BadFolder, match=f"{name} does not exist: expected an ONNX file"):
        folder_at(tmp_path / name)


@pytest.mark.parametrize("content", [b"text", {"a": torch.zeros(2)}], ids=["text", "state dict"])
def test_what_is_no_exported_program_is_named_before_torch_is_asked(content: Any, tmp_path: Path) -> None:
    file = tmp_path / "net.pt2"
    file.write_bytes(content) if isinstance(content, bytes) else torch.save(content, file)
    with pytest.raises(BadFolder, match=r"net\.pt2 is not an exported program"):
        folder_at(file)


def test_a_folder_with_another_library_s_config_json_is_no_transformers_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model": {"width": 64}}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(BadFolder, match=r"a model folder needs a model\.toml"):
        folder_at(tmp_path)


def test_a_file_that_runs_with_nothing_that_is_tried_is_refused_in_the_words_of_the_runtime(
    tmp_path: Path,
) -> None:
    text = "g (float[1,6,4] b, float[1,1,6] s, int64[1] m, float[1] i, float[1] t) => (int64[k,3] y) { y = NonMaxSuppression(b, s, m, i, t) }"
    with pytest.raises(BadFolder, match=r"iou_threshold must be in range .*--samples"):
        guessed(tmp_path, parsed(text))


def test_a_file_that_is_not_there_is_called_so_with_a_folder_too(tmp_path: Path) -> None:
    with pytest.raises(BadFolder, match=r"nothing\.onnx does not exist"):
        write_folder(str(tmp_path / "nothing.onnx"), tmp_path / "out")


def test_a_name_in_the_file_cannot_write_a_line_of_model_toml() -> None:
    hostile = 'labels\nsamples = "/etc/passwd"\r\nweights = "x"'
    doubts = {("x", "shape"): hostile, ("", "max_batch_size"): hostile}
    spec = ModelSpec("net", (TensorSpec(hostile, "FP32", (Dim(), Dim(4, 4))),), (), 8)
    guess = Guess(spec, f"{hostile}.onnx", doubts, (f"output '{hostile}' is left out",))
    read = tomllib.loads(guess.toml())
    assert set(read) == {"name", "source", "max_batch_size", "inputs"}
    assert read["source"] == f"{hostile}.onnx" and read["inputs"][0]["name"] == hostile
