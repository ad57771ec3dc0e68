"""The sizes of a model's batches."""

import pytest
from halfeven.models.spec.buckets import buckets_of
from halfeven.models.spec.spec import Batching, Dim, ModelSpec, TensorSpec

X = (TensorSpec("x", "FP32", (Dim(), Dim(4, 4))),)


def spec(rows: int, *asked: object) -> ModelSpec:
    return ModelSpec("toy", X, X, rows, batching=Batching(0, 1, *asked))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "asked", "device", "buckets"),
    [
        (32, ["auto"], "cpu", ()),
        (32, ["auto"], "cuda:0", (1, 2, 4, 8, 16, 32)),
        (24, ["auto"], "cuda:1", (1, 2, 4, 8, 16, 24)),
        (1, ["auto"], "cuda:0", (1,)),
        (0, ["auto"], "cuda:0", ()),
        (32, [], "cuda:0", (1, 2, 4, 8, 16, 32)),
        (32, [()], "cuda:0", ()),
        (32, [(4, 8)], "cpu", (4, 8, 32)),
        (6, [(4, 8)], "cpu", (4, 6)),
        (32, [(32,)], "cpu", (32,)),
    ],
)
def test_buckets_are_powers_of_two_on_cuda_none_on_a_cpu_or_what_was_asked(
    rows: int, asked: list[object], device: str, buckets: tuple[int, ...]
) -> None:
    assert buckets_of(spec(rows, *asked), device) == buckets
