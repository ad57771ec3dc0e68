"""The range of a foreign graph's input is what ONNX Runtime takes: it answers just inside and refuses just outside."""

# ruff: noqa: E501  (graphs in their own lines)

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from halfeven.exporters.onnx.conversion import read_foreign
from halfeven.models.engines.onnx_engine import OnnxEngine
from halfeven.models.errors import BadFolder, BadRequest
from halfeven.models.spec.value_range import ValueRange
from onnx import ModelProto, helper

from tests.exporters.onnx.onnx_files import parsed, saved, spec_of

TABLE = "(float[n,5,4] y)"
# Graphs of int64 ids [n, 5]; `w` is a table of 50 rows, `v` one of 30, each 4 wide.
RANGED = {
    "Gather": f"g (int64[n,5] ids) => {TABLE} {{ y = Gather(w, ids) }}",
    "an offset": f"g (int64[n,5] ids) => {TABLE} {{ i = Add(ids, three) y = Gather(w, i) }}",
    "casts and shapes": f"g (int64[n,5] ids) => {TABLE} {{ c = Cast<to = 6>(ids) t = Transpose<perm = [1, 0]>(c) u = Transpose<perm = [1, 0]>(t) y = Gather(w, u) }}",
    "two tables": f"g (int64[n,5] ids) => {TABLE} {{ a = Gather(w, ids) i = Sub(ids, three) b = Gather(v, i) y = Add(a, b) }}",
    "GatherElements": "g (int64[n,5] ids) => (float[n,5] y) { s = Shape(ids) r = Slice(s, zero1, one1) five = Concat<axis = 0>(r, fifty) t = Expand(row, five) y = GatherElements<axis = 1>(t, ids) }",
    "GatherND": "g (int64[n,5] ids) => (float[n,5,4] y) { i = Unsqueeze(ids, two1) y = GatherND(w, i) }",
}
NARROW = "g (int64[n,2] ids) => (float[n,4] y) { a = Gather<axis = 1>(ids, zero) b = Gather<axis = 1>(ids, one) c = Gather(w, a) d = Gather(v, b) y = Add(c, d) }"
# Indices that are not followed back to the ids: ONNX Runtime itself refuses them.
COMPUTED = {
    "GatherElements": "g (int64[n,5] ids) => (float[n,5] y) { i = Mul(ids, three) s = Shape(ids) r = Slice(s, zero1, one1) five = Concat<axis = 0>(r, fifty) t = Expand(row, five) y = GatherElements<axis = 1>(t, i) }",
    "GatherND": "g (int64[n,5] ids) => (float[n,5,4] y) { j = Mul(ids, three) i = Unsqueeze(j, two1) y = GatherND(w, i) }",
    "a difference": f"g (int64[n,5] ids) => {TABLE} {{ i = Sub(three, ids) y = Gather(w, i) }}",
    "a factor": f"g (int64[n,5] ids) => {TABLE} {{ i = Mul(three, ids) j = Neg(i) y = Gather(w, j) }}",
    "a division": f"g (int64[n,5] ids) => {TABLE} {{ i = Div(ids, three) y = Gather(w, i) }}",
    "a clamp": f"g (int64[n,5] ids) => {TABLE} {{ i = Clip(ids, zero) y = Gather(w, i) }}",
    "a maximum": f"g (int64[n,5] ids) => {TABLE} {{ i = Max(ids, zero) j = Sub(i, three) y = Gather(w, j) }}",
    "a part that is replaced": f"g (int64[n,5] ids) => {TABLE} {{ c = Less(ids, zero) i = Where(c, three, ids) y = Gather(w, i) }}",
    "all but some": f"g (int64[n,5] ids) => {TABLE} {{ c = Less(ids, three) d = Not(c) i = Where(d, ids, three) y = Gather(w, i) }}",
    "EmbedLayerNormalization": f"g (int64[n,5] ids) => {TABLE} {{ j = Cast<to = 6>(ids) k = Sub(j, j) y, m = com.microsoft.EmbedLayerNormalization(j, k, w, v, w, gain, gain) }}",
    "a concatenation": "g (int64[n,5] ids) => (float[n,10,4] y) { j = Add(ids, three) i = Concat<axis = 1>(ids, j) y = Gather(w, i) }",
}
FREE = {
    "OneHot": "g (int64[n,5] ids) => (float[n,5,d] y) { o = OneHot(ids, depth, off_on) y = Cast<to = 1>(o) }",
    "a remainder": f"g (int64[n,5] ids) => {TABLE} {{ i = Mod(ids, fifty) y = Gather(w, i) }}",
}


def built(text: str) -> ModelProto:
    random = np.random.default_rng()
    model = parsed(
        text,
        {
            "w": random.standard_normal((50, 4)).astype(np.float32),
            "v": random.standard_normal((30, 4)).astype(np.float32),
            "row": random.standard_normal((1, 50)).astype(np.float32),
            "gain": np.ones(4, np.float32),
            "zero": np.array(0), "one": np.array(1), "three": np.array(3), "fifty": np.array([50]),
            "zero1": np.array([0]), "one1": np.array([1]), "two1": np.array([2]),
            "depth": np.array([50]), "off_on": np.array([0.0, 1.0], np.float32),
        },
    )  # fmt: skip
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return model


def derived(model: ModelProto, path: Path) -> ValueRange | None:
    folder = saved(path, model)
    return read_foreign(path / "model.onnx", folder)[1].inputs[0].range


def taken(model: ModelProto, values: range, column: int | slice = slice(None)) -> list[int]:
    """The values that ONNX Runtime itself takes, everywhere or in one column beside fives."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(onnx.ModelProto.SerializeToString(model), options)
    size = model.graph.input[0].type.tensor_type.shape.dim[1].dim_value
    found = []
    for value in values:
        ids = np.full((2, size), 5)
        ids[:, column] = value
        try:
            session.run(None, {"ids": ids})
            found.append(value)
        except Exception:  # of the runtime's own kinds
            continue
    return found


@pytest.mark.parametrize("name", RANGED)
def test_the_range_is_what_the_runtime_takes(name: str, tmp_path: Path) -> None:
    model = built(RANGED[name])
    values = range(-200, 200)
    allowed, found = taken(model, values), derived(model, tmp_path)
    assert found is not None and len(found.low) == 1
    assert allowed == list(range(max(found.low[0], values[0]), min(found.high[0], values[-1]) + 1))


def test_a_column_has_the_range_of_its_own_table(tmp_path: Path) -> None:
    model = built(NARROW)
    assert derived(model, tmp_path) == ValueRange((-50, -30), (49, 29))
    assert taken(model, range(-200, 200), 1) == list(range(-30, 30))


def test_a_column_that_is_taken_twice_is_left_to_the_runtime(tmp_path: Path) -> None:
    """-1 and 1 are the same column of two: its numbers index a table of 50 rows and another of 30."""
    text = "g (int64[n,2] ids) => (float[n] y) { t = Gather<axis = 1>(ids, ends) y = GatherND(wide, t) }"
    for ends in ([-1, 1], [1, -1]):
        model = parsed(text, {"ends": np.array(ends), "wide": np.zeros((50, 30), np.float32)})
        assert derived(model, tmp_path) is None


@pytest.mark.parametrize("name", COMPUTED)
def test_an_index_that_the_graph_computes_is_refused_by_the_engine(name: str, tmp_path: Path) -> None:
    model = built(COMPUTED[name])
    assert derived(model, tmp_path) is None
    tried = range(-200, 200)
    allowed = taken(model, tried)
    engine = OnnxEngine(tmp_path / "model.onnx", "fp32", torch.device("cpu"))
    assert 0 < len(allowed) < 400
    for value in {allowed[0] - 1, allowed[0], allowed[-1], allowed[-1] + 1} & {*tried}:
        ids = np.full((2, 5), value)
        if value in allowed:
            assert len(engine.run([[ids]])[0]) == 2
            continue
        with pytest.raises(BadRequest, match=r"out of range for a table.*ONNX Runtime says"):
            engine.run([[ids]])


@pytest.mark.parametrize("name", FREE)
def test_what_takes_any_number_asks_nothing(name: str, tmp_path: Path) -> None:
    model = built(FREE[name])
    assert derived(model, tmp_path) is None
    assert len(taken(model, range(-200, 200))) == 400


def test_a_range_of_the_folder_that_the_tables_do_not_have_is_refused(tmp_path: Path) -> None:
    model = built(RANGED["Gather"])
    spec = spec_of(model)
    wide = replace(spec, inputs=(replace(spec.inputs[0], range=ValueRange((0,), (50,))),))
    with pytest.raises(BadFolder, match=r"range = 0\.\.50, .* rows -50\.\.49"):
        read_foreign(tmp_path / "model.onnx", saved(tmp_path, model, wide))
