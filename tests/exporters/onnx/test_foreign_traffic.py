"""The report of a file about its casts: those between floating types, with bytes at the example's sizes."""

from pathlib import Path

import numpy as np
import pytest

from tests.exporters.onnx.onnx_files import convert, parsed
from tests.exporters.onnx.traps import normal

INTEGERS = (
    "g (int64[n,8] x) => (float[n,8] y) { f = Cast<to=1>(x) h = MatMul(f, w) r = Relu(h) y = MatMul(r, w) }"
)
FLOATS = "g (float[n,8] x) => (float[n,8] y) { h = MatMul(x, w) r = Relu(h) y = MatMul(r, w) }"


@pytest.mark.slow
@pytest.mark.parametrize(("text", "casts"), [(INTEGERS, 1), (FLOATS, 2)])
def test_every_cast_between_floats_is_counted_with_its_bytes(text: str, casts: int, tmp_path: Path) -> None:
    random = np.random.default_rng()
    x = random.integers(0, 4, (16, 8)) if text is INTEGERS else normal(random, 16, 8)
    foreign = convert(tmp_path, parsed(text, {"w": normal(random, 8, 8, scale=0.25)}), {"x": x})
    found = foreign.maker.settled.traffic()
    assert len(found.casts) == foreign.written.casts == casts
    assert {cast.bytes for cast in found.casts} == {3 * 8 * (4 + 2)}, "the example has three rows"
    assert "float32" in {cast.to_dtype for cast in found.casts}, "the output's"
    weights = 2 * 2 * 8 * 8  # read twice, two bytes less each time
    between = 2 * 3 * 8 * 6  # of x, h, r and y in half: written once or read once, h and r both
    assert found.saved == weights + between


def test_a_files_report_has_what_a_modules_report_has(tmp_path: Path) -> None:
    random = np.random.default_rng()
    model = parsed(FLOATS, {"w": normal(random, 8, 8, scale=0.25)})
    foreign = convert(tmp_path, model, {"x": normal(random, 16, 8)})
    planner, settled = foreign.planner, foreign.maker.settled
    found = settled.profile()
    assert {row["node"] for row in found["nodes"]} == {"x", "w", *(n.name for n in foreign.program.nodes)}
    assert [row["weight"] for row in settled.weights()] == ["w"] and not settled.weights()[0]["fp32"]
    assert planner.search == "not needed"
