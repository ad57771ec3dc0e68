"""Inputs of lengths: guessed of a file, drawn no longer than what they are of, and refused where a caller's are longer."""

# ruff: noqa: E501  (graphs in their own lines)

from pathlib import Path

import httpx
import numpy as np
import onnx
import pytest
from halfeven.exporters.guessing.onnx_file import guess_onnx
from halfeven.exporters.inputs.perturbed import perturbed
from halfeven.exporters.inputs.samples import checked_samples
from halfeven.exporters.inputs.synthetic import adversarial, generate
from halfeven.models.errors import BadFolder, BadRequest, BadSamples
from halfeven.models.folder.package import parse_folder
from halfeven.models.spec.spec import Dim, ModelSpec, TensorSpec
from onnx import ModelProto

from tests.command_line import run
from tests.conformance.conftest import served
from tests.exporters.onnx.onnx_files import parsed
from tests.exporters.onnx.traps import normal

RECURRENT = "g (float[batch,seq,4] x, int64[batch] counts) => (float[batch,seq,5] y) { t = Transpose<perm=[1,0,2]>(x) c = Cast<to=6>(counts) o, last = GRU<hidden_size=5>(t, w, r, , c) s = Squeeze(o, one) y = Transpose<perm=[1,0,2]>(s) }"
NAMED = "g (float[batch,seq,4] x, float[batch,more,4] z, int64[batch] x_lens) => (float[batch,seq,4] y) { f = CastLike(x_lens, x) u = Unsqueeze(f, axes) s = ReduceSum<keepdims=1>(z, one) t = Mul(s, zero) a = Add(x, t) y = Mul(a, u) }"


def recurrent(random: np.random.Generator) -> ModelProto:
    weights = {"w": normal(random, 1, 15, 4), "r": normal(random, 1, 15, 5), "one": np.array([1])}
    return parsed(RECURRENT, weights)


def spec_of(lengths: str = "seq") -> ModelSpec:
    x = TensorSpec("x", "FP32", (Dim(), Dim(name="seq"), Dim(4, 4)))
    counts = TensorSpec("counts", "INT64", (Dim(),), lengths_of=lengths)
    return ModelSpec("net", (x, counts), (TensorSpec("y", "FP32", x.shape),), max_batch_size=8)


def test_what_a_recurrent_layer_takes_for_lengths_is_guessed_to_be_lengths(
    tmp_path: Path, random: np.random.Generator
) -> None:
    onnx.save(recurrent(random), tmp_path / "net.onnx")
    guess = guess_onnx(tmp_path / "net.onnx")
    assert [tensor.lengths_of for tensor in guess.spec.inputs] == ["", "seq"]
    assert "counts lengths_of: a recurrent layer takes it for the lengths of its rows" in guess.reasons
    folder = parse_folder(guess.toml(), tmp_path / "model.toml")
    assert folder.spec.inputs == guess.spec.inputs


@pytest.mark.slow
def test_lengths_by_name_are_of_the_input_that_their_name_begins_with(tmp_path: Path) -> None:
    zeros = {"zero": np.array([0], np.float32), "one": np.array([1]), "axes": np.array([1, 2])}
    onnx.save(parsed(NAMED, zeros), tmp_path / "net.onnx")
    (lengths,) = [
        tensor for tensor in guess_onnx(tmp_path / "net.onnx").spec.inputs if tensor.name == "x_lens"
    ]
    assert lengths.lengths_of == "seq"


def test_drawn_lengths_are_within_what_they_are_of(random: np.random.Generator) -> None:
    spec = spec_of()
    samples = generate(spec, 32, seed=int(random.integers(1 << 30)))
    size, lengths = samples.arrays["x"].shape[1], samples.arrays["counts"]
    assert lengths.min() >= 1 and lengths.max() == size
    assert len(set(lengths)) > 1 or size == 2, "of an axis of two only, every row may have its whole length"
    for moved in perturbed(spec, samples, copies=3):
        assert (moved.arrays["counts"] == lengths).all()
    odd = dict(adversarial(spec, samples))
    assert odd["padded masks"]["counts"][0] == 1
    for arrays in odd.values():
        spec.check_inputs(arrays)


def test_lengths_that_are_too_long_are_refused_by_name() -> None:
    spec = spec_of()
    x = np.zeros((2, 3, 4), np.float32)
    assert spec.check_inputs({"x": x, "counts": np.array([3, 1])}) == 2
    for wrong in ([3, 4], [0, 1]):
        with pytest.raises(BadRequest, match=r"'counts' .* 1\.\.3, got \d at .*lengths of 'seq'"):
            spec.check_inputs({"x": x, "counts": np.array(wrong)})
        with pytest.raises(BadSamples, match=r"'counts': values must lie in 1\.\.3"):
            checked_samples({"x": x, "counts": np.array(wrong)}, spec)
    assert ModelSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('lengths_of = "nothing"', "expected the name of an axis of another input"),
        ('lengths_of = "seq"\nrange = [1, 9]', "an input of integers that has no range"),
    ],
)
def test_lengths_of_nothing_are_refused(line: str, words: str, tmp_path: Path) -> None:
    text = f"""
name = "net"
source = "net.onnx"
max_batch_size = 8
[[inputs]]
name = "x"
datatype = "FP32"
shape = [-1, "seq", 4]
[[inputs]]
name = "counts"
datatype = "INT64"
shape = [-1]
{line}
[[outputs]]
name = "y"
datatype = "FP32"
shape = [-1, "seq", 5]
"""
    (tmp_path / "net.onnx").touch()
    with pytest.raises(BadFolder, match=words):
        parse_folder(text, tmp_path / "model.toml")


@pytest.mark.slow
def test_a_recurrent_net_with_lengths_is_converted_bare_and_refuses_longer_ones(
    tmp_path: Path, random: np.random.Generator
) -> None:
    onnx.save(recurrent(random), tmp_path / "net.onnx")
    code, _, said = run("convert", tmp_path / "net.onnx", "--store", tmp_path / "store")
    assert code == 0, said
    with served(tmp_path / "store", ["net"]) as server, server.client() as http:

        def ask(length: int) -> httpx.Response:
            x = {"name": "x", "shape": [1, 3, 4], "datatype": "FP32", "data": [0.5] * 12}
            counts = {"name": "counts", "shape": [1], "datatype": "INT64", "data": [length]}
            return http.post("/v2/models/net/infer", json={"inputs": [x, counts]})

        assert ask(3).status_code == 200 and ask(1).status_code == 200
        refused = ask(4)
        assert refused.status_code == 400 and "lengths of 'seq'" in refused.json()["error"]
        described = http.get("/v2/models/net").json()["inputs"]
        assert described[1]["parameters"] == {"lengths_of": "seq"}
