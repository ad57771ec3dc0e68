"""Scoring heads keep their ranking: judged on 200 candidates that nobody planned with, counted here pair by pair.

As modules, and as the files that torch.onnx writes of them.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from halfeven.models.folder.package import Precision
from onnx import ModelProto

from tests.conversions import converted, samples_of
from tests.corpus import CORPUS, built, captured, fresh, ranking
from tests.exporters.onnx.exported_nets import exported_module
from tests.exporters.onnx.onnx_files import ConvertedFile, convert_file, saved, spec_of
from tests.slow import drawn

U = 2.0**-11
CANDIDATES = 200
MAX_TIED, ALLOWED_U = 0.001, 4.0
# The head of each: what gives the score, from the last product on.
HEADS = {
    "sigmoid head": {"linear_1", "sigmoid"},
    "two-class head": {"linear_1", "softmax"},
    "cosine head": {"div", "div_1", "matmul"},
    "dot product head": set(),
    "max-similarity head": {"matmul", "amax", "sum_1"},
    "temperature head": {"matmul", "add", "div_2", "softmax"},
}
HEAD_OPS = {  # of files: fewer, because each takes seconds
    "sigmoid head": {"Gemm", "Sigmoid"},
    "two-class head": {"Gemm", "Softmax"},
    "cosine head": {"Add", "Div", "MatMul"},  # Add: the cone, behind the embedding's product
}
SATURATING = ("sigmoid head", "two-class head", "cosine head", "max-similarity head", "temperature head")
ORDER = {"ties", "swaps", "top10"}

Columns = Iterator[tuple[np.ndarray, np.ndarray]]
Answers = Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]

a_head = pytest.mark.parametrize("name", drawn(2, [*ranking.CASES]))
a_file = pytest.mark.parametrize("name", drawn(2, [*HEAD_OPS]))


def ranked(name: str, original: Answers, half: Answers) -> Columns:
    """The numbers of both sides for each candidate, one class after the other."""
    samples = samples_of(name, CANDIDATES, seed=4)
    batches = [inputs for _, inputs in samples.batches(CORPUS[name].max_batch_size)]
    sides = [
        np.concatenate([next(iter(ask(inputs).values())) for inputs in batches]) for ask in (original, half)
    ]
    reference, candidate = (side.reshape(CANDIDATES, -1).astype(np.float64) for side in sides)
    yield from zip(reference.T, candidate.T, strict=True)


def share_tied(columns: Columns) -> float:
    """The share of pairs that are tied in half, of all pairs whose FP32 numbers differ by one bit or more."""
    tied, distinct = 0, 0
    for reference, candidate in columns:
        apart, came = (np.subtract.outer(side, side) for side in (reference, candidate))
        distinct += int((apart != 0).sum())
        tied += int(((apart != 0) & (came == 0)).sum())
    return tied / distinct


def count_swapped(columns: Columns) -> int:
    """Pairs that change places although they are further apart than 4u of the spread."""
    swapped = 0
    for reference, candidate in columns:
        low, high = np.percentile(reference, (5, 95))
        apart, came = (np.subtract.outer(side, side) for side in (reference, candidate))
        swapped += int(((apart > ALLOWED_U * U * (high - low)) & (came < 0)).sum())
    return swapped


@cache
def exported(name: str) -> ModelProto:
    return exported_module(built(name), fresh(name, 3, seed=0))


@pytest.fixture(scope="module")
def file_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ConvertedFile]:
    """A head's file, converted at O1."""

    @cache
    def convert(name: str) -> ConvertedFile:
        model, path = exported(name), tmp_path_factory.mktemp("head")
        spec = spec_of(model)
        spec = replace(spec, outputs=(replace(spec.outputs[0], kind=captured(name).spec.outputs[0].kind),))
        folder = saved(path, model, spec)
        samples = samples_of(name, 16, seed=1)
        return convert_file(folder, samples, Precision("O1"))

    return convert


@pytest.mark.slow
@a_head
def test_as_converted_a_head_ranks_new_candidates_as_fp32_does(name: str) -> None:
    maker = converted(name).maker
    assert converted(name).passed and maker.half.half_nodes > 0
    columns = list(ranked(name, maker.original(), maker.storage()))
    assert share_tied(iter(columns)) <= MAX_TIED
    assert count_swapped(iter(columns)) == 0


@pytest.mark.slow
@a_head
def test_no_more_than_the_head_is_in_fp32(name: str) -> None:
    assert set(converted(name).kept) <= HEADS[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", drawn(2, SATURATING))
def test_all_half_a_saturating_head_is_refused_for_its_order_and_for_nothing_else(name: str) -> None:
    done = converted(name, "O3")
    report = done.judged(samples_of(name, CANDIDATES, seed=4))
    assert report is not None and done.kept == []
    rules = {failure.rule for failure in report.all_failures}
    assert "ties" in rules and rules <= ORDER, report.summary()


@pytest.mark.slow
def test_all_half_a_head_that_does_not_saturate_passes() -> None:
    report = converted("dot product head", "O3").judged(samples_of("dot product head", CANDIDATES, seed=4))
    assert report is not None
    assert report.passed, report.summary()


@pytest.mark.slow(seconds=4)
@a_file
def test_a_file_ranks_new_candidates_as_fp32_does(name: str, file_of: Callable[[str], ConvertedFile]) -> None:
    foreign = file_of(name)
    assert foreign.half is not None and foreign.half_nodes > 0
    for half in (foreign.oracle_answers(), foreign.half_answers()):
        columns = list(ranked(name, foreign.original_answers(), half))
        assert share_tied(iter(columns)) <= MAX_TIED
        assert count_swapped(iter(columns)) == 0


@pytest.mark.slow
@a_file
def test_no_more_than_the_head_of_a_file_is_in_fp32(
    name: str, file_of: Callable[[str], ConvertedFile]
) -> None:
    assert {kept.op for kept in file_of(name).kept} <= HEAD_OPS[name]
