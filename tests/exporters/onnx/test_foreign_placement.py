"""Casts stand where the fewest bytes are cast, and no answer of the half changes by a bit for it."""

# ruff: noqa: E501  (graphs in their own lines)

from pathlib import Path

import numpy as np
import pytest
from halfeven.exporters.onnx.precision import file_rules
from halfeven.exporters.plan.rehearsal import Rehearsal
from onnx import ModelProto

from tests.exporters.onnx.exported_nets import NETS
from tests.exporters.onnx.foldable import MODELS, inputs_of
from tests.exporters.onnx.onnx_files import ConvertedFile, convert, errors_u, parsed
from tests.exporters.onnx.traps import EVERY_RUN, FOREIGN, normal, square
from tests.slow import slow_part_but


def converted(name: str, path: Path, level: str) -> ConvertedFile:
    if name in NETS:
        samples, most = NETS[name].inputs(np.random.default_rng(2), 16), NETS[name].max_batch_size
    else:
        samples, most = FOREIGN[name].inputs(np.random.default_rng(11), 16), FOREIGN[name].max_batch_size
    return convert(path, MODELS[name](), samples, level, max_batch_size=most)


# Each model at one level: a level changes what is cast, not how casts are placed.
LEVELS = [(name, ("O1", "O3")[place % 2]) for place, name in enumerate(MODELS)]


@pytest.mark.parametrize(
    ("name", "level"), slow_part_but(4, [case for case in LEVELS if case[0] in EVERY_RUN], LEVELS)
)
def test_the_half_answers_as_before_bit_for_bit(name: str, level: str, tmp_path: Path, monkeypatch) -> None:
    # The places of the casts are asked of one plan, whatever unseen samples make of it.
    monkeypatch.setattr(Rehearsal, "find_counterexamples", lambda rehearsal, kept: False)
    placed = converted(name, tmp_path / "placed", level)
    monkeypatch.setattr(file_rules, "place", lambda program, rules, kernels, dtypes, numel, kept: dtypes)
    plain = converted(name, tmp_path / "plain", level)
    assert placed.kept == plain.kept and placed.written.nodes == plain.written.nodes
    inputs = inputs_of(name)
    one, other = plain.oracle_answers()(inputs), placed.oracle_answers()(inputs)
    for output, expected in one.items():
        came = other[output]
        assert np.array_equal(expected, came, equal_nan=expected.dtype.kind == "f"), output


def x_rows(rows: int = 16) -> dict[str, np.ndarray]:
    return {"x": normal(np.random.default_rng(), rows, 8)}


def model(body: str) -> ModelProto:
    shapes = {"three": np.asarray([0, 2, 4]), "flat": np.asarray([-1, 8])}
    return parsed(
        f"g (float[n,8] x) => (float[n,8] y) {{ {body} }}", square(np.random.default_rng(3)) | shapes
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "casts"),
    [
        # one cast before three movements, not one behind each
        ("p = Softmax(x) a = Reshape(p, flat) b = Relu(p) c = Identity(p) d = MatMul(a, w) e = MatMul(b, w) f = MatMul(c, w) g1 = Add(d, e) y = Add(g1, f)", 2),
        # a value that meets an FP32 value on its way to half readers is not cast up and down
        ("h = MatMul(x, w) p = Softmax(h) k = Concat<axis=0>(h, p) y = MatMul(k, w)", 4),
        # a movement between two FP32 nodes stays
        ("p = Softmax(x) r = Reshape(p, flat) e = Exp(r) y = MatMul(e, w)", 2),
    ],
)  # fmt: skip
def test_movements_go_where_the_fewest_bytes_are_cast(body: str, casts: int, tmp_path: Path) -> None:
    foreign = convert(tmp_path, model(body), x_rows())
    assert foreign.written.casts == casts and foreign.kept == ()


@pytest.mark.slow
def test_what_the_file_casts_already_is_not_cast_again(tmp_path: Path) -> None:
    foreign = convert(
        tmp_path,
        model("h = MatMul(x, w) f = Cast<to=1>(h) e = Exp(h) m = Mul(e, f) b = Identity(m) y = MatMul(b, w)"),
        {"x": 0.3 * x_rows()["x"]},
    )
    assert foreign.half is not None
    assert sum(node.op_type == "Cast" and node.input[0] == "h" for node in foreign.half.graph.node) == 1


@pytest.mark.slow
def test_half_that_goes_to_fp32_and_back_is_read_before_it_goes(tmp_path: Path) -> None:
    foreign = convert(tmp_path, model("h = MatMul(x, w) f = Cast<to=1>(h) y = MatMul(f, w)"), x_rows())
    assert foreign.half is not None and foreign.written.casts == 2
    assert [node.op_type for node in foreign.half.graph.node] == ["Cast", "MatMul", "MatMul", "Cast"]


@pytest.mark.slow
def test_what_reaches_an_fp32_reader_unrounded_stays_unrounded(tmp_path: Path, monkeypatch) -> None:
    """The concatenation would cost fewer bytes in half, and the slice behind it would be rounded."""
    body = (
        "h = MatMul(x, w) k = MatMul(h, w) p = Softmax(x) c = Concat<axis=1>(h, k, p) s = Slice(c, from, to, axes)"
        " e = Exp(s) f = Gather<axis=1>(e, picks) y = Mul(f, thousand)"
    )
    text = f"g (float[n,8] x) => (float[n,8] y) {{ {body} }}"
    places = {"from": [16], "to": [18], "axes": [1], "picks": [0, 1] * 4}
    weights = {name: np.asarray(value, np.int64) for name, value in places.items()}
    weights |= square(np.random.default_rng(3)) | {"thousand": np.asarray(1000.0, np.float32)}
    samples, inputs = x_rows(), x_rows()
    placed = convert(tmp_path / "placed", parsed(text, weights), samples)
    monkeypatch.setattr(file_rules, "place", lambda program, rules, kernels, dtypes, numel, kept: dtypes)
    plain = convert(tmp_path / "plain", parsed(text, weights), samples)
    assert placed.half_nodes == plain.half_nodes == 2
    assert np.array_equal(placed.oracle_answers()(inputs)["y"], plain.oracle_answers()(inputs)["y"])


@pytest.mark.slow
def test_what_is_read_as_it_comes_does_not_move(tmp_path: Path) -> None:
    """An integer that is cut off an FP32 value is not cut off its rounding."""
    text = (
        "g (float[n,8] x) => (float[n,8] y, int64[n,8] i) { e = Sigmoid(x) m = Mul(e, thousand) r = Identity(m)"
        " i = Cast<to=7>(r) y = MatMul(r, w) }"
    )
    weights = square(np.random.default_rng(3)) | {"thousand": np.asarray(1000.0, np.float32)}
    foreign = convert(tmp_path, parsed(text, weights), x_rows())
    assert foreign.half_nodes == 1 and foreign.kept == ()
    assert max(errors_u(foreign, x_rows(64)).values()) <= 4.0
