"""The number of rows that fit, by a line through two runs."""

from typing import Any

import numpy as np
import pytest
import torch
from halfeven.models.engines.memory import rows_that_fit

BUCKETS = (1, 2, 4, 8, 16, 32, 64)


def fitting(free: int, fixed: int, per_row: int, buckets: tuple[int, ...] = BUCKETS) -> tuple[int, list[int]]:
    """The number of rows that was found, and the batches that were run for it."""
    ran: list[int] = []

    def measure(engine: Any, parts: Any) -> int:
        ran.append(len(parts[0][0]))
        return fixed + per_row * ran[-1]

    batch = lambda rows: [[np.zeros((rows, 2))]]  # noqa: E731
    return rows_that_fit(None, batch, buckets, free, measure), ran  # type: ignore[arg-type]


def test_the_largest_bucket_that_fits_with_a_reserve_is_found_by_two_small_runs() -> None:
    assert fitting(free=10_000, fixed=1_000, per_row=200) == (32, [1, 8])  # 32: 7,400 of 9,000; 64: 13,800
    assert fitting(free=15_333, fixed=1_000, per_row=200)[0] == 32, "13,799.7 may be used"
    assert fitting(free=15_334, fixed=1_000, per_row=200)[0] == 64
    assert fitting(free=10**9, fixed=1_000, per_row=200)[0] == 64


def test_where_hardly_anything_fits_the_smallest_is_tried_in_service() -> None:
    assert fitting(free=10, fixed=1_000, per_row=200)[0] == 1
    assert fitting(free=10, fixed=1_000, per_row=200, buckets=(4, 16))[0] == 4


def test_memory_that_does_not_grow_with_rows_limits_nothing() -> None:
    assert fitting(free=2_000, fixed=1_000, per_row=0)[0] == 64


def test_one_bucket_is_measured_once() -> None:
    assert fitting(free=100, fixed=10, per_row=10, buckets=(4,)) == (4, [4])


def test_running_out_while_measuring_says_the_smallest_and_other_errors_are_raised() -> None:
    def fails(error: BaseException) -> int:
        def measure(engine: Any, parts: Any) -> int:
            if len(parts[0][0]) > 1:
                raise error
            return 100

        return rows_that_fit(None, lambda rows: [[np.zeros((rows, 2))]], BUCKETS, 10**9, measure)  # type: ignore[arg-type]

    assert fails(torch.OutOfMemoryError("CUDA out of memory")) == 1
    with pytest.raises(ValueError, match="not about memory"):
        fails(ValueError("not about memory"))
