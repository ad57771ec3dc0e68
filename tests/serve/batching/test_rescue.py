"""The check for finite values, for every float type, and however the values are laid out."""

import ml_dtypes
import numpy as np
import pytest
from halfeven.serve.batching.rescue import all_finite, non_finite_rows

TYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 10), (7, 5000)])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -np.nan])
def test_one_element_that_is_not_finite_is_found_wherever_it_is(
    dtype: type, shape: tuple[int, int], bad: float
) -> None:
    random = np.random.default_rng()
    array = random.standard_normal(shape).astype(dtype)
    assert all_finite(array)
    row, column = int(random.integers(shape[0])), int(random.integers(shape[1]))
    array[row, column] = bad
    assert not all_finite(array) and not all_finite(array[:, column]) and not all_finite(array.T)
    assert non_finite_rows([np.zeros((shape[0], 2), dtype), array]).tolist() == [row]


@pytest.mark.parametrize("dtype", TYPES)
def test_the_largest_numbers_are_finite_though_their_sums_and_squares_are_not(dtype: type) -> None:
    largest = ml_dtypes.finfo(dtype).max if dtype is ml_dtypes.bfloat16 else np.finfo(dtype).max
    array = np.full((4, 64), largest, dtype)
    assert all_finite(array) and all_finite(np.negative(array)) and non_finite_rows([array]).size == 0
    array[2, 3] = np.inf
    array[2, 4] = -np.inf
    assert not all_finite(array)


def test_nothing_and_a_scalar_are_finite() -> None:
    assert all_finite(np.zeros((3, 0), np.float32)) and all_finite(np.array(2.0, np.float16))
    assert not all_finite(np.array(np.nan, np.float32))
    assert non_finite_rows([np.zeros((3, 0), np.float32)]).size == 0
