"""The sizes of batches; filling up and cutting lose no row."""

import numpy as np
from halfeven.serve.batching.padding import filled, filled_rows, largest_within, rows_between
from hypothesis import given, settings
from hypothesis import strategies as st


def test_a_batch_is_filled_to_the_next_bucket_that_memory_allows() -> None:
    assert [filled_rows((2, 8), rows, 99) for rows in (1, 2, 3, 8, 9)] == [2, 2, 8, 8, 9]
    assert filled_rows((2, 8), 3, 4) == 3
    assert (largest_within((2, 8), 7), largest_within((2, 8), 1), largest_within((), 5)) == (2, 1, 5)


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=8), data=st.data())
def test_rows_are_cut_out_as_they_would_be_of_the_joined_batch(sizes: list[int], data: st.DataObject) -> None:
    random = np.random.default_rng()
    parts = [[random.random((n, 2)) for n in sizes], [random.integers(0, 9, (n,)) for n in sizes]]
    start = data.draw(st.integers(0, sum(sizes) - 1))
    stop = data.draw(st.integers(start + 1, sum(sizes)))
    for part, cut in zip(parts, rows_between(parts, start, stop), strict=True):
        np.testing.assert_array_equal(np.concatenate(cut), np.concatenate(part)[start:stop])
        assert all(any(np.shares_memory(piece, array) for array in part) for piece in cut)


def test_what_fills_a_batch_up_is_a_row_of_its_own() -> None:
    parts = [[np.arange(6.0).reshape(2, 3), np.ones((1, 3))], [np.array([7, 8]), np.array([9])]]
    x, n = [np.concatenate(part) for part in filled(parts, 2)]
    assert x[:3].tolist() == [[0, 1, 2], [3, 4, 5], [1, 1, 1]] and x[3:].tolist() == [[0, 1, 2]] * 2
    assert n.tolist() == [7, 8, 9, 7, 7]
    assert filled(parts, 0) is parts
