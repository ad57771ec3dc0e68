"""Every exported half runs in ONNX Runtime with its default settings."""

# ruff: noqa: E501  (graphs in their own lines)

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from halfeven.exporters.conversion.convert import convert
from halfeven.exporters.exported import folder as exported_folder
from halfeven.exporters.exported.folder import export
from halfeven.exporters.onnx.parted_transposes import part_transposes_in
from halfeven.models.errors import ExportFailed
from halfeven.models.store.store import Store

from tests.exporters.onnx.onnx_files import parsed
from tests.exporters.onnx.traps import normal
from tests.model_folders import tensor, write_folder

RUN = "import sys, numpy, onnxruntime as o; s = o.InferenceSession(sys.argv[1], providers=['CPUExecutionProvider']); s.run(None, dict(numpy.load(sys.argv[2])))"
PAIRS = {
    "left": "t = Transpose<perm=[1,0,2]>(h) z = MatMul(t, v)",
    "right": "t = Transpose<perm=[1,0]>(v) z = MatMul(h, t)",
    "two readers": "t = Transpose<perm=[1,0,2]>(h) a = MatMul(t, v) b = MatMul(t, v) z = Add(a, b)",
    "behind a cast": "t = Transpose<perm=[1,0,2]>(h) c = Cast<to=1>(t) m = MatMul(c, w) z = Cast<to=10>(m)",
    "behind an identity": "t = Transpose<perm=[1,0,2]>(h) i = Identity(t) z = MatMul(i, v)",
    "behind a scale": "t = Transpose<perm=[1,0,2]>(h) s = Mul(two, t) z = MatMul(s, v)",
    "in a body": "z = If(yes) <then_branch = one () => (float16[a,b,c] p) { t = Transpose<perm=[1,0,2]>(h) p = MatMul(t, v) }, else_branch = two () => (float16[a,b,c] q) { q = MatMul(h, v) }>",
}


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_a_half_transpose_is_parted_from_the_product_that_reads_it(pair: str, tmp_path: Path) -> None:
    text = f"g (float[s,n,16] x) => (float[a,b,c] y) {{ h = Cast<to=10>(x) {pair} y = Cast<to=1>(z) }}"
    random = np.random.default_rng()
    weights = {"v": normal(random, 16, 16).astype(np.float16), "yes": np.array(True)}
    weights |= {"w": normal(random, 16, 16), "two": np.array(2, np.float16)}
    path, x = tmp_path / "half.onnx", normal(random, 7, 3, 16)
    onnx.save(parsed(text, weights), path)
    plain = onnxruntime.SessionOptions()
    plain.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    (expected,) = onnxruntime.InferenceSession(path, plain).run(None, {"x": x})
    assert part_transposes_in(path) == (2 if pair == PAIRS["two readers"] else 1)
    assert part_transposes_in(path) == 0
    onnx.checker.check_model(str(path), full_check=True)
    (came,) = onnxruntime.InferenceSession(path, plain).run(None, {"x": x})
    assert np.array_equal(np.asarray(came), np.asarray(expected)), "not a bit changes"
    np.savez(tmp_path / "x.npz", x=x)
    done = subprocess.run(
        [sys.executable, "-c", RUN, path, tmp_path / "x.npz"], capture_output=True, text=True
    )
    assert done.returncode == 0, (done.returncode, done.stderr)


def test_an_fp32_transpose_is_left_to_the_optimiser(tmp_path: Path) -> None:
    text = "g (float[n,4,4] x) => (float[n,4,4] y) { t = Transpose<perm=[0,2,1]>(x) y = MatMul(t, v) }"
    model = onnx.shape_inference.infer_shapes(parsed(text, {"v": np.eye(4, dtype=np.float32)}))
    onnx.save(model, tmp_path / "half.onnx")
    assert part_transposes_in(tmp_path / "half.onnx") == 0


PROGRAM = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.head = nn.Parameter(torch.randn(6, 8) / 3), nn.Linear(16, 16)

    def forward(self, x):
        return torch.relu(self.head(x)).transpose(1, 2) @ self.mix

def build():
    torch.manual_seed(5)
    return Net()
"""


@pytest.mark.slow
def test_the_onnx_form_of_a_program_in_the_store_has_no_such_pair_and_runs_by_default(
    tmp_path: Path, random: np.random.Generator
) -> None:
    x = random.standard_normal((16, 6, 16)).astype(np.float32)
    folder = write_folder(
        tmp_path / "net",
        PROGRAM,
        inputs=[tensor("x", "FP32", [-1, 6, 16])],
        outputs=[tensor("y", "FP32", [-1, 16, 8])],
        samples={"x": x},
        max_batch_size=8,
    )
    half = convert(folder, Store(tmp_path / "store")).version.file("half.onnx")
    ops = [node.op_type for node in onnx.load(half).graph.node]
    assert "Transpose" in ops and part_transposes_in(half) == 0
    np.savez(tmp_path / "x.npz", x=x[:8])
    done = subprocess.run([sys.executable, "-c", RUN, half, tmp_path / "x.npz"], check=False)
    assert done.returncode == 0


@pytest.mark.slow
def test_a_file_is_run_by_default_before_it_is_handed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "g (float[n,6,16] x) => (float[n,16,8] y) { a = MatMul(x, w) r = Relu(a) t = Transpose<perm=[0,2,1]>(r) y = MatMul(t, v) }"
    random = np.random.default_rng()
    (tmp_path / "files").mkdir()
    onnx.save(
        parsed(text, {"w": normal(random, 16, 16), "v": normal(random, 6, 8)}), tmp_path / "files/net.onnx"
    )
    store = Store(tmp_path / "store")
    version = convert(tmp_path / "files/net.onnx", store).version
    assert version.manifest["half"] == "fp16", version.manifest["reason"]
    assert part_transposes_in(version.file("half.onnx")) == 0, "nor has the store's own file the pair"
    said = list[str]()
    export(version, "onnxruntime", tmp_path / "out", said.append)
    ops = [node.op_type for node in onnx.load(tmp_path / "out/half.onnx").graph.node]
    assert ops[ops.index("Transpose") + 1] == "Reshape"
    assert any("default settings" in line for line in said)
    monkeypatch.setattr(exported_folder, "_CHILD", "import os; os.kill(os.getpid(), 11)")
    with pytest.raises(
        ExportFailed, match="does not run the half with its default settings: it ends by signal 11"
    ):
        export(version, "onnxruntime", tmp_path / "again")
    assert not (tmp_path / "again").exists()
