"""Axes moved to the front and back: sizes and arrays agree, and one is the inverse of the other."""

import itertools

import numpy as np
import pytest
from halfeven.models.spec.batch_axis import array_batch_back, array_batch_first, batch_back, batch_first
from halfeven.models.spec.spec import Dim, ModelSpec, TensorSpec

EVERY_AXIS = [(rank, axis) for rank in (1, 2, 4) for axis in range(rank)]


@pytest.mark.parametrize(("rank", "axis"), EVERY_AXIS)
def test_sizes_and_arrays_move_alike_and_back_again(rank: int, axis: int) -> None:
    array = np.random.default_rng().standard_normal(tuple(range(2, 2 + rank)))
    moved = array_batch_first(array, axis)
    assert moved.shape == batch_first(array.shape, axis) and moved.shape[0] == array.shape[axis]
    assert moved.flags.c_contiguous
    assert batch_back(moved.shape, axis) == array.shape
    np.testing.assert_array_equal(array_batch_back(moved, axis), array)


def test_a_batch_of_one_is_moved_without_a_copy() -> None:
    array = np.zeros((3, 1, 5))
    assert np.shares_memory(array_batch_first(array, 1), array)


STATE = TensorSpec("h", "FP32", (Dim(), Dim(2, 2), Dim(8, 8)), batch_axis=1)
ROWS = TensorSpec("x", "FP32", (Dim(), Dim(4, 4)))


def test_a_spec_keeps_its_batch_axis_and_shows_shapes_as_the_model_has_them() -> None:
    spec = ModelSpec("m", (ROWS, STATE), (STATE,), 4)
    assert ModelSpec.from_json(spec.to_json()) == spec
    assert STATE.wire_shape == [2, -1, 8] and STATE.as_called().describe_shape() == "[2,-1,8]"
    assert spec.as_called().inputs[0] is ROWS
    assert spec.batch_axes == {"inputs": {"h": 1}, "outputs": {"h": 1}}


def test_callers_rely_on_the_batch_axis() -> None:
    def signature(axis: int) -> object:
        free = TensorSpec("h", "FP32", (Dim(), Dim()), batch_axis=axis)
        return ModelSpec("m", (free,), (ROWS,), 4).signature()

    assert len({repr(signature(axis)) for axis in itertools.chain(range(2), range(2))}) == 2
