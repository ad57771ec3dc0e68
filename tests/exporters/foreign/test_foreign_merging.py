"""FP32 regions grow where that saves casts, by the rule that `merging.py` states, and the judge has the last word."""

# ruff: noqa: E501  (graphs in their own lines)

from collections.abc import Collection
from pathlib import Path

import numpy as np
import pytest
from halfeven.exporters.foreign.graph import ForeignProgram
from halfeven.exporters.foreign.merging import Merging
from halfeven.exporters.foreign.normalise import normalise
from halfeven.exporters.foreign.planning import Draft
from halfeven.exporters.foreign.profile import profile
from halfeven.exporters.foreign.rewrite import HalfGraph
from halfeven.exporters.search.delta_debugging import Score
from halfeven.models.package import Precision

from tests.exporters.foreign.onnx_files import convert, parsed
from tests.exporters.foreign.traps import normal

PASSED, REFUSED = Score(True, 1.0, "passed"), Score(False, 9.0, "refused")
TAIL = "h = MatMul(x, w) k = Exp(h) y = Tanh(k)"
GAP = "h = MatMul(x, w) k = Exp(h) t = Tanh(k) e = Exp(t) y = MatMul(e, w)"
PRODUCT = "h = MatMul(x, w) k = Exp(h) y = MatMul(k, w)"
TWO = "h = MatMul(x, w) k = Exp(h) t = Tanh(k) s = Sigmoid(t) e = Exp(s) y = MatMul(e, w)"
MOVED = "h = MatMul(x, w) k = Exp(h) t = Transpose<perm=[1,0]>(k) u = Transpose<perm=[1,0]>(t) e = Sin(u) y = MatMul(e, w)"
FORKED = "h = MatMul(x, w) k = Exp(h) t = Tanh(k) e = Exp(t) f = MatMul(t, w) g = MatMul(e, w) y = Add(f, g)"


def program_of(body: str) -> ForeignProgram:
    text = f"g (float[n,8] x) => (float[n,8] y) {{ {body} }}"
    return normalise(parsed(text, {"w": normal(np.random.default_rng(3), 8, 8)}), Path("model.onnx"))


def grown(body: str, kept: Collection[str], score: Score = PASSED) -> tuple[list[str], int, int]:
    """The ops that came over, and the casts before and after."""
    program = program_of(body)
    draft = Draft(program, Precision("O3"))
    draft.hold_back(profile(program, [{"x": normal(np.random.default_rng(), 4, 8)}], "fp16"), dict)
    numel = {name: found.numel for name, found in draft.ranges.items()}

    def write(kept: Collection[str]) -> HalfGraph:
        return draft.rewritten(draft.placed(draft.assign(kept), kept))

    merging = Merging(write, lambda _: score, numel, draft.assign(kept).half)
    found = merging.grown(kept)
    ops = {node.name: node.op_type for node in program.nodes}
    casts = [len(write([*kept, *more]).casts) for more in ((), found)]
    return [ops[name] for name in found], casts[0], casts[1]


def test_a_node_before_an_fp32_output_goes_over() -> None:
    assert grown(TAIL, ["exp"]) == (["Tanh"], 4, 2)


def test_a_node_between_two_goes_over() -> None:
    assert grown(GAP, ["exp", "exp_2"]) == (["Tanh"], 6, 4)


def test_two_in_a_row_go_over_together_for_two_casts() -> None:
    assert grown(TWO, ["exp", "exp_2"]) == (["Tanh", "Sigmoid"], 6, 4)


def test_nodes_that_only_move_values_count_for_nothing_but_their_bytes() -> None:
    assert grown(MOVED, ["exp", "sin"]) == (["Transpose", "Transpose"], 6, 4)


def test_a_product_stays_half_whatever_it_costs() -> None:
    found, before, after = grown(PRODUCT, ["exp"])
    assert found == [] and before == after


def test_a_node_that_saves_no_cast_stays_half() -> None:
    found, before, after = grown(FORKED, ["exp"])
    assert found == [] and before == after


@pytest.mark.parametrize("body", [TAIL, GAP, TWO])
def test_nothing_goes_over_that_the_judge_refuses(body: str) -> None:
    kept = ["exp"] if body == TAIL else ["exp", "exp_2"]
    found, before, after = grown(body, kept, REFUSED)
    assert found == [] and before == after


def test_where_the_search_keeps_nothing_nothing_goes_over(tmp_path: Path) -> None:
    """In FP32 the last node would save a cast; but all of it may be half, and half was asked for."""
    text = "g (float[n,8] x, float[n,8] z) => (float[n,8] y) { h = MatMul(x, w) y = Mul(h, z) }"
    random = np.random.default_rng()
    samples = {name: normal(random, 16, 8) for name in ("x", "z")}
    foreign = convert(tmp_path, parsed(text, {"w": normal(random, 8, 8)}), samples, "O3")
    assert foreign.kept == () and foreign.casts == 3
