"""Inputs of the conversion's own that would run for ever, or fill the memory, are refused by a count."""

import numpy as np
import pytest
from halfeven.exporters.inputs.samples import Samples
from halfeven.exporters.onnx.bounded_answers import PASSES_AT_LEAST, ROOM, bounded_answers, is_unbounded
from halfeven.exporters.onnx.runtime import runtime_answers
from halfeven.models.errors import NotRun
from onnx import ModelProto

from tests.exporters.onnx.onnx_files import parsed, spec_of

COUNTED = """g (float[n,2] x) => (float[n,2] y)
{ m = ReduceMax<keepdims=0>(x) k = Cast<to=7>(m) y = Loop(k, yes, x)
  <body = b (int64 i, bool c, float[n,2] s) => (bool o, float[n,2] t) { o = Identity(c) t = Add(s, one) }> }"""
UNTIL = """g (float[n,2] x) => (float[n,2] y)
{ y = Loop(endless, yes, x)
  <body = b (int64 i, bool c, float[n,2] s) => (bool o, float[n,2] t)
  { t = Mul(s, two) m = ReduceMax<keepdims=0>(t) o = Less(m, most) }> }"""


def model(text: str) -> ModelProto:
    numbers = {"one": 1.0, "two": 2.0, "most": 100.0}
    constants = {name: np.array(number, np.float32) for name, number in numbers.items()}
    endless = np.array(np.iinfo(np.int64).max)
    return parsed(text, {**constants, "yes": np.array(True), "endless": endless})


@pytest.mark.parametrize("text", [COUNTED, UNTIL])
def test_what_takes_no_more_passes_is_answered_as_ever(text: str) -> None:
    file, x = model(text), np.random.default_rng().uniform(1.0, 30.0, (6, 2)).astype(np.float32)
    answers = bounded_answers(model(text), spec_of(file), Samples({"x": x}))
    for rows in (x[:1], x, 4 * x):
        found = answers({"x": rows})
        assert [*found] == ["y"]
        np.testing.assert_array_equal(found["y"], runtime_answers(file)({"x": rows})["y"])


@pytest.mark.parametrize(("text", "number"), [(COUNTED, 1e12), (UNTIL, 0.0)])
def test_what_would_run_for_ever_is_refused(text: str, number: float) -> None:
    x = np.random.default_rng().uniform(1.0, 30.0, (6, 2)).astype(np.float32)
    answers = bounded_answers(model(text), spec_of(model(text)), Samples({"x": x}))
    with pytest.raises(NotRun, match=f"more than {ROOM} times as many as with any sample"):
        answers({"x": np.full((1, 2), number, np.float32)})


def test_samples_of_many_passes_raise_the_bound() -> None:
    x = np.array([[3.0 * PASSES_AT_LEAST, 0.0], [1.0, 2.0]], np.float32)
    answers = bounded_answers(model(COUNTED), spec_of(model(COUNTED)), Samples({"x": x}))
    assert answers({"x": 4 * x})["y"].shape == (2, 2)


SIZED = {
    "ConstantOfShape": "n = Cast<to=7>(e) z = ConstantOfShape(n) u = Unsqueeze(z, one_axis) y = Add(u, x)",
    "Expand": "n = Cast<to=7>(e) t = Concat<axis=0>(n, ones) y = Expand(x, t)",
    "Tile": "n = Cast<to=7>(e) t = Concat<axis=0>(n, ones) y = Tile(x, t)",
    "Range": "s = ReduceMax<keepdims=0>(e) r = Range(zero, s, one) u = Unsqueeze(r, one_axis) y = Mul(u, x)",
    "Pad": "n = Cast<to=7>(e) t = Concat<axis=0>(zeros, n, zeros, zeros) y = Pad(x, t)",
    "OneHot": "n = Cast<to=7>(e) h = OneHot(table, n, two_values) y = Reshape(h, flat)",
    "Resize": 't = Concat<axis=0>(e, float_one) y = Resize<mode="nearest">(x, , t)',
}


def sized(operation: str) -> ModelProto:
    text = f"g (float[1,2] x, float[1] d) => (float[a,b] y) {{ e = Exp(d) {SIZED[operation]} }}"
    floats = {"zero": 0.0, "one": 1.0, "float_one": [1.0], "two_values": [0.0, 1.0]}
    whole = {"one_axis": [1], "ones": [1], "zeros": [0], "table": [0, 1], "flat": [-1, 1]}
    kinds = ((floats, np.float32), (whole, np.int64))
    return parsed(text, {name: np.array(one, kind) for some, kind in kinds for name, one in some.items()})


@pytest.mark.parametrize("operation", SIZED)
def test_a_value_that_would_be_far_larger_than_with_any_sample_is_refused(operation: str) -> None:
    random = np.random.default_rng()
    given = {
        "x": random.standard_normal((6, 1, 2)).astype(np.float32),
        "d": random.uniform(2.0, 3.0, (6, 1)).astype(np.float32),
    }
    spec = spec_of(sized(operation), max_batch_size=0)
    answers, plain = (
        bounded_answers(sized(operation), spec, Samples(given)),
        runtime_answers(sized(operation)),
    )
    for times in (1, 2):
        asked = {"x": given["x"][0], "d": times * given["d"][0]}
        found = answers(asked)
        assert [*found] == ["y"]
        np.testing.assert_array_equal(found["y"], plain(asked)["y"])
    million = {"x": given["x"][0], "d": np.array([14.0], np.float32)}
    assert plain(million)["y"].size > 1_000_000
    with pytest.raises(NotRun):
        answers(million)


def test_a_size_that_comes_from_shapes_alone_is_not_counted() -> None:
    text = "g (float[n,2] x) => (float[n,2] y) { s = Shape(x) z = ConstantOfShape(s) y = Add(x, z) }"
    assert not is_unbounded(parsed(text)) and is_unbounded(sized("Range")) and is_unbounded(model(UNTIL))
