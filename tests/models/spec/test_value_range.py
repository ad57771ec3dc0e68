"""The values of an integer input, held against its range."""

import tracemalloc

import numpy as np
import pytest
from halfeven.models.spec.value_range import ValueRange

INTEGERS = [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64]
EXTREMES = [0, 1, -1, 127, 255, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1]


@pytest.mark.parametrize("datatype", INTEGERS)
def test_every_integer_is_compared_exactly_with_the_ends_of_its_column(datatype: type[np.integer]) -> None:
    limits = np.iinfo(datatype)
    values = [value for value in EXTREMES if limits.min <= value <= limits.max]
    for low in EXTREMES:
        for high in EXTREMES:
            found = ValueRange((low, 0), (high, 0)).outside(np.array([[v, 0] for v in values], datatype))
            assert found[:, 0].tolist() == [not low <= value <= high for value in values], (low, high)
            assert not found[:, 1].any()


def test_the_first_bad_integer_is_found_without_a_list_of_all() -> None:
    array = np.full((2**9, 2**8), 7)
    array[0, :3] = 0
    for valid in (ValueRange((0,), (6,)), ValueRange((0,) * 2**8, (6,) * 2**8)):
        tracemalloc.start()
        fault = valid.fault(array)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert fault is not None and fault.endswith("must lie in 0..6, got 7 at [0, 3]")
        assert most < array.nbytes / 2
