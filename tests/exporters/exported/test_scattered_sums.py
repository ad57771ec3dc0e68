"""ScatterElements and ScatterND that add answer as ONNX Runtime's, with operations that TensorRT has."""

from collections.abc import Mapping
from itertools import product
from pathlib import Path

import numpy as np
import onnx
import pytest
from halfeven.exporters.exported import scattered_sums

from tests.exporters.exported.rewritten_files import TYPES, Array, File, drawn, is_rewritten

NODES = {
    "elements": 'ScatterElements<axis={axis}, reduction="{reduction}">',
    "slices": 'ScatterND<reduction="{reduction}">',
}


def scatter(
    folder: Path,
    inputs: Mapping[str, Array],
    axis: int | None = None,
    reduction: str = "add",
    known: bool = False,
) -> File:
    """A ScatterElements, without ``axis`` a ScatterND. Sizes are free, so that only the samples show them, unless they
    are ``known``."""
    names = {np.dtype(type_): name for name, type_ in TYPES.items()}

    def stated(name: str) -> str:
        shape = inputs[name].shape
        sizes = [
            *(str(size) if known else f"{name}{place}" for place, size in enumerate(shape[:-1])),
            *shape[-1:],
        ]
        kind = names[inputs[name].dtype]
        return f"{kind}[{','.join(map(str, sizes))}] {name}" if sizes else f"{kind} {name}"

    given = ", ".join(map(stated, inputs))
    node = NODES["slices" if axis is None else "elements"].format(axis=axis, reduction=reduction)
    free = ",".join(f"y{place}" for place in range(inputs["data"].ndim))
    kind = names[inputs["data"].dtype]
    return File(folder, f"main ({given}) => ({kind}[{free}] y) {{ y = {node}(data, indices, updates) }}")


def elements(
    random: np.random.Generator, rows: int, axis: int, type_: str = "float", fewer: bool = False
) -> dict[str, Array]:
    """Indices repeat, and about half of them count from the end. ``fewer``: not up to the end of other axes."""
    whole = (rows, 5, 6)
    shape = [max(size - fewer, 1) for size in whole]
    shape[axis] = 7
    indices = random.integers(-whole[axis], whole[axis], shape)
    return {
        "data": drawn(random, whole, type_), "indices": indices, "updates": drawn(random, shape, type_)
    }  # fmt: skip


def by_hand(data: Array, indices: Array, updates: Array, axis: int) -> Array:
    """The sums, added up in FP64 and rounded at the end."""
    places = [indices if each == axis else place for each, place in enumerate(np.indices(indices.shape))]
    sums = data.astype(np.float64)
    np.add.at(sums, tuple(places), updates.astype(np.float64))
    return sums.astype(data.dtype)


@pytest.mark.parametrize("type_", ["float", "double", "int64", "int32"])
@pytest.mark.parametrize("axis", [0, 1, 2, -2])
def test_elements_are_added_as_onnx_runtime_adds_them(
    type_: str, axis: int, tmp_path: Path, random: np.random.Generator
) -> None:
    for rows, fewer, known in product([1, 4], [False, True], [False, True]):
        inputs = elements(random, rows, axis, type_, fewer)
        inputs["indices"] = inputs["indices"].astype(np.int32 if known else np.int64)
        file = scatter(tmp_path, inputs, axis, known=known)
        before = file.answer(inputs)
        assert is_rewritten(file.rewrite(inputs)) and "ScatterElements" not in file.operations
        after = file.answer(inputs)
        assert after.dtype == before.dtype and after.shape == before.shape
        assert np.allclose(after, before, rtol=0, atol=0 if "int" in type_ else 1e-5)


@pytest.mark.parametrize("type_", ["float", "double", "int64", "int32"])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("before", [(), (4,), (2, 3)])
def test_slices_are_added_as_onnx_runtime_adds_them(
    type_: str, depth: int, before: tuple[int, ...], tmp_path: Path, random: np.random.Generator
) -> None:
    """``depth``: how many axes an index names. ``before``: the axes of the updates before those of a slice."""
    for rows, known in product([1, 3], [False, True]):
        whole = (rows, 2, 3)
        tuples = [random.integers(-size, size, before) for size in whole[:depth]]
        inputs = {
            "data": drawn(random, whole, type_),
            "indices": np.stack(tuples, -1).astype(np.int64),
            "updates": drawn(random, (*before, *whole[depth:]), type_),
        }
        file = scatter(tmp_path, inputs, known=known)
        expected = file.answer(inputs)
        assert is_rewritten(file.rewrite(inputs)) and "ScatterND" not in file.operations
        came = file.answer(inputs)
        assert came.dtype == expected.dtype and came.shape == expected.shape
        assert np.allclose(came, expected, rtol=0, atol=0 if "int" in type_ else 1e-5)


def test_a_half_is_added_up_in_fp32_and_rounded_once(tmp_path: Path, random: np.random.Generator) -> None:
    """ONNX Runtime adds no halves. One by one in FP16, 2,048 + 0.9 + 0.9 … stays 2,048."""
    inputs: dict[str, Array] = {
        "data": np.full((2, 3, 4), 2048, np.float16),
        "indices": np.ones((2, 8, 4), np.int64),
        "updates": np.full((2, 8, 4), 0.9, np.float16),
    }
    file = scatter(tmp_path, inputs, 1)
    assert is_rewritten(file.rewrite(inputs, 8))
    came = file.answer(inputs)
    assert came.dtype == np.float16 and np.all(came[:, 1] == 2056) and np.all(came[:, [0, 2]] == 2048)
    inputs = elements(random, 3, 1, "float16")
    file = scatter(tmp_path, inputs, 1)
    assert is_rewritten(file.rewrite(inputs, 8))
    assert np.allclose(file.answer(inputs), by_hand(**inputs, axis=1), rtol=2**-10, atol=2**-20)


def test_what_is_not_finite_stays_where_it_was(tmp_path: Path, random: np.random.Generator) -> None:
    inputs = elements(random, 2, 1)
    inputs["updates"][0, 2, 1], inputs["updates"][1, 3, 0], inputs["updates"][1, 6, 2] = (
        np.inf,
        -np.inf,
        np.nan,
    )
    file = scatter(tmp_path, inputs, 1)
    before = file.answer(inputs)
    assert np.isfinite(before).sum() == before.size - 3 and is_rewritten(file.rewrite(inputs, 8))
    assert np.allclose(file.answer(inputs), before, atol=1e-5, equal_nan=True)


# Sizes of the indices before an Expand repeats them, those of the updates, the axis, and whether the Expand is undone.
EXPANDED = {
    "for each feature": ((3, 7, 1), (3, 7, 6), 1, True),
    "for each row and feature": ((1, 7, 1), (3, 7, 6), 1, True),
    "of a lower rank": ((7, 1), (3, 7, 6), 1, True),
    "for each row": ((1, 5, 7), (3, 5, 7), 2, True),
    "along the axis itself": ((3, 1, 6), (3, 7, 6), 1, False),
    "along the axis itself and for each feature": ((3, 1, 1), (3, 7, 6), 1, False),
}


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("case", EXPANDED)
def test_indices_that_an_expand_repeats_are_compared_once(
    case: str, large: bool, tmp_path: Path, random: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``large``: too many elements for a sum over updates and places, so that it is a product of matrices."""
    shape, given, axis, undone = EXPANDED[case]
    whole = (3, 5, 6)
    inputs = {
        "data": drawn(random, whole),
        "ids": random.integers(-whole[axis], whole[axis], shape),
        "updates": drawn(random, given),
    }
    ids, updates = (",".join(map(str, sizes)) for sizes in (shape, given))
    node = f'ScatterElements<axis={axis}, reduction="add">(data, many, updates)'
    text = f"(float[3,5,6] data, int64[{ids}] ids, float[{updates}] updates) => (float[3,5,6] y)"
    file = File(tmp_path, f"main {text} {{ size = Shape(updates) many = Expand(ids, size) y = {node} }}")
    before = file.answer(inputs)
    if large:
        monkeypatch.setattr(scattered_sums, "LARGEST", int(np.prod(given)) * whole[axis] - 1)
    assert is_rewritten(file.rewrite(inputs)) == (undone or not large)
    assert np.allclose(file.answer(inputs), before, atol=1e-5)
    assert ("MatMul" in file.operations) == (large and undone)
    assert ("Expand" in file.operations) == (not undone)


def test_slices_of_many_elements_are_added_as_a_product_of_floats_alone(
    tmp_path: Path, random: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scattered_sums, "LARGEST", 3 * 4)  # places and tuples
    for type_ in ("float", "int64"):
        inputs = {
            "data": drawn(random, (3, 6), type_),
            "indices": random.integers(-3, 3, (4, 1)),
            "updates": drawn(random, (4, 6), type_),
        }
        file = scatter(tmp_path, inputs)
        before, (found,) = file.answer(inputs), file.rewrite(inputs)
        assert ("would have 72 elements, more than 12" in found.left_because) == (type_ == "int64")
        assert ("MatMul" in file.operations) == (type_ == "float")
        assert np.allclose(file.answer(inputs), before, atol=1e-5)


def test_what_the_largest_batch_needs_is_known_from_two_rows(
    tmp_path: Path, random: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tuples that name the row: with twice the rows there are twice the places and twice the tuples."""
    monkeypatch.setattr(scattered_sums, "LARGEST", 8 * 5 * 8 * 4)
    ids = random.integers(0, 5, (6, 4))
    text = (
        "main (int64[n,4] ids, float[n,4] x) => (float[n,5] y)"
        " <int64 zero = {0}, int64 one = {1}, int64[1] last = {-1}, int64[1] five = {5}, float none = {0}>"
        " { rows = Shape<end=1>(ids) count = Squeeze(rows)"
        " numbers = Range(zero, count, one) column = Unsqueeze(numbers, last) size = Shape(ids)"
        " many = Expand(column, size) first = Unsqueeze(many, last) second = Unsqueeze(ids, last)"
        " tuples = Concat<axis=-1>(first, second) sizes = Concat<axis=0>(rows, five) data = Expand(none, sizes)"
        ' y = ScatterND<reduction="add">(data, tuples, x) }'
    )
    inputs = {"ids": ids, "x": drawn(random, (6, 4))}
    for rows, fits in ((9, False), (8, True)):
        file = File(tmp_path, text)
        before, (found,) = file.answer(inputs), file.rewrite(inputs, rows)
        assert is_rewritten([found]) == fits, found
        assert fits or "would have 1620 elements, more than 1280" in found.left_because
        assert np.allclose(file.answer(inputs), before, atol=1e-6)


@pytest.mark.slow
def test_one_in_a_body_is_rewritten_where_its_sizes_are_fixed(
    tmp_path: Path, random: np.random.Generator
) -> None:
    for sizes, fixed in (("3,5", True), ("n,5", False)):
        add = 'z = ScatterElements<axis=1, reduction="add">(more, ids, x)'
        text = (
            f"main (bool ask, float[{sizes}] data, int64[{sizes}] ids, float[{sizes}] x) => (float[{sizes}] y)"
            f" {{ y = If(ask) <then_branch = first () => (float[{sizes}] z) {{ more = Neg(data) {add} }},"
            f" else_branch = second () => (float[{sizes}] w) {{ w = Identity(data) }}> }}"
        )
        file = File(tmp_path, text)
        inputs = {
            "ask": np.array(True), "data": drawn(random, (3, 5)),
            "ids": random.integers(-5, 5, (3, 5)), "x": drawn(random, (3, 5)),
        }  # fmt: skip
        before, (found,) = file.answer(inputs), file.rewrite(inputs)
        assert is_rewritten([found]) == fixed
        assert fixed or "sizes of its inputs are not known" in found.left_because
        assert np.allclose(file.answer(inputs), before, atol=1e-6)
        assert np.array_equal(file.answer(inputs | {"ask": np.array(False)}), inputs["data"])


@pytest.mark.parametrize("axis", [1, None])
@pytest.mark.parametrize("reduction", ["mul", "max", "min"])
def test_other_reductions_are_named_and_the_file_is_not_touched(
    reduction: str, axis: int | None, tmp_path: Path, random: np.random.Generator
) -> None:
    inputs = {
        "data": drawn(random, (2, 3)), "indices": random.integers(0, 2, (2, 3 if axis else 1)),
        "updates": drawn(random, (2, 3)),
    }  # fmt: skip
    file = scatter(tmp_path, inputs, axis, reduction)
    before, (found,) = file.path.read_bytes(), file.rewrite(inputs)
    assert found.operation == f"{'ScatterElements' if axis else 'ScatterND'} ({reduction})"
    assert "does not rewrite" in found.left_because and file.path.read_bytes() == before


@pytest.mark.parametrize("axis", [1, None])
def test_a_scatter_that_only_puts_is_no_operation_that_tensorrt_lacks(
    axis: int | None, tmp_path: Path, random: np.random.Generator
) -> None:
    inputs = {
        "data": drawn(random, (2, 3)), "indices": random.integers(0, 2, (2, 3 if axis else 1)),
        "updates": drawn(random, (2, 3)),
    }  # fmt: skip
    file = scatter(tmp_path, inputs, axis, "none")
    before = file.path.read_bytes()
    assert file.rewrite(inputs) == [] and file.path.read_bytes() == before


def test_small_integers_are_left(tmp_path: Path, random: np.random.Generator) -> None:
    """Small integers overflow at each sum, and TensorRT has no such sums."""
    inputs = elements(random, 2, 1, "int8")
    file = scatter(tmp_path, inputs, 1)
    (found,) = file.rewrite(inputs)
    assert "INT8" in found.left_because and onnx.load(file.path).graph.node[0].op_type == "ScatterElements"
