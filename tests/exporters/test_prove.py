"""A half is judged at the sizes of batch at which it will serve."""

import numpy as np
import pytest
from halfeven.exporters.inputs.samples import Samples
from halfeven.exporters.prove import ask_reference
from halfeven.models.spec import Batching, Dim, ModelSpec, TensorSpec


@pytest.mark.parametrize(
    ("asked", "device", "sizes"),
    [
        ("auto", "cpu", {1, 2, 3, 16}),
        ("auto", "cuda:0", {1, 2, 3, 4, 8, 16}),
        ((6, 12), "cpu", {1, 2, 3, 6, 12, 16}),
        ((), "cuda:0", {1, 2, 3, 16}),
    ],
)
def test_samples_are_asked_at_every_size_that_batches_are_filled_up_to(
    asked: str | tuple[int, ...], device: str, sizes: set[int]
) -> None:
    tensors = [TensorSpec(name, "FP32", (Dim.parse(-1), Dim.parse(4))) for name in ("x", "y")]
    spec = ModelSpec("m", (tensors[0],), (tensors[1],), 16, batching=Batching(0, 1, asked))  # type: ignore[arg-type]
    samples = Samples({"x": np.random.default_rng(5).standard_normal((32, 4)).astype(np.float32)})
    run = ask_reference(spec, samples, lambda inputs: {"y": inputs["x"]}, device=device)
    assert {len(question.samples) for question in (*run.small, *run.bulk)} == sizes
