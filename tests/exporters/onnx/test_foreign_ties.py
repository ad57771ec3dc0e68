"""Indices of a foreign graph whose scores may tie: the rule itself is claimed of files too in gate/test_ties.py."""

from pathlib import Path

import numpy as np
from halfeven.exporters.onnx.precision.ties import find_tied

from tests.exporters.onnx.onnx_files import convert, parsed
from tests.exporters.onnx.traps import f32


def test_indices_that_are_computed_with_are_not_looked_for() -> None:
    for graph, tied in (
        ("(float[n,7] x) => (int64[n,3] y) { k = Constant<value_ints=[3]>() v, y = TopK(x, k) }", ["y"]),
        ("(float[n,7] x) => (int64[n] y) { i = ArgMax<axis=1,keepdims=0>(x) y = Add(i, i) }", []),
        ("(float[n,7] x) => (float[n,1] y) { i = ArgMax<axis=1>(x) y = Cast<to=1>(i) }", []),
    ):
        assert [one.output for one in find_tied(parsed(f"g {graph}"))] == tied


def test_scores_that_tie_in_half_keep_no_node_in_fp32(tmp_path: Path) -> None:
    """Two classes with the same weights but for a millionth: half cannot tell them apart, and need not."""
    random = np.random.default_rng()
    w = f32(random.standard_normal((8, 6)))
    w = np.concatenate([w, w * f32(1 + 1e-6)], 1)
    model = parsed(
        "g (float[n,8] x) => (int64[n] y) { s = MatMul(x, w) y = ArgMax<axis=1, keepdims=0>(s) }", {"w": w}
    )
    foreign = convert(tmp_path, model, {"x": f32(random.standard_normal((16, 8)))})
    assert foreign.half is not None and foreign.kept == ()
