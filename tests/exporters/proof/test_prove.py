"""A half is judged at the sizes of batch at which it will serve."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch
from halfeven.exporters.inputs.samples import Samples
from halfeven.exporters.proof.prove import (
    MAX_JUDGED,
    ReferenceRun,
    ask_reference,
    check_original_form,
    gap,
    judged,
    noise_among,
    take,
)
from halfeven.exporters.question import Answers, Arrays, Question, RowsDiffer
from halfeven.models.capture.agreement import distance
from halfeven.models.errors import ExportFailed
from halfeven.models.spec.spec import Batching, Dim, ModelSpec, TensorSpec


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


def run_on(count: int, original: Answers, all_judge: bool = False) -> ReferenceRun:
    tensors = [TensorSpec(name, "FP32", (Dim(), Dim(4, 4))) for name in ("x", "y")]
    x = np.random.default_rng(5).standard_normal((count, 4)).astype(np.float32)
    samples = Samples({"x": x}, all_judge=all_judge)
    return ask_reference(ModelSpec("m", (tensors[0],), (tensors[1],), 8), samples, original)


@pytest.mark.parametrize(("all_judge", "asked"), [(True, MAX_JUDGED + 9), (False, MAX_JUDGED)])
def test_all_rows_of_other_samples_judge_and_of_a_conversion_s_own_the_first(
    all_judge: bool, asked: int
) -> None:
    run = run_on(MAX_JUDGED + 9, lambda inputs: {"y": inputs["x"]}, all_judge)
    assert {sample for question in run.bulk for sample in question.samples} == {*range(asked)}


def test_few_judging_samples_are_joined_by_perturbed_ones_which_are_judged_apart() -> None:
    run = run_on(8, lambda inputs: {"y": inputs["x"]})
    asked = {sample for question in run.perturbed for sample in question.samples}
    assert len(asked) == 24 and {sample for question in run.bulk for sample in question.samples} == set(
        range(8)
    )
    report = judged(
        run, "fp16", [take(run, lambda inputs: {"y": inputs["x"].astype(np.float16).astype(np.float32)})]
    )
    assert (
        report.passed
        and report.samples == 8
        and report.perturbed is not None
        and report.perturbed.samples == 24
    )
    seen = np.concatenate([question.inputs["x"] for question in run.bulk])

    def right_on_samples_alone(inputs: Arrays) -> dict[str, np.ndarray]:
        known = (inputs["x"][:, None] == seen).all(2).any(1, keepdims=True)
        return {"y": np.where(known, inputs["x"], 2 * inputs["x"])}

    near = replace(run, adversarial=[])
    assert "perturbed" in judged(near, "fp16", [take(near, right_on_samples_alone)]).summary()
    assert run_on(32, lambda inputs: {"y": inputs["x"]}).perturbed == []


def test_a_perturbed_sample_without_a_finite_answer_is_not_asked() -> None:
    def root(inputs: Arrays) -> dict[str, np.ndarray]:
        with np.errstate(invalid="ignore"):
            return {"y": np.sqrt(inputs["x"] + 1.0)}

    run = run_on(8, root)
    answers = [question.reference["y"] for question in run.perturbed]
    assert 0 < sum(map(len, answers)) < 24 and all(np.isfinite(answer).all() for answer in answers)
    assert all(len(question.samples) == len(question.inputs["x"]) for question in run.perturbed)


def test_a_form_that_differs_in_fp32_is_the_exporters_fault_unless_the_program_itself_differs_as_much() -> (
    None
):
    def original(inputs: Arrays) -> dict[str, np.ndarray]:
        return {"y": inputs["x"]}

    def moved(inputs: Arrays) -> dict[str, np.ndarray]:
        return {"y": inputs["x"] + np.float32(0.01)}

    run = run_on(16, original)
    with pytest.raises(ExportFailed, match="this is the exporter's fault"):
        check_original_form(run, moved)
    tensor = TensorSpec("x", "FP32", (Dim(), Dim(4, 4)))
    samples = Samples({"x": np.random.default_rng(5).standard_normal((16, 4)).astype(np.float32)})
    noisy = ask_reference(
        ModelSpec("m", (tensor,), (replace(tensor, name="y"),), 8), samples, original, exact=moved
    )
    with pytest.raises(
        ExportFailed, match=r"the program itself differs by 0\.\d+ when it is computed in FP64"
    ):
        check_original_form(noisy, moved)


def test_near_ties_of_the_exported_form_are_not_the_exporters_fault() -> None:
    run = run_on(16, lambda inputs: {"y": inputs["x"].argsort(-1)})
    first = np.arange(4) < 1

    def flipped(place: int) -> Answers:
        return lambda inputs: {"y": np.where(np.arange(4) == place, 7, inputs["x"].argsort(-1))}

    with pytest.raises(ExportFailed):
        check_original_form(run, flipped(0))
    tied = replace(
        run, tie_tolerance=lambda _, reference, __: {"y": np.broadcast_to(first, reference["y"].shape)}
    )
    check_original_form(tied, flipped(0))
    with pytest.raises(ExportFailed):
        check_original_form(tied, flipped(1))


@pytest.mark.parametrize("odd", [*permutations([np.nan, np.inf, -np.inf], 2)])
def test_in_fp32_nan_and_either_infinity_are_three_different_answers(odd: tuple[float, float]) -> None:
    one, other = (np.array([1.0, number], np.float32) for number in odd)
    assert gap(one, one) == 0.0 and gap(one, other) == np.inf
    mine, theirs = torch.tensor(one), torch.tensor(other)
    assert distance(torch, mine, mine) == 0.0 and distance(torch, mine, theirs) == np.inf


def test_rows_that_depend_on_each_other_are_no_noise_of_fp32() -> None:
    """An If on the mean of a batch: in FP64 a batch is answered as before, and each row alone otherwise."""
    tensors = [TensorSpec(name, "FP32", (Dim(), Dim(4, 4))) for name in ("x", "y")]
    spec = ModelSpec("m", (tensors[0],), (tensors[1],), 8)
    x = np.random.default_rng().uniform(1.0, 2.0, (6, 4)).astype(np.float32)
    x[3:] *= -2.0

    def by_the_mean(arrays: Arrays) -> dict[str, np.ndarray]:
        return {"y": arrays["x"] if arrays["x"].mean() > 0 else -arrays["x"]}

    def plain(arrays: Arrays) -> dict[str, np.ndarray]:
        return {"y": np.abs(arrays["x"])}

    for answers, depends in ((by_the_mean, True), (plain, False)):
        question = Question(tuple(range(6)), {"x": x}, answers({"x": x}))
        with pytest.raises(RowsDiffer, match="'y' depends on the other rows") if depends else nullcontext():
            noise_among(spec, [question], answers, answers)
