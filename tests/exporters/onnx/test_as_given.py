"""The FP32 original answers as the file that it was read from, as ONNX Runtime runs that."""

# ruff: noqa: E501  (graphs in their own lines)

from pathlib import Path

import numpy as np
import onnx
import pytest
from halfeven.exporters.inputs.samples import Samples
from halfeven.exporters.onnx import forms
from halfeven.exporters.onnx.as_given import AsGiven
from halfeven.exporters.onnx.conversion import NotPlanned, select
from halfeven.exporters.onnx.reading.graph import assembled
from halfeven.exporters.onnx.reading.normalise import normalise
from halfeven.exporters.onnx.runtime import runtime_answers
from halfeven.exporters.question import Answers
from halfeven.models.store.store import Store
from onnx import ModelProto

from tests.command_line import run
from tests.exporters.onnx.onnx_files import parsed, saved, spec_of

PICTURE = "g (float[n,2,8,8] x) => (float[n,2,h,w] y)"
LEAKY = '<domain: "my", opset_import: ["" : 17]> leaky <slope: float = 0.7> (p) => (q) { q = LeakyRelu<alpha: float = @slope>(p) }'
TWICE = '<domain: "my", opset_import: ["" : 17, "my" : 1]> twice <slope: float = 0.4> (p) => (q) { h = leaky(p) q = my.leaky<slope: float = @slope>(h) }'
CALLED = {
    "a call leaves out an attribute": ("{ y = my.leaky(x) }", LEAKY),
    "a call gives it": ("{ y = my.leaky<slope = 0.2>(x) }", LEAKY),
    "a call in a function": ("{ y = my.twice(x) }", TWICE.replace(" leaky(p)", " my.leaky(p)") + LEAKY),
    "a call in a branch": (
        "{ s = ReduceSum<keepdims=0>(x) z = Sub(s, s) c = GreaterOrEqual(s, z) y = If(c) <then_branch = a () => (float[n,4] p) { p = my.leaky(x) }, else_branch = e () => (float[n,4] p) { p = Neg(x) }> }",
        LEAKY,
    ),
}


def gap(model: ModelProto) -> float:
    """The difference between the answers of the file and those of the original that is read from it."""
    given = ModelProto.FromString(model.SerializeToString())
    program = normalise(model, Path("model.onnx"))
    shape = [dim.dim_value or 2 for dim in given.graph.input[0].type.tensor_type.shape.dim]
    arrays = {"x": np.random.default_rng().standard_normal(shape).astype(np.float32)}
    one, other = (
        runtime_answers(each)(arrays)["y"] for each in (given, assembled(program.model, program.weights))
    )
    assert one.shape == other.shape
    return float(np.abs(one - other).max())


@pytest.mark.parametrize("mode", ["linear", "nearest"])
@pytest.mark.parametrize("factor", [0.4, 0.5, 2.0, 2.5])
def test_a_picture_of_an_old_opset_is_resized_from_its_corner(mode: str, factor: float) -> None:
    scales = {"scales": np.array([1, 1, factor, factor], np.float32)}
    for op, opset in [("Resize", 10), ("Upsample", 9)] if factor > 1 else [("Resize", 10)]:
        text = f'{PICTURE} {{ a = Neg(x) y = {op}<mode="{mode}">(a, scales) }}'
        assert gap(parsed(text, scales, opset)) < 1e-6


@pytest.mark.parametrize(("body", "functions"), CALLED.values(), ids=CALLED)
def test_a_function_is_called_with_its_own_defaults(body: str, functions: str) -> None:
    model = parsed(f"g (float[n,4] x) => (float[n,4] y) {body} {functions}", more=', "my" : 1')
    assert gap(model) < 1e-6


def test_a_function_of_another_opset_is_read_at_the_models() -> None:
    model = parsed(
        f"g (float[n,4] x) => (float[n,4] y) {{ y = my.leaky(x) }} {LEAKY}", opset=20, more=', "my" : 1'
    )
    assert gap(model) == 0.0
    model = parsed(
        f"g (float[n,4] x) => (float[n,4] y) {{ y = my.leaky(x) }} {LEAKY}", opset=20, more=', "my" : 1'
    )
    assert [node.op_type for node in normalise(model, Path("model.onnx")).nodes] == ["LeakyRelu"]


def test_a_graph_without_a_name_is_read_as_any_other() -> None:
    model = parsed("g (float[n,4] x) => (float[n,4] y) { y = Neg(x) }")
    model.graph.name = ""
    assert gap(model) == 0.0


def test_a_file_that_is_read_as_another_model_is_served_as_it_was_given(tmp_path: Path) -> None:
    """Below opset 13 a Hardmax is over all axes from the first on, which onnx's version converter forgets."""
    model = parsed("g (float[n,4,8] x) => (float[n,4,8] y) { y = Hardmax<axis=1>(x) }", opset=11)
    onnx.save(model, tmp_path / "net.onnx")
    code, facts, said = run("convert", tmp_path / "net.onnx", "--store", tmp_path / "store")
    assert code == 0 and "as it is read here output 'y' is not what ONNX Runtime gives" in facts["reason"], (
        said
    )
    original = Store(tmp_path / "store").version("net", 1).file("original.onnx")
    assert onnx.load(original).opset_import[0].version == 11


def test_every_one_of_the_first_samples_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A misreading may show in one sample alone: in the branch of an If that no other takes."""
    model = parsed("g (float[n,4] x) => (float[n,4] y) { y = Neg(x) }")
    x = np.random.default_rng().standard_normal((12, 4)).astype(np.float32)
    odd = x[5]

    def read(*given: object) -> Answers:
        return lambda arrays: {"y": np.where((arrays["x"] == odd).all(-1, keepdims=True), 0, -arrays["x"])}

    monkeypatch.setattr(forms, "bounded_answers", read)
    with pytest.raises(NotPlanned, match="output 'y' is not what ONNX Runtime gives"):
        forms._planned_subject(
            tmp_path / "model.onnx", model, saved(tmp_path, model), Samples({"x": x}), {}, None, print
        )


@pytest.mark.parametrize(
    ("text", "error", "differs"),
    [
        ("{ y = RandomNormalLike(x) }", 1.0, False),
        ("{ h = Cast<to=10>(x) y = Cast<to=1>(h) }", 0.02, False),
        ("{ h = Cast<to=10>(x) y = Cast<to=1>(h) }", 1.0, True),
        ("{ y = Abs(x) }", 0.01, True),
        ("{ y = Abs(x) }", 1e-4, False),
    ],
)
def test_a_file_is_compared_with_what_is_read_of_it_as_closely_as_it_computes(
    text: str, error: float, differs: bool
) -> None:
    """A random file is not compared, and one with half inside may round."""
    model = parsed("g (float[n,4] x) => (float[n,4] y) " + text)
    row = {"x": np.full((1, 4), 1.0, np.float32)}
    found = AsGiven(model, spec_of(model), lambda arrays: {"y": arrays["x"] * (1 + error)}).difference(row)
    assert (found is not None) == differs


def test_a_note_says_how_far_the_file_is_from_its_original_that_does_not_round() -> None:
    random = np.random.default_rng()
    weights = {"w": random.standard_normal((16, 16)).astype(np.float32)}
    rows = [{"x": random.standard_normal((1, 16)).astype(np.float32)} for _ in range(3)]
    body = "g (float[n,16] x) => (float[n,16] y) { h = Cast<to=%d>(x) b = Cast<to=1>(h) d = Sub(b, m) y = MatMul(d, w) }"
    exact = weights | {"m": np.zeros(16, np.float32)}
    for kind, rounds in ((16, True), (1, False)):
        model = parsed(body % kind, exact)
        notes = AsGiven(model, spec_of(model), lambda arrays: {"y": arrays["x"] @ weights["w"]}).notes(rows)
        assert bool(notes) == rounds and all(
            "rounds values to half, and differs from that by 0." in n for n in notes
        )


def test_an_input_with_a_value_in_the_file_is_a_constant_and_a_note_says_so() -> None:
    model = parsed(
        "g (float[n,4] x, float[4] w) => (float[n,4] y) { y = Mul(x, w) }", {"w": np.ones(4, np.float32)}
    )
    spec = spec_of(model)
    assert select(model, spec, {}, Path("m.onnx")) == [
        "inputs that have a value in the file are constants: w"
    ]
    assert [value.name for value in model.graph.input] == ["x"]


def test_another_sign_is_a_difference() -> None:
    row = {"x": np.full((1, 4), 1.0, np.float32)}
    plain = parsed("g (float[n,4] x) => (float[n,4] y) { y = Neg(x) }")
    wrong = AsGiven(plain, spec_of(plain), lambda arrays: {"y": arrays["x"]}).difference(row)
    assert wrong is not None and "output 'y'" in wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rounds", "reader"),
    [
        (True, "h = Cast<to=10>(x) b = Cast<to=1>(h) d = Sub(x, b) y = MatMul(d, w)"),
        (False, "h = Cast<to=16>(x) b = Cast<to=1>(h) y = MatMul(b, w)"),
        (False, "h = Cast<to=10>(x) r = Reshape(h, s) b = Cast<to=1>(r) y = MatMul(b, w)"),
        (True, "h = Cast<to=10>(x) c = Cast<to=1>(h) e = Equal(x, c) b = Cast<to=1>(e) y = MatMul(b, w)"),
        (False, "h = Cast<to=10>(x) v = Cast<to=10>(w) m = MatMul(h, v) y = Cast<to=1>(m)"),
        (False, "v = Cast<to=10>(w) u = Cast<to=1>(v) y = MatMul(x, u)"),
    ],
)
def test_a_file_whose_answers_depend_on_a_rounding_to_half_is_served_as_it_was_given(
    rounds: bool, reader: str, tmp_path: Path
) -> None:
    """A rounding that only makes the answers less exact is left out of the original in FP32."""
    random = np.random.default_rng()
    weights = {"w": random.standard_normal((64, 64)).astype(np.float32), "s": np.array([-1, 64])}
    model = parsed(f"g (float[n,64] x) => (float[n,64] y) {{ {reader} }}", weights, opset=17)
    onnx.save(model, tmp_path / "net.onnx")
    code, facts, said = run("convert", tmp_path / "net.onnx", "--store", tmp_path / "store")
    assert code == 0, said
    assert ("is not what ONNX Runtime gives of the file" in facts["reason"]) == rounds, facts["reason"]
    if rounds:
        served = Store(tmp_path / "store").version("net", 1).file("original.onnx")
        assert [node.op_type for node in onnx.load(served).graph.node] == [
            node.op_type for node in model.graph.node
        ]
