"""No half is claimed of what no sample runs: a branch not taken, a loop without a pass, rows that none has."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from halfeven.exporters.graph.actions import Kept
from halfeven.exporters.graph.backend import NEVER_RUN
from halfeven.exporters.inputs.samples import Samples
from halfeven.exporters.torch.program_graph import program_graph
from torch import Tensor, nn

from tests.conversions import as_subject
from tests.exporters.onnx.onnx_files import convert, parsed
from tests.programs import original

LIMIT = "limit = Constant<value_float=1000.0>() m = ReduceMax<keepdims=0>(x)"
FILES = {
    "branch": f"""g (float[n,8] x) => (float[n,8] y)
{{ {LIMIT} c = Less(m, limit) y = If(c)
  <then_branch = t () => (float[n,8] p) {{ a = MatMul(x, w) p = Relu(a) }},
   else_branch = e () => (float[n,8] q) {{ idle1 = MatMul(x, v) q = Mul(idle1, idle1) }}> }}""",
    "loop": f"""g (float[n,8] x) => (float[n,8] y)
{{ {LIMIT} d = Div(m, limit) f = Floor(d) k = Cast<to=7>(f) a = MatMul(x, w) y = Loop(k, yes, a)
  <body = b (int64 i, bool c, float[n,8] s) => (bool o, float[n,8] q)
    {{ o = Identity(c) idle1 = MatMul(s, v) q = Relu(idle1) }}> }}""",
    "rows": f"""g (float[n,8] x) => (float[n,8] y)
{{ {LIMIT} r = ReduceMax<axes=[1], keepdims=0>(x) c = Greater(r, limit) z = NonZero(c) i = Squeeze(z, first)
  s = Gather(x, i) idle1 = MatMul(s, v) q = ReduceSum<keepdims=0>(idle1) a = MatMul(x, w) y = Add(a, q) }}""",
}
IDLE_IN_FILES = {"branch": {"MatMul", "Mul"}, "loop": {"MatMul", "Relu"}, "rows": {"MatMul"}}


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.amax() < 1000.0, lambda x: self.one(x), lambda x: self.other(x), (x,))


class Rows(Branch):
    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.other(x[x.amax(-1) > 1000.0]).sum()


def kept_in_file(folder: Path, name: str, numbers: np.ndarray) -> list[Kept]:
    rng = np.random.default_rng()
    weights = {key: rng.standard_normal((8, 8), np.float32) for key in ("w", "v")}
    constants = {**weights, "yes": np.array(True), "first": np.array([0])}
    found = convert(folder / "net.onnx", parsed(FILES[name], constants), {"x": numbers})
    return [one for one in found.kept if one.reason == NEVER_RUN]


def kept_in_program(net: Callable[[], nn.Module], numbers: np.ndarray) -> list[Kept]:
    model = original(net(), {"x": torch.from_numpy(numbers)}, max_batch_size=8)
    samples = Samples({"x": numbers})
    subject = as_subject(model, samples)
    return [one for one in program_graph(subject, samples, model.example).kept if one.reason == NEVER_RUN]


def drawn(reached: bool) -> np.ndarray:
    """Samples of which half reach the part that is idle otherwise, or none does."""
    numbers = np.random.default_rng().standard_normal((32, 8)).astype(np.float32)
    numbers[16:, 0] += 1500.0 * reached  # other batches than the first rows are in
    return numbers


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_the_nodes_of_a_file_that_no_sample_runs_stay_in_fp32(name: str, tmp_path: Path) -> None:
    assert {one.op for one in kept_in_file(tmp_path, name, drawn(reached=False))} == IDLE_IN_FILES[name]
    assert not kept_in_file(tmp_path, name, drawn(reached=True))


NETS: Mapping[str, Callable[[], nn.Module]] = {"branch": Branch, "rows": Rows}


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_the_nodes_of_a_program_that_no_sample_runs_stay_in_fp32(name: str) -> None:
    idle = kept_in_program(NETS[name], drawn(reached=False))
    assert [one.op for one in idle] == ["linear"]
    assert not kept_in_program(NETS[name], drawn(reached=True))
