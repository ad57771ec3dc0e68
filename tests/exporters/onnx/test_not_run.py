"""Inputs with which an ONNX file does not run: given ones are refused in a sentence, generated ones are left out or made
smaller. No error of ONNX Runtime reaches the user."""

# ruff: noqa: E501  (graphs in their own lines)

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from halfeven.exporters.inputs.synthetic import adversarial, generate
from halfeven.models.spec.spec import Dim, ModelSpec, TensorSpec
from onnx import ModelProto
from safetensors.numpy import save_file

from tests.command_line import run
from tests.exporters.onnx.onnx_files import parsed
from tests.exporters.onnx.traps import normal

POSITIONS = "g (float[n,t,8] x) => (float[n,t,8] y) { s = Shape<start=1,end=2>(x) p = Slice(places, zero, s, zero) a = Add(x, p) y = MatMul(a, w) }"
BRANCH = "g (int64[n,t] ids, bool c) => (float[n,t,8] y) { y = If(c) <then_branch = a () => (float[n,t,8] p) { p = Gather(table, ids) }, else_branch = e () => (float[n,t,8] p) { q = Gather(table, ids) p = Neg(q) }> }"
START = "g (float[n,16] x, int64 start) => (float[n,k] y) { s = Unsqueeze(start, zero) h = Slice(x, s, end, one) y = Tanh(h) }"


def convert(path: Path, model: ModelProto, *words: object) -> tuple[int, dict[str, Any], str]:
    onnx.save(model, path / "net.onnx")
    return run("convert", path / "net.onnx", "--store", path / "store", *words)


def table(rows: int) -> dict[str, np.ndarray]:
    return {"table": normal(np.random.default_rng(), rows, 8)}


@pytest.mark.slow
def test_a_length_that_the_file_has_no_places_for_is_not_asked(tmp_path: Path) -> None:
    """Twice the usual length is asked where a size is free."""
    random = np.random.default_rng()
    weights = {"places": normal(random, 20, 8), "w": normal(random, 8, 8), "zero": np.array([0])}
    code, facts, said = convert(tmp_path, parsed(POSITIONS, weights))
    assert code == 0 and facts["forms"]["onnx"]["half_nodes"] > 0, said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "weights", "found"),
    [
        (BRANCH, table(49), "0 to 31"),
        (BRANCH, table(8), "0 to 7"),
        (BRANCH, table(5), "1"),
        (START, {"zero": np.array([0]), "one": np.array([1]), "end": np.array([16])}, "0 to 7"),
    ],
    ids=["49 rows of a table in a branch", "8 rows", "5 rows", "where a cut starts"],
)
def test_generated_integers_are_small_where_the_file_does_not_run_with_larger_ones(
    text: str, weights: dict[str, np.ndarray], found: str, tmp_path: Path
) -> None:
    code, facts, said = convert(tmp_path, parsed(text, weights))
    assert code == 0, said
    assert any(note.startswith(f"all generated integers are {found}:") for note in facts["notes"]), facts[
        "notes"
    ]


def test_given_samples_that_the_file_does_not_run_with_are_refused(tmp_path: Path) -> None:
    save_file({"ids": np.full((4, 2, 3), 7), "c": np.ones(4, bool)}, tmp_path / "s.safetensors")
    code, _, said = convert(tmp_path, parsed(BRANCH, table(5)), "--samples", tmp_path / "s.safetensors")
    assert (
        code == 2 and "does not run with the first of the samples given" in said and "Traceback" not in said
    )


def test_an_adversarial_scalar_has_no_axes() -> None:
    spec = ModelSpec(
        "m", (TensorSpec("x", "FP32", (Dim(),)), TensorSpec("start", "INT64", ())), (), max_batch_size=0
    )
    assert {inputs["start"].shape for _, inputs in adversarial(spec, generate(spec, 4))} == {()}
