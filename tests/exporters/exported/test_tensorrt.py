"""TensorRT builds every exported half of zoo and corpus as it is typed. Not every machine may have the package."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import pytest
from halfeven.exporters.exported import scattered_sums
from halfeven.exporters.exported.tensorrt_operators import LACKING

from tests.benchmarks.same_plans import names_of
from tests.benchmarks.tensorrt_engines import SECONDS, row_of
from tests.exporters.exported.rewritten_files import Array, File, drawn, is_rewritten
from tests.patience import PATIENCE_S

CASES = [(road, name) for road in ("zoo", "program") for name in names_of(road)]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("tensorrt_rtx") is None,
        reason="needs the proprietary package tensorrt-rtx (pip install 'halfeven[tensorrt]')",
    ),
]


@pytest.mark.parametrize(("road", "name"), CASES)
def test_a_proven_half_is_built_as_a_strongly_typed_network_with_the_types_of_the_plan(
    road: str, name: str
) -> None:
    row = row_of(road, name)
    if row is None:
        pytest.skip("no half of it is proven as ONNX")
    assert row.holds, row
    assert row.half > 0 and row.compared >= row.nodes / 2


_PARSER = """
import json, onnx, tensorrt_rtx as trt
logger = trt.Logger(trt.Logger.ERROR)
builder = trt.Builder(logger)
network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
parser = trt.OnnxParser(network, logger)
names = {schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""}
print(json.dumps(sorted(name for name in names if not parser.supports_operator(name))))
"""


def test_the_operations_that_tensorrt_lacks_are_those_that_its_parser_does_not_have() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PARSER], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    known = {schema.name for schema in onnx.defs.get_all_schemas()}
    assert set(json.loads(done.stdout.splitlines()[-1])) == LACKING & known


def adding(type_: str, updates: int = 6, expanded: bool = False) -> str:
    """A ScatterElements that adds; ``expanded``: one index for all updates of a row."""
    sides = (
        f"{type_}[n,5,6] data, int64[n,7,{1 if expanded else updates}] ids, {type_}[n,7,{updates}] updates"
    )
    many = "size = Shape(updates) many = Expand(ids, size)" if expanded else "many = Identity(ids)"
    node = 'ScatterElements<axis=1, reduction="add">(data, many, updates)'
    return f"({sides}) => ({type_}[n,5,6] y) {{ {many} y = {node} }}"


# Graphs that the corpus does not have.
REWRITTEN = {
    "a transform of a half": "(float16[n,16,1] x) => (float16[n,9,2] y) { y = DFT<axis=1, onesided=1>(x) }",
    "an inverse transform": "(float[n,3,4,2] x) => (float[n,3,4,2] y) { y = DFT<axis=2, inverse=1>(x) }",
    "a transform of a line that is filled up": (
        "(float[n,8,1] x) => (float[n,12,2] y) <int64 length = {12}> { y = DFT<axis=1>(x, length) }"
    ),
    "halves": adding("float16"),
    "integers": adding("int64"),
    "double": adding("double"),
    "fewer updates": adding("float", updates=3),
    "a product": adding("float", expanded=True),
    "single numbers": (
        "(float[n,5,6] data, int64[n,4,3] ids, float[n,4] updates) => (float[n,5,6] y)"
        ' { y = ScatterND<reduction="add">(data, ids, updates) }'
    ),
}


@pytest.mark.parametrize("case", REWRITTEN)
def test_what_is_rewritten_is_built(
    case: str, tmp_path: Path, random: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case == "a product":
        monkeypatch.setattr(scattered_sums, "LARGEST", 1000)
    file = File(tmp_path, f"main {REWRITTEN[case]}")
    inputs, profile = dict[str, Array](), {}
    for value in onnx.load(file.path).graph.input:
        tensor = value.type.tensor_type
        shape = [dim.dim_value or 4 for dim in tensor.shape.dim]
        type_ = onnx.TensorProto.DataType.Name(tensor.elem_type).lower()
        inputs[value.name] = np.zeros(shape, np.int64) if value.name == "ids" else drawn(random, shape, type_)
        profile[value.name] = ([1, *shape[1:]], shape, [8, *shape[1:]])
    assert is_rewritten(file.rewrite(inputs, 8))
    assert ("MatMul" in file.operations) == ("product" in case or "transform" in case)
    file.path.rename(tmp_path / "half.onnx")
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    command = [sys.executable, "-m", "tests.benchmarks.tensorrt_build", tmp_path, tmp_path / "profile.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["refused"] == "" and facts["strongly_typed"] and facts["bytes"] > 0, done.stderr
