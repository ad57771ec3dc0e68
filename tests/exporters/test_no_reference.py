"""An FP32 model that draws numbers or rounds to whole steps is no reference, and the nodes that do so are named."""

# ruff: noqa: E501  (graphs in their own lines)

from pathlib import Path

import numpy as np
import onnx
import pytest
from halfeven.exporters.no_reference import DRAWS, ROUNDS, named

from tests.exporters.onnx.onnx_files import parsed
from tests.exporters.onnx.traps import normal
from tests.serve.cli.test_main import run


def reason(
    path: Path, text: str, weights: dict[str, np.ndarray], shape: tuple[int, ...], opset: int = 17
) -> tuple[str, str]:
    """Why FP32 serves, and the notes."""
    onnx.save(parsed(text, weights, opset), path / "net.onnx")
    np.savez(path / "samples.npz", x=normal(np.random.default_rng(), 64, *shape))
    words = ("--samples", path / "samples.npz", "--store", path / "store")
    code, facts, said = run("convert", path / "net.onnx", *words)
    assert code == 0, said
    return facts["forms"]["onnx"].get("original_because", ""), " ".join(facts["notes"])


@pytest.mark.parametrize(
    ("node", "op"),
    [
        ("e = RandomNormalLike<dtype=1>(h)", "RandomNormalLike"),
        ("e = RandomUniformLike<dtype=1>(h)", "RandomUniformLike"),
        ("e, gone = Dropout(h, share, yes)", "Dropout in training"),
        ("p = Sigmoid(h) e = Bernoulli<dtype=1>(p)", "Bernoulli"),
    ],
    ids=lambda each: each.split("(")[0],
)
def test_a_node_that_draws_numbers_is_named(node: str, op: str, tmp_path: Path) -> None:
    text = f"g (float[n,16] x) => (float[n,8] y) {{ h = MatMul(x, w) {node} t = Add(h, e) y = MatMul(t, v) }}"
    random = np.random.default_rng()
    weights = {
        "w": normal(random, 16, 16),
        "v": normal(random, 16, 8),
        "share": np.float32(0.5),
        "yes": np.array(True),
    }
    why, notes = reason(tmp_path, text, weights, (16,))
    assert "random numbers are drawn by node" in why and f"({op})" in why
    assert "max_batch_size: not batched" not in notes or f"({op})" in notes


def test_quantizers_between_layers_are_named(tmp_path: Path) -> None:
    text = "g (float[n,3,16,16] x) => (float[n,5] y) { c = Conv<pads=[1,1,1,1]>(x, k) r = Relu(c) q = QuantizeLinear(r, s, z) e = DequantizeLinear(q, s, z) d = Conv<pads=[1,1,1,1]>(e, k2) r2 = Relu(d) q2 = QuantizeLinear(r2, s, z) e2 = DequantizeLinear(q2, s, z) m = GlobalAveragePool(e2) f = Flatten(m) y = MatMul(f, w) }"
    random = np.random.default_rng()
    weights = {
        "s": np.float32(0.04),
        "z": np.int8(-128),
        "k": normal(random, 16, 3, 3, 3) * 0.3,
        "k2": normal(random, 16, 16, 3, 3) * 0.1,
        "w": normal(random, 16, 5) * 0.3,
    }
    why, _ = reason(tmp_path, text, weights, (3, 16, 16))
    assert not why or "(QuantizeLinear)" in why, "a half that passes all the same is proven"


def test_at_most_three_nodes_are_named() -> None:
    nodes = [(f"n{number}", "bernoulli") for number in range(5)]
    assert named(nodes, DRAWS) == "nodes 'n0' (bernoulli), 'n1' (bernoulli), 'n2' (bernoulli) and 2 more"
    assert named([("one", "randn_like"), ("two", "relu")], DRAWS) == "node 'one' (randn_like)"
    assert named([("one", "fake_quantize_per_tensor_affine_cachemask")], ROUNDS) and not named(nodes, ROUNDS)
