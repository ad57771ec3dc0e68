"""A foreign file is read within bounds, from inside its folder, and held against model.toml to the letter."""

# ruff: noqa: E501  (graphs in their own lines)

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from halfeven.exporters.guessing.onnx_file import guess_onnx
from halfeven.exporters.onnx.conversion import read_foreign
from halfeven.exporters.onnx.reading.bounded_file import read_model
from halfeven.models.errors import BadFolder, BadSetting, TooLarge
from halfeven.models.spec.spec import Dim, ModelSpec, TensorSpec
from onnx import ModelProto, helper

from tests.exporters.onnx.onnx_files import convert, errors_u, parsed, saved, spec_of
from tests.links import behind_links

LINEAR = "g (float[n,8] x) => (float[n,8] y) { h = MatMul(x, w) y = Relu(h) }"


def linear(text: str = LINEAR, **more: np.ndarray) -> ModelProto:
    weights = {"w": np.random.default_rng().standard_normal((8, 8)).astype(np.float32)}
    return parsed(text, weights | more)


def with_external_data(path: Path, location: str) -> Path:
    """A model whose weight says that it lies at ``location``."""
    path.mkdir(parents=True, exist_ok=True)
    model = linear()
    onnx.save_model(
        model, path / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0
    )
    model = onnx.load(path / "model.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    (path / "model.onnx").write_bytes(model.SerializeToString())
    return path / "model.onnx"


def test_a_file_that_pairs_every_row_with_every_row_is_refused_as_a_batched_one(tmp_path: Path) -> None:
    model = parsed("g (float[n,8] x) => (float[n,m] y) { t = Transpose<perm=[1,0]>(x) y = MatMul(x, t) }")
    x = np.random.default_rng().standard_normal((8, 8)).astype(np.float32)
    with pytest.raises(
        BadFolder, match=r"'y' has shape \[3, 3\] .* \[1, 1\] for one row.*max_batch_size = 0"
    ):
        convert(tmp_path, model, {"x": x})


def test_external_data_inside_the_folder_is_read_bit_for_bit(tmp_path: Path) -> None:
    file = with_external_data(tmp_path, "weights.bin")
    read = read_model(file, tmp_path)
    expected = np.frombuffer((tmp_path / "weights.bin").read_bytes()[: 8 * 8 * 4], np.float32)
    assert np.array_equal(onnx.numpy_helper.to_array(read.graph.initializer[0]).reshape(-1), expected)


def test_external_data_without_a_length_ends_where_the_tensor_does(tmp_path: Path) -> None:
    file = with_external_data(tmp_path, "weights.bin")
    model = onnx.load(file, load_external_data=False)
    data = model.graph.initializer[0].external_data
    data.remove(next(entry for entry in data if entry.key == "length"))
    file.write_bytes(model.SerializeToString())
    with (tmp_path / "weights.bin").open("ab") as more:
        more.write(b"of another tensor")
    read = read_model(file, tmp_path)
    expected = np.frombuffer((tmp_path / "weights.bin").read_bytes()[: 8 * 8 * 4], np.float32)
    assert np.array_equal(onnx.numpy_helper.to_array(read.graph.initializer[0]).reshape(-1), expected)


@pytest.mark.parametrize("location", ["../secret", "/etc/hostname", "a/../../secret", "", "..\\secret"])
def test_external_data_outside_the_folder_is_refused_by_name(location: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"x" * 4096)
    file = with_external_data(tmp_path / "model", location)
    with pytest.raises(BadFolder, match="outside the model folder") as caught:
        read_model(file, tmp_path / "model")
    assert repr(location) in str(caught.value)


def test_a_link_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"x" * 4096)
    file = with_external_data(tmp_path / "model", "link.bin")
    (tmp_path / "model" / "link.bin").symlink_to(tmp_path / "secret")
    with pytest.raises(BadFolder, match="outside the model folder"):
        read_model(file, tmp_path / "model")


def test_a_model_and_its_data_may_be_links_to_files_of_one_folder(tmp_path: Path) -> None:
    file = with_external_data(tmp_path / "model", "weights.bin")
    expected = read_model(file, file.parent)
    behind_links([file, file.with_name("weights.bin")], tmp_path / "cache")
    assert read_model(file, file.parent) == expected


def test_external_data_that_is_cut_off_or_absent_is_named_wherever_a_file_is_taken(tmp_path: Path) -> None:
    file = with_external_data(tmp_path, "weights.bin")
    original = (tmp_path / "weights.bin").read_bytes()
    (tmp_path / "weights.bin").write_bytes(original[:100])
    for takes in (lambda: read_model(file, tmp_path), lambda: guess_onnx(file)):
        with pytest.raises(
            BadFolder, match=r"tensor 'w' lies at bytes 0 to 256 of weights\.bin, which has 100"
        ):
            takes()
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(BadFolder, match="does not exist"):
        read_model(file, tmp_path)


@pytest.mark.parametrize(("key", "number"), [("offset", "here"), ("offset", "-4"), ("length", "1e3")])
def test_external_data_at_no_number_of_bytes_is_refused(key: str, number: str, tmp_path: Path) -> None:
    file = with_external_data(tmp_path, "weights.bin")
    model = onnx.load(file, load_external_data=False)
    data = model.graph.initializer[0].external_data
    next(entry for entry in data if entry.key == key).value = number
    file.write_bytes(model.SerializeToString())
    with pytest.raises(BadFolder, match="place of the data of tensor 'w'"):
        read_model(file, tmp_path)
    with pytest.raises(BadFolder, match="place of the data of tensor 'w'"):
        guess_onnx(file)


def test_sizes_are_bounded_with_the_external_data(tmp_path: Path) -> None:
    file = with_external_data(tmp_path, "weights.bin")
    with pytest.raises(TooLarge):
        read_model(file, tmp_path, max_bytes=file.stat().st_size - 1)
    with pytest.raises(TooLarge, match="with its external data"):
        read_model(file, tmp_path, max_bytes=file.stat().st_size + 100)


@pytest.mark.parametrize("content", [b"", b"no protobuf at all", b"\x08\x07"])
def test_what_is_no_model_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(BadFolder, match="not an ONNX"):
        read_model(tmp_path / "model.onnx", tmp_path)


# Names of an operation, a weight, a size, a value.
@pytest.mark.parametrize("name", [b"MatMul", b"ww", b"nn", b"yy"])
def test_a_name_that_is_no_text_is_refused(name: bytes, tmp_path: Path) -> None:
    text = "g (float[nn,8] xx) => (float[nn,8] yy) { h = MatMul(xx, ww) yy = Relu(h) }"
    whole = linear(text, ww=np.eye(8, dtype=np.float32)).SerializeToString()
    (tmp_path / "m.onnx").write_bytes(whole.replace(name, b"\xb3" + name[1:]))
    with pytest.raises(BadFolder, match=r"a name in the graph is b'\\xb3.*UTF-8"):
        read_model(tmp_path / "m.onnx", tmp_path)


def test_the_pointer_of_git_lfs_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(BadFolder, match="`git lfs pull`"):
        read_model(tmp_path / "model.onnx", tmp_path)


def held(path: Path, model: ModelProto, change: Callable[[ModelSpec], ModelSpec]) -> ModelSpec:
    folder = saved(path, model, change(spec_of(model)))
    return read_foreign(path / "model.onnx", folder)[1]


def _input(spec: ModelSpec, **changes: object) -> ModelSpec:
    return replace(spec, inputs=(replace(spec.inputs[0], **changes),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: _input(s, name="z"), "input 'z' is not in the graph; input 'x' is not in model.toml"),
        (lambda s: _input(s, datatype="FP16"), "input 'x': model.toml says FP16, the graph has FP32"),
        (lambda s: _input(s, shape=(Dim(), Dim(9, 9))), r"model.toml says \[-1,9\], the graph has \[\?,8\]"),
        (lambda s: _input(s, shape=(Dim(),)), r"model.toml says \[-1\], the graph has"),
        (
            lambda s: _input(s, shape=(Dim(), Dim(1, 8))),
            r"model.toml says 1\.\.8 for axis 1, the graph takes 8",
        ),
        (lambda s: replace(s, outputs=()), "output 'y' is not in model.toml"),
    ],
)
def test_a_spec_that_is_not_the_graph_is_refused_by_tensor(
    change: Callable[[ModelSpec], ModelSpec], said: str, tmp_path: Path
) -> None:
    with pytest.raises(BadFolder, match=said):
        held(tmp_path, linear(), change)


def test_free_dimensions_become_what_the_graph_says(tmp_path: Path) -> None:
    text = "g (float[n,t,8] x, float[n,t,8] z, float[n,6] v) => (float[n,t,8] y) { h = MatMul(x, w) s = Add(h, z) y = Relu(s) }"
    free = tuple(TensorSpec(name, "FP32", (Dim(),) * rank) for name, rank in (("v", 2), ("z", 3), ("x", 3)))
    spec = held(tmp_path, linear(text), lambda s: replace(s, inputs=free))
    assert [tensor.name for tensor in spec.inputs] == ["v", "z", "x"]
    assert [t.describe_shape() for t in spec.inputs] == ["[-1,6]", "[-1,t,8]", "[-1,t,8]"]


def test_a_symbol_that_no_stored_spec_may_have_names_no_dimension(tmp_path: Path) -> None:
    """Python takes the symbol for a name; model.toml and spec.json do not."""
    model = linear(
        "g (float[n,t,8] x, float[n,t,8] z) => (float[n,t,8] y) { h = MatMul(x, w) s = Add(h, z) y = Relu(s) }"
    )
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[1].dim_param = "长度"
    spec = held(tmp_path, model, lambda s: s)
    assert ModelSpec.from_json(spec.to_json()).inputs == spec.inputs
    assert [tensor.describe_shape() for tensor in spec.inputs] == ["[-1,-1,8]"] * 2


def test_a_graph_for_one_row_is_served_one_row_at_a_time(tmp_path: Path) -> None:
    one = linear("g (float[1,8] x) => (float[1,8] y) { h = MatMul(x, w) y = Relu(h) }")
    free = replace(
        spec_of(one),
        inputs=(TensorSpec("x", "FP32", (Dim(), Dim(8, 8))),),
        outputs=(TensorSpec("y", "FP32", (Dim(), Dim(8, 8))),),
    )
    assert held(tmp_path, one, lambda _: free).max_batch_size == 1
    two = linear("g (float[2,8] x) => (float[2,8] y) { h = MatMul(x, w) y = Relu(h) }")
    with pytest.raises(BadFolder, match="2 rows fixed"):
        held(tmp_path, two, lambda _: free)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "g (float[n,8] x) => (float[n,8] y) { h = MatMul(x, w) t = Reshape(h, one_row) y = Reshape(t, back) }",
        "g (float[n,8] x) => (float[n,8] y) { h = MatMul(x, w) m = ReduceMean<axes=[0]>(h) y = Sub(h, m) }",
    ],
)
def test_rows_that_do_not_stand_alone_are_not_batched(text: str, tmp_path: Path) -> None:
    shapes = {"one_row": np.array([8]), "back": np.array([1, 8])} if "one_row" in text else {}
    x = np.random.default_rng().standard_normal((16, 8)).astype(np.float32)
    foreign = convert(tmp_path, linear(text, **shapes), {"x": x})
    assert foreign.spec.max_batch_size == 1
    assert any("max_batch_size is 1" in note for note in foreign.notes)


def test_initialisers_that_are_inputs_as_well_are_constants(tmp_path: Path) -> None:
    model = linear()
    model.graph.input.append(helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, [8, 8]))
    x = np.random.default_rng().standard_normal((16, 8)).astype(np.float32)
    foreign = convert(tmp_path, model, {"x": x})
    assert foreign.half is not None and [value.name for value in foreign.half.graph.input] == ["x"]


@pytest.mark.slow
def test_stale_value_info_and_disorder_do_no_harm(tmp_path: Path) -> None:
    model = linear(
        "g (float[n,8] x) => (float[n,8] y) { h = MatMul(x, w) s = Softmax<axis=-1>(h) y = MatMul(s, w) }"
    )
    info = [("w", [8, 8]), ("h", ["n", 8]), ("s", ["n", 8]), ("gone", [3])]
    model.graph.value_info.extend(
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in info
    )
    nodes = list(reversed(model.graph.node))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    random = np.random.default_rng()
    # Scores that half holds whatever is drawn.
    samples = {"x": 0.1 * random.standard_normal((16, 8)).astype(np.float32)}
    foreign = convert(tmp_path, model, samples)
    assert foreign.half is not None
    named = {value.name: value.type.tensor_type.elem_type for value in foreign.half.graph.value_info}
    assert named["h"] == onnx.TensorProto.FLOAT16 and named["s"] == onnx.TensorProto.FLOAT
    assert "w" not in named and "gone" not in named
    assert (
        max(errors_u(foreign, {"x": 0.1 * random.standard_normal((9, 8)).astype(np.float32)}).values()) <= 4.0
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "g (float[n,8] x) => (float[n,8] y) { a = Relu(b) b = Relu(a) c = MatMul(x, w) y = Add(a, c) }",
            "in a circle",
        ),
        ("g (float[n,8] x) => (float[n,8] y) { y = Conv(x) }", "not a valid ONNX model"),
        (
            "g (float[n,8] x) => (float[n,8] y) { s = SequenceConstruct(x) i = Constant<value_int=0>() y = SequenceAt(s, i) }",
            "sequences",
        ),
    ],
)
def test_what_is_not_taken_is_refused_by_its_name(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(BadFolder, match=said):
        held(tmp_path, linear(text), lambda s: s)


def test_an_op_that_nobody_knows_is_refused_by_its_name(tmp_path: Path) -> None:
    text = "g (float[n,8] x) => (float[n,8] y) { h = MatMul(x, w) y = their.Secret(h) }"
    model = parsed(text, {"w": np.eye(8, dtype=np.float32)}, more=', "their" : 1')
    with pytest.raises(BadFolder, match=r"their\.Secret"):
        held(tmp_path, model, lambda s: s)


def test_a_keep_pattern_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    x = np.ones((4, 8), np.float32)
    with pytest.raises(BadSetting, match="op:Sofmax"):
        convert(tmp_path, linear(), {"x": x}, keep=["op:Sofmax"])
