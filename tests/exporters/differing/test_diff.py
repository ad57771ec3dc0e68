"""Planted differences are named by the tensor at which they are born; what rounding explains is no difference."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from halfeven.exporters.differing import diff
from halfeven.exporters.differing.onnx_side import OnnxSide
from halfeven.exporters.question import Answers, Arrays
from halfeven.models.errors import BadFolder, BadInput, BadSamples, NotRun
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper, version_converter

from tests.exporters.onnx.onnx_files import parsed

WIDE = 32


def differences(
    a: Path, b: Path | Answers, samples: Path, dtype: str | None = None, out: Path | None = None
) -> Any:
    return diff.differences(OnnxSide(a), OnnxSide(b) if isinstance(b, Path) else b, samples, dtype, out)


def block() -> ModelProto:
    """Attention over eight places and a feed-forward part, each with a residual, a norm and a mask: 19 nodes."""
    random = np.random.default_rng(11)

    def weight(name: str, *shape: int) -> TensorProto:
        return numpy_helper.from_array(
            (random.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32), name
        )

    weights = [weight(name, WIDE, WIDE) for name in ("wq", "wk", "wv", "wo")]
    weights += [weight("w1", WIDE, 2 * WIDE), weight("w2", 2 * WIDE, WIDE), weight("b1", 2 * WIDE)]
    weights += [
        numpy_helper.from_array(np.full(WIDE, value, np.float32), name)
        for name, value in (("g", 1), ("b", 0))
    ]
    weights += [numpy_helper.from_array(np.array(WIDE**-0.5, np.float32), "scale")]
    mask = np.triu(np.full((8, 8), -1e9, np.float32), 1)
    weights.append(numpy_helper.from_array(mask, "mask"))

    def node(op: str, reads: str, gives: str, **attributes: Any) -> NodeProto:
        return helper.make_node(op, reads.split(), gives.split(), name=f"make_{gives}", **attributes)

    nodes = [
        node("LayerNormalization", "x g b", "n1", axis=-1, epsilon=1e-5),
        node("MatMul", "n1 wq", "q"), node("MatMul", "n1 wk", "k"), node("MatMul", "n1 wv", "v"),
        node("Transpose", "k", "kt", perm=[0, 2, 1]), node("MatMul", "q kt", "scores"),
        node("Mul", "scores scale", "scaled"), node("Add", "scaled mask", "masked"),
        node("Softmax", "masked", "weights", axis=-1), node("MatMul", "weights v", "mixed"),
        node("MatMul", "mixed wo", "attended"), node("Add", "x attended", "r1"),
        node("LayerNormalization", "r1 g b", "n2", axis=-1, epsilon=1e-5), node("MatMul", "n2 w1", "h0"),
        node("Add", "h0 b1", "h1"), node("Gelu", "h1", "h2"), node("MatMul", "h2 w2", "h3"), node("Add", "r1 h3", "r2"),
        node("Tanh", "r2", "y"),
    ]  # fmt: skip
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 8, WIDE]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "block", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def made(model: ModelProto, tensor: str) -> NodeProto:
    return next(node for node in model.graph.node if tensor in node.output)


def weight_of(model: ModelProto, name: str) -> TensorProto:
    return next(tensor for tensor in model.graph.initializer if tensor.name == name)


def scaled(name: str, factor: float) -> Callable[[ModelProto], None]:
    def change(model: ModelProto) -> None:
        tensor = weight_of(model, name)
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(factor), name))

    return change


def one_element(name: str) -> Callable[[ModelProto], None]:
    def change(model: ModelProto) -> None:
        array = numpy_helper.to_array(weight_of(model, name)).copy()
        array.flat[5] = -array.flat[5]
        weight_of(model, name).CopyFrom(numpy_helper.from_array(array, name))

    return change


def another(tensor: str, op: str, **attributes: Any) -> Callable[[ModelProto], None]:
    """Another operation makes ``tensor``."""

    def change(model: ModelProto) -> None:
        node = made(model, tensor)
        node.CopyFrom(helper.make_node(op, node.input, node.output, name=node.name, **attributes))

    return change


def reads(tensor: str, place: int, other: str) -> Callable[[ModelProto], None]:
    def change(model: ModelProto) -> None:
        made(model, tensor).input[place] = other

    return change


def through(tensor: str, kind: int) -> Callable[[ModelProto], None]:
    """``tensor`` is rounded to a shorter type and back."""

    def change(model: ModelProto) -> None:
        node = made(model, tensor)
        place = list(model.graph.node).index(node)
        node.output[0] = f"{tensor}_exact"
        short = helper.make_node("Cast", [f"{tensor}_exact"], [f"{tensor}_short"], to=kind)
        back = helper.make_node("Cast", [f"{tensor}_short"], [tensor], to=TensorProto.FLOAT)
        nodes = [*model.graph.node]
        nodes[place + 1 : place + 1] = [short, back]
        del model.graph.node[:]
        model.graph.node.extend(nodes)

    return change


PLANTED = {
    "n1": another("n1", "LayerNormalization", axis=-1, epsilon=1e-3),
    "q": scaled("wq", 1.001),
    "k": one_element("wk"),
    "v": reads("v", 1, "wo"),
    "scores": reads("scores", 0, "v"),
    "scaled": scaled("scale", 1.01),
    "masked": scaled("mask", 0.0),
    "weights": another("weights", "Softmax", axis=1),
    "mixed": reads("mixed", 1, "k"),
    "attended": one_element("wo"),
    "r1": reads("r1", 0, "n1"),
    "n2": another("n2", "LayerNormalization", axis=-1, epsilon=1e-4),
    "h0": scaled("w1", 0.9999),
    "h1": one_element("b1"),
    "h2": another("h2", "Gelu", approximate="tanh"),
    "h3": scaled("w2", 1.0002),
    "r2": another("r2", "Sub"),
    "y": another("y", "Softsign"),
}


def written(
    folder: Path, change: Callable[[ModelProto], ModelProto | None] | None = None
) -> tuple[Path, Path, Path]:
    """The two files and the samples."""
    a, b, x = folder / "a.onnx", folder / "b.onnx", folder / "x.npz"
    onnx.save(block(), a)
    model = block()
    onnx.save((change(model) if change else None) or model, b)
    np.savez(x, x=np.random.normal(size=(6, 8, WIDE)).astype(np.float32))
    return a, b, x


@pytest.mark.parametrize("tensor", PLANTED)
def test_a_planted_difference_is_named_by_its_tensor(tmp_path: Path, tensor: str) -> None:
    a, b, x = written(tmp_path, PLANTED[tensor])
    facts = differences(a, b, x, out=tmp_path / "node")
    assert not facts["equal"] and facts["first"]["tensor"] == tensor
    alone = onnxruntime.InferenceSession(tmp_path / "node" / "node.onnx")
    with (
        np.load(tmp_path / "node" / "inputs.npz") as inputs,
        np.load(tmp_path / "node" / "found.npz") as found,
    ):
        np.testing.assert_allclose(
            np.asarray(alone.run(None, dict(inputs))[0]), found["a"], rtol=1e-4, atol=1e-5
        )
        assert found["a"].shape == found["b"].shape and not np.allclose(
            found["a"], found["b"], rtol=1e-6, atol=0
        )


def in_sequence(model: ModelProto) -> None:
    """``q`` passes through a sequence of parts of two sizes."""
    node = made(model, "q")
    node.output[0] = "q_joined"
    place = list(model.graph.node).index(node)
    model.graph.initializer.append(numpy_helper.from_array(np.array([8, WIDE - 8]), "parts"))
    parts = [
        helper.make_node("SplitToSequence", ["q_joined", "parts"], ["sequence"], axis=-1),
        helper.make_node("ConcatFromSequence", ["sequence"], ["q"], axis=-1),
    ]
    nodes = [*model.graph.node]
    nodes[place + 1 : place + 1] = parts
    del model.graph.node[:]
    model.graph.node.extend(nodes)


@pytest.mark.parametrize(
    "change",
    [through("y", TensorProto.FLOAT8E5M2), through("y", TensorProto.INT4), in_sequence],
    ids=["FP8", "four bits", "a sequence"],
)
def test_values_that_numpy_does_not_have_are_passed_over(
    tmp_path: Path, change: Callable[[ModelProto], None]
) -> None:
    def new(model: ModelProto) -> None:
        change(model)
        model.opset_import[0].version = 21

    a, b, x = written(tmp_path, new)
    onnx.save(onnx.load(b), a)
    facts = differences(a, b, x)
    assert facts["equal"] and facts["tensors"] >= 19


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_half_in_a_file_explains_its_rounding_and_no_more(tmp_path: Path, kind: int) -> None:
    a, b, x = written(tmp_path, through("n1", kind))
    assert differences(a, b, x)["equal"]

    def both(model: ModelProto) -> None:
        through("n1", kind)(model)
        another("h2", "Neg")(model)

    a, b, x = written(tmp_path, both)
    assert differences(a, b, x)["first"]["tensor"] == "h2"


def summed_in_parts(model: ModelProto) -> None:
    """The last product of the feed-forward part as the sum of two halves of it."""
    node = made(model, "h3")
    place = list(model.graph.node).index(node)
    array = numpy_helper.to_array(weight_of(model, "w2"))
    model.graph.initializer.extend(
        [
            numpy_helper.from_array(array[:WIDE].copy(), "w2_low"),
            numpy_helper.from_array(array[WIDE:].copy(), "w2_high"),
            numpy_helper.from_array(np.array([WIDE, WIDE]), "sizes"),
        ]
    )
    parts = [
        helper.make_node("Split", ["h2", "sizes"], ["low", "high"], axis=-1),
        helper.make_node("MatMul", ["low", "w2_low"], ["sum_low"]),
        helper.make_node("MatMul", ["high", "w2_high"], ["sum_high"]),
        helper.make_node("Add", ["sum_low", "sum_high"], ["h3"]),
    ]
    nodes = [*model.graph.node]
    nodes[place : place + 1] = parts
    del model.graph.node[:]
    model.graph.node.extend(nodes)


HONEST = {
    "the same file": lambda model: None,
    "another opset": lambda model: version_converter.convert_version(model, 21),
    "sums in another order": summed_in_parts,
    "a mask of another size": scaled("mask", 10.0),
    "another name of a node": lambda model: made(model, "q").ClearField("name"),
}


@pytest.mark.parametrize("change", HONEST.values(), ids=HONEST)
def test_rounding_is_no_difference(tmp_path: Path, change: Callable[[ModelProto], ModelProto | None]) -> None:
    a, b, x = written(tmp_path, change)
    facts = differences(a, b, x)
    assert facts["equal"] and facts["astray"] == 0, facts["first"]


def test_a_number_that_is_none_hides_no_difference(tmp_path: Path) -> None:
    a, _, x = written(tmp_path)
    plain, model = onnxruntime.InferenceSession(a), onnx.load(a)
    model.graph.node.append(helper.make_node("Where", ["odd", "nan", "y"], ["z"]))
    odd = np.arange(WIDE) == 3
    model.graph.initializer.extend(
        [numpy_helper.from_array(odd, "odd"), numpy_helper.from_array(np.array(np.nan, np.float32), "nan")]
    )
    model.graph.output[0].name = "z"
    onnx.save(model, a)

    def engine(elsewhere: float, there: float) -> Callable[[Arrays], dict[str, np.ndarray]]:
        def answer(inputs: Arrays) -> dict[str, np.ndarray]:
            y = np.asarray(plain.run(["y"], dict(inputs))[0])
            return {"z": np.where(odd, np.float32(there), y * np.float32(elsewhere))}

        return answer

    assert differences(a, engine(1.0, np.nan), x)["equal"]
    assert differences(a, engine(1.1, np.nan), x)["first"]["tensor"] == "z"
    assert differences(a, engine(1.0, np.inf), x)["first"]["tensor"] == "z"


@pytest.mark.slow
def test_a_half_that_takes_half_and_a_file_that_is_not_batched_are_compared(tmp_path: Path) -> None:
    a, b, x = written(tmp_path)
    model = onnx.load(b)
    ends = (*model.graph.input, *model.graph.output)
    for tensor in model.graph.initializer:
        half = numpy_helper.to_array(tensor).clip(-6e4, 6e4).astype(np.float16)
        tensor.CopyFrom(numpy_helper.from_array(half, tensor.name))
    for value in ends:
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    onnx.save(model, b)
    assert differences(a, b, x)["equal"]
    for path in (a, b):
        model = onnx.load(path)
        for value in (*model.graph.input, *model.graph.output):
            value.type.tensor_type.shape.dim[0].dim_value = 3
        onnx.save(model, path)
    np.savez(x, x=np.random.normal(size=(6, 3, 8, WIDE)).astype(np.float32))
    assert differences(a, b, x)["equal"]


def test_a_file_that_is_not_batched_takes_a_scalar(tmp_path: Path) -> None:
    """NumPy makes a number, and no array, of one element of a column of scalars."""
    file, samples = tmp_path / "scaled.onnx", tmp_path / "x.npz"
    onnx.save(
        parsed(
            "scaled (float[4] x, float by) => (float[4] y) { most = ReduceMax <keepdims=0> (by) y = Mul(x, most) }"
        ),
        file,
    )
    np.savez(samples, x=np.ones((3, 4), np.float32), by=np.ones(3, np.float32))
    assert differences(file, file, samples)["equal"]
    facts = differences(file, lambda _: {"most": np.array(2, np.float32)}, samples, out=tmp_path / "node")
    assert facts["first"]["tensor"] == "most"
    alone = onnxruntime.InferenceSession(tmp_path / "node" / "node.onnx")
    with (
        np.load(tmp_path / "node" / "inputs.npz") as inputs,
        np.load(tmp_path / "node" / "found.npz") as found,
    ):
        assert np.asarray(alone.run(None, dict(inputs))[0]) == found["a"] == 1
        assert found["b"].shape == ()


def test_an_output_that_is_a_sequence_is_passed_over(tmp_path: Path) -> None:
    """A half has none; the parts of the sequence are tensors of the graph, which are compared."""
    text = "g (float[n,8] x) => (float[n,8] y{0}) {{ h = Exp(x) y = Relu(h) {1} }}"
    of_a, of_b = (", seq(float[n,8]) s", "s = SequenceConstruct(h, h)"), ("", "")
    for name, parts in (("a", of_a), ("b", of_b)):
        onnx.save(parsed(text.format(*parts)), tmp_path / f"{name}.onnx")
    np.savez(tmp_path / "x.npz", x=np.random.normal(size=(6, 8)).astype(np.float32))
    facts = differences(tmp_path / "a.onnx", tmp_path / "b.onnx", tmp_path / "x.npz")
    assert facts["equal"] and facts["tensors"] == 2


def test_an_engine_is_compared_by_its_outputs(tmp_path: Path) -> None:
    a, b, x = written(tmp_path)

    def engine(arrays: Arrays) -> dict[str, np.ndarray]:
        return {
            "y": np.asarray(onnxruntime.InferenceSession(b).run(["y"], dict(arrays))[0])
            * np.float32(1 + error)
        }

    error = 0.0
    assert differences(a, engine, x)["equal"]
    error = 1e-3
    assert differences(a, engine, x)["first"]["tensor"] == "y"
    assert differences(a, engine, x, "fp16")["equal"]


def test_an_output_that_the_other_file_lacks_is_a_difference(tmp_path: Path) -> None:
    text = "g (float[n,4] x) => ({outputs}) {{ y = Tanh(x) {name} = Exp(x) }}"
    for file, outputs, name in (("a", "float[n,4] y, float[n,4] z", "z"), ("b", "float[n,4] y", "other")):
        onnx.save(parsed(text.format(outputs=outputs, name=name), {}), tmp_path / f"{file}.onnx")
    np.savez(tmp_path / "x.npz", x=np.ones((4, 4), np.float32))
    a, b = tmp_path / "a.onnx", tmp_path / "b.onnx"
    assert differences(a, b, tmp_path / "x.npz")["first"]["tensor"] == "z"
    assert differences(b, a, tmp_path / "x.npz")["equal"]


def test_no_rounding_explains_another_answer_however_deep_the_net(tmp_path: Path) -> None:
    random, rows, wide, last = np.random.default_rng(0), tmp_path / "x.npz", 32, "x"
    weights, text = {}, ""
    for layer in range(24):
        weights[f"w{layer}"] = (random.standard_normal((wide, wide)) * 1.5 / wide**0.5).astype(np.float32)
        text += f"m{layer} = MatMul({last}, w{layer}) t{layer} = Tanh(m{layer}) "
        last = f"t{layer}"
    text = f"g (float[n,{wide}] x) => (float[n,{wide}] y, int64[n] c) {{ {text} y = Identity({last}) c = ArgMax<axis=1, keepdims=0>({last}) }}"  # noqa: E501
    onnx.save(parsed(text, weights), tmp_path / "a.onnx")
    np.savez(rows, x=random.standard_normal((8, wide)).astype(np.float32))
    a = OnnxSide(tmp_path / "a.onnx")
    for factor, others, name in ((1.0, 0, None), (0.5, 0, "y"), (1.0, 2, "c")):

        def engine(inputs: Arrays, factor: float = factor, others: int = others) -> dict[str, np.ndarray]:
            came = a.tensors(inputs)
            return {"y": came["y"] * np.float32(factor), "c": came["c"] + (np.arange(4) < others)}

        first = diff.differences(a, engine, rows, "bf16")["first"]
        assert (first and first["tensor"]) == name


def test_what_cannot_be_compared_is_refused_by_name(tmp_path: Path) -> None:
    a, b, x = written(tmp_path)
    np.savez(tmp_path / "other.npz", z=np.zeros((2, 3), np.float32))
    with pytest.raises(BadSamples, match=r"expected the inputs \['x'\]"):
        differences(a, b, tmp_path / "other.npz")
    np.savez(tmp_path / "flat.npz", x=np.zeros((2, 3), np.float32))
    with pytest.raises(NotRun, match="with the samples"):
        differences(a, b, tmp_path / "flat.npz")
    np.savez(tmp_path / "none.npz", x=np.float32(3))
    with pytest.raises(BadSamples, match="'x' has no samples: expected them along axis 0"):
        differences(a, b, tmp_path / "none.npz")
    np.savez(tmp_path / "empty.npz")
    with pytest.raises(BadSamples, match="expected an array for each input of A, got none"):
        differences(a, b, tmp_path / "empty.npz")
    with pytest.raises(BadInput, match="no tensor with the same name"):
        differences(a, lambda arrays: {"other": np.zeros(3)}, x)
    short = onnx.load(a)
    through("q", TensorProto.BFLOAT16)(short)
    onnx.save(short, tmp_path / "short.onnx")
    scaled("wq", 1.1)(other := onnx.load(b))
    onnx.save(other, b)
    facts = differences(tmp_path / "short.onnx", b, x, out=tmp_path / "node")
    assert not facts["equal"] and facts["first"]["tensor"] == "q"
    assert "reads 'q_short', of a type that numpy does not have" in facts["not_written"]
    assert facts["reproduction"] is None and not (tmp_path / "node").exists()
    (tmp_path / "b.onnx").write_bytes(b"not a model")
    with pytest.raises(BadFolder, match="is not an ONNX file"):
        differences(a, b, x)


def test_rows_at_the_end_are_compared_and_outputs_by_their_names(tmp_path: Path) -> None:
    a, _, x = written(tmp_path)
    rows = np.load(x)["x"]
    np.savez(x, x=np.concatenate([rows[:4] * 0, rows[:2]]))
    plain = onnxruntime.InferenceSession(a)

    def other(inputs: Arrays) -> dict[str, np.ndarray]:
        y = np.asarray(plain.run(["y"], dict(inputs))[0])
        return {"y": y + np.float32(0.5 * bool(np.asarray(inputs["x"]).any()))}

    assert differences(a, other, x)["first"]["tensor"] == "y"
    np.savez(x, x=rows * np.float32(np.nan))
    with pytest.raises(BadSamples, match="nothing is compared"):
        differences(a, other, x)
