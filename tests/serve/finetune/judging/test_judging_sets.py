"""The targets that may judge a job: real ones that differ, from the parent's samples or a validation file."""

import re
from typing import Any

import numpy as np
import pytest
from halfeven.exporters.inputs.samples import Samples
from halfeven.models.spec.spec import Dim, ModelSpec, TensorSpec
from halfeven.serve.finetune.judging.judging_sets import (
    HELD_OUT,
    JUDGING,
    classes_not_judged,
    judging_sets,
    not_judged,
)

SPEC = ModelSpec(
    "net",
    (TensorSpec("x", "FP32", (Dim(), Dim(3, 3))),),
    (
        TensorSpec("word", "FP32", (Dim(), Dim(4, 4)), kind="logits"),
        TensorSpec("value", "FP32", (Dim(), Dim(2, 2)), kind="tensor"),
    ),
    max_batch_size=4,
)
ROWS = 24


def samples(**targets: Any) -> Samples:
    found = {name: np.asarray(values) for name, values in targets.items()}
    return Samples({"x": np.zeros((ROWS, 3), np.float32)}, found)


WORDS = samples(word=[0, 1, 2, 3, 0, 1] * 4)
FEW_WORDS = samples(word=[0, 1, 2, 3, -1, -1] * 4)
ONE_WORD = samples(word=[2] * ROWS)
UNGRADED = samples(word=[-1] * ROWS)
ONE_AND_UNGRADED = samples(word=[2, 2, 2, -1, 2, 2, 2, 2, 2, 2, -7, 2] * 2)
VALUES = samples(value=np.random.default_rng().random((ROWS, 2)))
ONE_VALUE = samples(value=np.tile([0.5, 0.25], (ROWS, 1)))


@pytest.mark.parametrize("validated", [False, True])
def test_held_out_rows_judge_only_where_they_are_a_validation_file(validated: bool) -> None:
    assert judging_sets({HELD_OUT: WORDS}, validated) == ([WORDS] if validated else [])
    assert judging_sets({HELD_OUT: VALUES, JUDGING: WORDS}, validated)[-1] is WORDS


@pytest.mark.parametrize(
    ("learnt", "sets", "words"),
    [
        (["word"], [WORDS], None),
        (["value"], [VALUES], None),
        (["word", "value"], [WORDS, VALUES], None),
        (["word"], [ONE_WORD, WORDS], None),
        (["word"], [], "no targets"),
        (["word"], [VALUES], "no targets"),
        (["word", "value"], [WORDS], "output 'value'.*no targets"),
        (["word"], [ONE_WORD], "all alike"),
        (["word"], [UNGRADED], " 0 rows only"),
        (["word"], [FEW_WORDS], "16 rows only .at least 20"),
        (["word"], [ONE_AND_UNGRADED], "all alike"),
        (["value"], [ONE_VALUE], "all alike"),
    ],
)
def test_every_learnt_output_needs_targets_that_differ(
    learnt: list[str], sets: list[Samples], words: str | None
) -> None:
    why = not_judged(SPEC, learnt, sets)
    if words is None:
        assert why is None
    else:
        assert why is not None and re.search(words, why)
        assert "validation_file" in why and "convert the model" in why


def test_classes_that_no_judging_set_shows_are_said() -> None:
    assert classes_not_judged(SPEC, [WORDS]) is None
    assert "2 of the 4 classes of output 'word'" in str(
        classes_not_judged(SPEC, [samples(word=[0, 1, 0, -1, 0, 1] * 4)])
    )
