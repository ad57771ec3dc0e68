"""Remarkable facts about data that fit: classes that are missing, another scale, rows that occur again."""

import numpy as np
import pytest
from halfeven.exporters.inputs.samples import Samples
from halfeven.models.spec.spec import Dim, ModelSpec, TensorSpec
from halfeven.serve.finetune.data.data_findings import (
    missing_classes,
    repeated,
    scaled_inputs,
    trained_judges,
)
from halfeven.serve.finetune.data.datasets import TrainingData

LOGITS = TensorSpec("y", "FP32", (Dim(), Dim(30, 30)), kind="logits", labels=("zero", "one"))
SPEC = ModelSpec("net", (TensorSpec("x", "FP32", (Dim(), Dim(4, 4))),), (LOGITS,), max_batch_size=4)


def rows(count: int = 50, factor: float = 1.0) -> Samples:
    random = np.random.default_rng()
    x = (factor * random.standard_normal((count, 4))).astype(np.float32)
    return Samples({"x": x}, {"y": random.integers(0, 30, count)})


def test_missing_classes_are_named_with_their_labels() -> None:
    assert missing_classes(LOGITS, np.arange(30)) == ""
    assert "lack 1 of the 30 classes of output 'y': 1 ('one');" in missing_classes(
        LOGITS, np.delete(np.arange(30), 1)
    )
    assert "lack 29 of the 30" in missing_classes(LOGITS, np.full(9, 3))
    assert missing_classes(LOGITS, np.full(9, 3)).count(",") < 15


@pytest.mark.parametrize(("factor", "words"), [(1000, "times as large as"), (1 / 1000, "times smaller than")])
def test_data_of_another_scale_are_named(factor: float, words: str) -> None:
    assert scaled_inputs(SPEC, rows(factor=3), rows()) == []
    (finding,) = scaled_inputs(SPEC, rows(factor=factor), rows())
    assert finding.startswith("input 'x' is") and words in finding


def test_judging_samples_that_are_trained_on_are_counted() -> None:
    data = TrainingData(rows(), {"y": "cross_entropy"})
    judging = data.samples.take(np.array([1, 2, 30]))
    finding = trained_judges(judging, data, np.arange(25))
    assert finding.startswith("2 of the 3 judging samples")
    assert trained_judges(judging, data, np.arange(3, 25)) == ""


def test_rows_that_occur_again_are_named_and_where_their_targets_contradict() -> None:
    assert repeated(TrainingData(rows(), {"y": "cross_entropy"})) == ""
    once = rows()
    twice = once.take(np.r_[0:50, 7, 7, 9])
    finding = repeated(TrainingData(twice, {"y": "cross_entropy"}))
    assert finding == "3 rows have the same inputs as an earlier row, for example rows 7 and 50"
    twice.targets["y"][52] += 1
    finding = repeated(TrainingData(twice, {"y": "cross_entropy"}))
    assert finding.endswith("the targets of 1 of them contradict each other, for example in rows 9 and 52")
    thrice = once.take(np.r_[0:50, 7, 7, 7])
    thrice.targets["y"][51] += 1
    assert repeated(TrainingData(thrice, {"y": "cross_entropy"})).endswith("in rows 7 and 51"), (
        "row 50 has the targets of row 7"
    )
    behind = TrainingData(twice, {"y": "cross_entropy"}, {0: "NaN or infinity", 20: "NaN or infinity"})
    assert "rows 8 and 52;" in repeated(behind) and repeated(behind).endswith("rows 10 and 54"), (
        "as the caller's file counts them, with those that are left out"
    )
