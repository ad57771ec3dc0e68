"""The runs before anybody is served, and the facts that they find."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from halfeven.models.engines.engine import Engine
from halfeven.models.errors import BadRequest
from halfeven.models.spec.datatypes import Wire
from halfeven.models.spec.spec import Batching, Dim, ModelSpec, TensorSpec
from halfeven.serve.batching.ceiling import Ceiling
from halfeven.serve.batching.padding import Parts
from halfeven.serve.versions.loading.invariance import batch_invariance
from halfeven.serve.versions.loading.warming import warm


class Cold(Engine):
    """An engine that remembers its warm-ups, with memory for so many rows."""

    form, precision, device = "torch", "fp16", "cpu"

    def __init__(self, most: int = 10**9) -> None:
        self.most, self.warmed = most, list[int]()

    def warm_up(self, parts: Parts) -> None:
        self.warmed.append(len(parts[0][0]))
        if self.warmed[-1] > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")


def spec(rows: int = 32, buckets: Any = "auto", datatype: str = "FP32") -> ModelSpec:
    x = (TensorSpec("x", datatype, (Dim(), Dim(4, 4))),)
    return ModelSpec("toy", x, x, rows, batching=Batching(buckets=buckets))


def batch_of(rows: int) -> Parts:
    return [[np.zeros((max(rows, 1), 4), np.float32)]]


def warmed(engine: Cold, toy: ModelSpec, ceiling: Ceiling | None = None) -> int:
    return warm(engine, toy, batch_of, ceiling or Ceiling(), lambda fn: fn())


def test_every_bucket_is_run_before_anybody_is_served_smallest_first() -> None:
    engine = Cold()
    assert warmed(engine, spec(buckets=(2, 8))) == 32 and engine.warmed == [2, 8, 32]
    engine = Cold()
    assert warmed(engine, spec()) == 32 and engine.warmed == [1, 32], "on a CPU any size goes"
    engine = Cold()
    assert warmed(engine, spec(rows=0)) == 0 and len(engine.warmed) == 1


def test_every_bucket_is_run_as_requests_send_it_too_and_an_index_that_its_cut_values_miss_does_no_harm() -> (
    None
):
    class Taking(Cold):
        def warm_up(self, parts: Parts) -> None:
            super().warm_up(parts)
            sent.append(parts[0][0].dtype)
            if parts[0][0].dtype == np.uint8:
                raise BadRequest("an index that is out of range")

    sent: list[Any] = []
    toy = spec(buckets=(2, 8))
    toy = replace(toy, inputs=(replace(toy.inputs[0], wire=Wire("UINT8")),))
    engine = Taking()
    assert warmed(engine, toy) == 32 and engine.warmed == [2, 2, 8, 8, 32, 32]
    assert sent == [np.float32, np.uint8] * 3


def test_a_size_without_memory_lowers_the_ceiling_and_the_smaller_ones_serve() -> None:
    engine, ceiling = Cold(most=9), Ceiling()
    assert warmed(engine, spec(buckets=(1, 2, 4, 8, 16)), ceiling) == 8
    assert engine.warmed == [1, 2, 4, 8, 16] and ceiling.rows(4) == 8
    again = Cold(most=9)
    assert warmed(again, spec(buckets=(1, 2, 4, 8, 16)), ceiling) == 8
    assert again.warmed == [1, 2, 4, 8], "what is known is not tried"


def test_where_not_even_the_smallest_fits_or_something_else_is_wrong_nothing_is_ready() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        warmed(Cold(most=0), spec())
    engine = Cold()
    engine.warm_up = lambda parts: 1 // 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        warmed(engine, spec())


def test_what_a_batch_without_memory_had_taken_is_free_when_it_is_tried_alone() -> None:
    class InTwoSlots(Cold):
        in_flight = 2

        def warm_up(self, parts: Parts) -> None:
            if len(parts[0][0]) > 4:
                activations = np.zeros(8)
                self.taken = weakref.ref(activations)
                raise torch.OutOfMemoryError("CUDA out of memory")

        def run(self, parts: Parts) -> list[np.ndarray]:
            if self.taken() is not None:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return []

    assert warmed(InTwoSlots(), spec(buckets=(4, 8))) == 32


# Batch invariance


def leaning(per_row: float) -> Callable[[Parts], Sequence[np.ndarray]]:
    """Answers that lean by so much (relative) with every further row of their batch."""

    def run(parts: Parts) -> list[np.ndarray]:
        x = np.concatenate(parts[0])
        return [x * np.float32(1 + per_row * (len(x) - 1))]

    return run


def samples(rows: int) -> Parts:
    return [[np.arange(1, rows * 4 + 1, dtype=np.float32).reshape(rows, 4) / 16]]


def test_what_depends_on_the_batch_is_told_in_the_gates_units() -> None:
    said = batch_invariance(spec(), leaning(2.0**-11 / 4), samples, (1, 2, 5), "fp16", budget_s=60)
    assert said == "within 1 u·S alone and in batches of up to 5 (u = 2^-11)"
    said = batch_invariance(spec(), leaning(2.0**-10), samples, (2,), "bf16", budget_s=60)
    assert said == "within 0.25 u·S alone and in batches of up to 2 (u = 2^-8)"


def test_what_does_not_depend_on_it_is_the_same_bits() -> None:
    said = batch_invariance(spec(), leaning(0.0), samples, (4, 2, 8), "fp32", budget_s=60)
    assert said == "the same bits alone and in batches of up to 8 (u = 2^-24)"


def test_an_answer_that_is_finite_only_alone_is_not_within_anything() -> None:
    def run(parts: Parts) -> list[np.ndarray]:
        x = np.concatenate(parts[0])
        return [x if len(x) == 1 else np.full_like(x, np.nan)]

    assert "within inf u·S" in batch_invariance(spec(), run, samples, (2,), "fp16", budget_s=60)


def test_nothing_is_claimed_beyond_the_budget() -> None:
    now, ran = [0.0], []

    def slow(parts: Parts) -> list[np.ndarray]:
        (x,) = (np.concatenate(part) for part in parts)
        ran.append(len(x))
        now[0] += 0.01 * len(x)
        return [x]

    said = batch_invariance(spec(64), slow, samples, (1, 2, 4, 8, 16, 32, 64), "fp16", 0.3, lambda: now[0])
    assert "batches of up to 8 " in said and ran == [1, 1, 1, 1, 2, 4, 8] and now[0] < 0.3
    now[0], ran[:] = 0.0, []
    said = batch_invariance(spec(64), slow, samples, (2, 4, 64), "fp16", 0.03, lambda: now[0])
    assert "batches of up to 2 " in said and ran == [1, 2], (
        "where even one is slow, one sample and one size must do"
    )


def test_models_without_batches_or_floating_answers_are_not_measured() -> None:
    def never(parts: Parts) -> list[np.ndarray]:
        raise AssertionError("ran")

    assert batch_invariance(spec(0), never, samples, (1, 2), "fp16") == ""
    assert batch_invariance(spec(1), never, samples, (1,), "fp16") == ""
    assert batch_invariance(spec(datatype="INT64"), never, samples, (1, 2), "fp16") == ""
