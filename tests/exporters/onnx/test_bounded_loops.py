"""A Loop that an input of the conversion's own would keep for ever is refused by a count of passes."""

import numpy as np
import pytest
from halfeven.exporters.inputs.samples import Samples
from halfeven.exporters.onnx.bounded_loops import AT_LEAST, ROOM, bounded_answers
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
    x = np.array([[3.0 * AT_LEAST, 0.0], [1.0, 2.0]], np.float32)
    answers = bounded_answers(model(COUNTED), spec_of(model(COUNTED)), Samples({"x": x}))
    assert answers({"x": 4 * x})["y"].shape == (2, 2)
