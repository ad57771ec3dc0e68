"""Rounding to half without torch: as torch rounds, whatever the bits of a number are, and without a warning."""

import ml_dtypes
import numpy as np
import pytest
import torch
from halfeven.exporters.onnx.precision.oracle import to_half_and_back
from halfeven.exporters.onnx.reading.graph import HALVES
from halfeven.exporters.policy.weights import NUMPY_HALVES, in_range, measure, rounded
from halfeven.models.engines.arrays import to_torch


@pytest.fixture(params=["fp16", "bf16"])
def half(request: pytest.FixtureRequest) -> str:
    return request.param


def any_numbers(half: str) -> np.ndarray:
    """Any bits, NaN of each kind among them, and numbers in the middle of two neighbouring halves or near it."""
    bits = np.random.default_rng().integers(0, 1 << 32, 200_000, np.uint32).view(np.float32)
    infinite = int(np.array(np.inf, NUMPY_HALVES[half]).view(np.uint16))
    finite = np.arange(infinite, dtype=np.uint16).view(NUMPY_HALVES[half]).astype(np.float64)
    middle = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)
    beside = [np.nextafter(middle, np.float32(end)) for end in (0, np.inf)]
    return np.concatenate([bits, middle, -middle, *beside])


@pytest.mark.filterwarnings("error")
def test_numbers_are_rounded_as_torch_rounds_them(half: str) -> None:
    numbers = any_numbers(half)
    expected = to_torch(numbers).to(getattr(torch, NUMPY_HALVES[half].name)).float().numpy()
    np.testing.assert_array_equal(rounded(numbers, half).astype(np.float32), expected)
    np.testing.assert_array_equal(to_half_and_back(numbers, HALVES[half]), expected)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_what_vanishes_or_overflows_stays_in_range_with_its_sign(half: str, shape: tuple[int, ...]) -> None:
    limits = ml_dtypes.finfo(NUMPY_HALVES[half])
    least = float(limits.smallest_normal) * float(limits.eps)
    for sign in (1, -1):
        for number, expected in (
            (1e-45, least),
            (3.4028235e38, float(limits.max)),
            (0.0, 0.0),
            (np.inf, np.inf),
        ):
            original = np.full(shape, sign * number, np.float32)
            np.testing.assert_array_equal(in_range(original, rounded(original, half)), sign * expected)
    numbers = any_numbers(half)
    held = in_range(numbers, rounded(numbers, half)).astype(np.float32)
    np.testing.assert_array_equal(np.isnan(held), np.isnan(numbers))
    assert measure("any", numbers, half).elements == numbers.size
