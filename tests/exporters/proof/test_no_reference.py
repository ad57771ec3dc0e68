"""An FP32 model that draws numbers or rounds to whole steps is no reference, and the nodes that do so are named."""

# ruff: noqa: E501  (graphs in their own lines)

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from halfeven.exporters.conversion.road import travel
from halfeven.exporters.inputs.samples import Samples
from halfeven.exporters.proof.no_reference import DRAWS, ROUNDS, named, why_unstable
from halfeven.exporters.proof.subject import Subject
from halfeven.exporters.torch.forms import ProgramForms
from halfeven.models.store.store import Store
from torch import Tensor

from tests.command_line import run
from tests.conversions import as_subject
from tests.corpus.case import linear, net
from tests.exporters.onnx.onnx_files import parsed
from tests.exporters.onnx.traps import normal
from tests.programs import Original, original
from tests.slow import drawn


def reason(
    path: Path, text: str, weights: dict[str, np.ndarray], shape: tuple[int, ...], opset: int = 17
) -> tuple[str, str]:
    """The reason why FP32 serves, and the notes."""
    onnx.save(parsed(text, weights, opset), path / "net.onnx")
    np.savez(path / "samples.npz", x=normal(np.random.default_rng(), 64, *shape))
    words = ("--samples", path / "samples.npz", "--store", path / "store")
    code, facts, said = run("convert", path / "net.onnx", *words)
    assert code == 0, said
    return facts["forms"]["onnx"].get("original_because", ""), " ".join(facts["notes"])


@pytest.mark.slow
def test_a_normalisation_in_training_is_named(tmp_path: Path) -> None:
    text = """g (float[n,3,8,8] x) => (float[n,5] y) { h = Conv<kernel_shape=[3,3]>(x, k)
        e, means, spreads = BatchNormalization<training_mode=1>(h, one, zero, zero, one) r = Relu(e)
        a = GlobalAveragePool(r) f = Flatten(a) y = MatMul(f, v) }"""
    random, ones = np.random.default_rng(), np.ones(4, np.float32)
    weights = {"k": normal(random, 4, 3, 3, 3), "v": normal(random, 4, 5), "one": ones, "zero": 0 * ones}
    why, _ = reason(tmp_path, text, weights, (3, 8, 8))
    assert "(BatchNormalization in training) computes with the mean of the batch" in why


DRAWING = [
    ("e = RandomNormalLike<dtype=1>(h)", "RandomNormalLike"),
    ("e = RandomUniformLike<dtype=1>(h)", "RandomUniformLike"),
    ("e, gone = Dropout(h, share, yes)", "Dropout in training"),
    ("p = Sigmoid(h) e = Bernoulli<dtype=1>(p)", "Bernoulli"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("node", "op"), drawn(2, DRAWING), ids=lambda each: each.split("(")[0])
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


@pytest.mark.slow
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


def asked(made: Original, **inputs: Tensor) -> Subject:
    return as_subject(made, Samples({name: tensor.numpy() for name, tensor in inputs.items()}))


def unstable(subject: Subject) -> str:
    """The reason why the noise of FP32 lets nothing of a half be promised."""
    maker = ProgramForms(subject)
    run = maker.reference_run(subject.samples.split()[1])
    return why_unstable(run, "fp16", maker.original_graph(), maker.operations_by_name())


@pytest.mark.slow
@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("accepted", [False, True])
def test_an_output_above_64u_of_fp32_s_own_noise_is_not_promised_unless_the_folder_accepts_it(
    grows: bool, accepted: bool, tmp_path: Path
) -> None:
    """A sum of large numbers that cancel: what is left hangs on the order in which they are added up."""

    def forward(self: Any, x: Tensor) -> Tensor:
        hidden = self.one(x)
        return self.two((hidden + far) - far)

    far = 1e7 if grows else 30.0
    made = original(net(forward, one=linear(32, 16), two=linear(16, 8)), {"x": torch.randn(8, 32)})
    limits = replace(made.spec.parity, unstable="accept" if accepted else "fp32")
    made = replace(made, spec=replace(made.spec, parity=limits))
    subject = asked(made, x=torch.randn(32, 32))
    if not grows or accepted:
        assert not unstable(subject)
        return
    version = travel(subject, ProgramForms(subject), Store(tmp_path), lambda _: None)
    reason = version.manifest["reason"]
    assert "is no reference for output 'y0'" in reason and version.manifest["half"] is None
    assert "born at node 'sub'" in reason and 'unstable = "accept"' in reason


@pytest.mark.slow(seconds=4)
@pytest.mark.parametrize("masked", [-1e9, -3e38])
@pytest.mark.parametrize("fused", [False, True])
def test_a_score_that_a_mask_makes_vanish_in_fp32_is_no_noise(fused: bool, masked: float) -> None:
    """FP32 keeps no score of a row that is masked whole, in whatever order it adds up; FP64 would keep all of them."""

    def forward(self: Any, x: Tensor, keep: Tensor) -> Tensor:
        rows, mask = self.one(x), ((1 - keep) * masked)[:, None]
        if fused:
            return self.two(
                torch.nn.functional.scaled_dot_product_attention(rows, rows, rows, attn_mask=mask)
            )
        return self.two(torch.softmax(rows @ rows.transpose(1, 2) + mask, -1) @ rows)

    inputs = {"x": 4 * torch.randn(32, 6, 32), "keep": (torch.rand(32, 6) > 0.5).float()}
    inputs["keep"][::3] = 0.0
    made = original(
        net(forward, one=linear(32, 16), two=linear(16, 8)), {n: t[:8] for n, t in inputs.items()}
    )
    assert not unstable(asked(made, **inputs))


def test_at_most_three_nodes_are_named() -> None:
    nodes = [(f"n{number}", "bernoulli") for number in range(5)]
    assert named(nodes, DRAWS) == "nodes 'n0' (bernoulli), 'n1' (bernoulli), 'n2' (bernoulli) and 2 more"
    assert named([("one", "randn_like"), ("two", "relu")], DRAWS) == "node 'one' (randn_like)"
    assert named([("one", "fake_quantize_per_tensor_affine_cachemask")], ROUNDS) and not named(nodes, ROUNDS)
