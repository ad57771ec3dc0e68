"""Samples that can prove nothing of a half are named, and the original is served."""

from collections.abc import Callable

import numpy as np
import pytest
from halfeven.exporters.inputs.samples import Samples
from halfeven.exporters.proof.informative import note_of_sentinels, why_nothing_is_proven
from halfeven.exporters.proof.prove import ask_reference
from halfeven.exporters.question import Arrays
from halfeven.models.spec.spec import Dim, ModelSpec, TensorSpec

X, Y, Z = (TensorSpec(name, "FP32", (Dim(), Dim(4, 4))) for name in "xyz")
MASK = np.float32(-1e9)


def masked(x: np.ndarray) -> np.ndarray:
    return np.where(x < 0, MASK, np.float32(0))


@pytest.mark.parametrize(
    ("huge", "faulty"),
    [
        (lambda x: (np.abs(x) + 1) * np.float32(1e10), ["z"]),
        (lambda x: masked(x) + np.float32(-2e9), ["z"]),
        (lambda x: x * np.float32(2e9), ["z"]),
        (lambda x: masked(x) * np.float32(2) + masked(x - 1) - 100 * np.abs(x), []),
        (masked, []),
        (lambda x: np.where(x < 0, np.float32(-1e4), 8 * x), ["z"]),
        (lambda x: np.where(x < 0, np.float32(-1e8), 8 * x), ["z"]),
        (lambda x: np.where(x < 0, np.float32(-1e4), 1e4 * x), []),
        (lambda x: np.where(x < 0, np.float32(-1e9), 8 * x), []),
        (lambda x: x.astype(np.float16), []),
    ],
)
def test_an_output_of_which_the_gate_compares_no_number_proves_nothing(huge, faulty) -> None:
    def original(inputs: Arrays) -> dict[str, np.ndarray]:
        return {"y": inputs["x"], "z": huge(inputs["x"])}

    x = np.random.default_rng().standard_normal((16, 4)).astype(np.float32)
    run = ask_reference(ModelSpec("m", (X,), (Y, Z), 8), Samples({"x": x}), original)
    why = why_nothing_is_proven(run)
    assert [name for name in "yz" if f"'{name}'" in why] == faulty
    assert bool(why) is bool(faulty)


@pytest.mark.parametrize(("values", "named"), [(masked, True), (lambda x: x.astype(np.float16), False)])
def test_outputs_with_a_mask_s_values_are_named(
    values: Callable[[np.ndarray], np.ndarray], named: bool
) -> None:
    def original(inputs: Arrays) -> dict[str, np.ndarray]:
        return {"y": inputs["x"], "z": values(inputs["x"])}

    x = np.random.default_rng().standard_normal((16, 4)).astype(np.float32)
    note = note_of_sentinels(ask_reference(ModelSpec("m", (X,), (Y, Z), 8), Samples({"x": x}), original))
    assert (
        ("in output 'z' are taken for the values of a mask: a half may give other" in note)
        == named
        == bool(note)
    )


@pytest.mark.parametrize("least", [0.5, 100.0])
def test_a_detector_that_finds_nothing_in_any_sample_proves_nothing(least: float) -> None:
    """The scores are compared; the indices are not, because the detector finds none."""

    def original(inputs: Arrays) -> dict[str, np.ndarray]:
        return {"y": inputs["x"], "found": np.argwhere(inputs["x"] > least)}

    found = TensorSpec("found", "INT64", (Dim(), Dim(2, 2)))
    one = TensorSpec("x", "FP32", (Dim(4, 4),)), TensorSpec("y", "FP32", (Dim(4, 4),))
    x = np.random.default_rng(3).standard_normal((16, 4)).astype(np.float32)
    spec = ModelSpec("m", one[:1], (one[1], found), 0)
    why = why_nothing_is_proven(ask_reference(spec, Samples({"x": x}), original))
    assert ("finds nothing" in why and "'found'" in why and "'y'" not in why) == (least == 100.0), why
