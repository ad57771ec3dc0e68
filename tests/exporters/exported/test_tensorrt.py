"""TensorRT builds every exported half of zoo and corpus as it is typed. Not every machine may have the package."""

from importlib.util import find_spec

import pytest

from tests.benchmarks.same_plans import names_of
from tests.benchmarks.tensorrt_engines import row_of

# Operations that TensorRT-RTX 1.7 does not have, with its own words.
MISSING = {
    "spectrum": "Plugin not found",  # DFT
    "scatter add": "Unsupported reduction type",  # ScatterElements that adds
    "index put": "ScatterND with reduction is not supported",
}
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
    if words := MISSING.get(name):
        assert words in row.refused
        return
    assert row.holds, row
    assert row.half > 0 and row.compared >= row.nodes / 2
