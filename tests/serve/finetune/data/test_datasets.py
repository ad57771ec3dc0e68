"""Training files: what does not fit is refused with tensor, rows, what was expected and what came."""

import io
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from halfeven.models.errors import BadSamples
from halfeven.models.folder.loss_and_optimizer_names import IGNORED
from halfeven.models.spec.spec import ModelSpec
from halfeven.models.spec.value_range import ValueRange
from halfeven.serve.finetune.data.datasets import (
    TrainingData,
    check_no_overlap,
    learnable_outputs,
    read_training,
    seen_in_training,
    split,
    with_classes,
)
from safetensors.numpy import save_file

from tests.specs import tensor

SPEC = ModelSpec(
    "net",
    (tensor("x", "FP32", -1, 4),),
    (
        tensor("logits", "FP32", -1, 3, kind="logits"),
        tensor("vector", "FP32", -1, 2, kind="embedding"),
        tensor("best", "INT64", -1, kind="indices"),
    ),
)
ROWS = 24


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    random = np.random.default_rng()
    return {
        "x": random.standard_normal((ROWS, 4)).astype(np.float32),
        "target:logits": random.integers(0, 3, ROWS),
    }


def read(folder: Path, arrays: Mapping[str, np.ndarray], spec: ModelSpec = SPEC) -> TrainingData:
    path = folder / "train.safetensors"
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, path)
    return read_training(path, spec)


def fault(folder: Path, arrays: Mapping[str, np.ndarray], spec: ModelSpec = SPEC) -> str:
    with pytest.raises(BadSamples) as caught:
        read(folder, arrays, spec)
    return str(caught.value)


def test_both_formats_give_the_same_data_and_each_target_its_loss(
    tmp_path: Path, arrays: dict[str, np.ndarray]
) -> None:
    arrays["target:vector"] = np.ones((ROWS, 2), np.float32)
    np.savez(tmp_path / "train.npz", **arrays)  # type: ignore[arg-type]
    for data in (read(tmp_path, arrays), read_training(tmp_path / "train.npz", SPEC)):
        assert data.losses == {"logits": "cross_entropy", "vector": "mse"}
        assert data.rows == ROWS
        np.testing.assert_array_equal(data.samples.arrays["x"], arrays["x"])
        np.testing.assert_array_equal(data.samples.targets["logits"], arrays["target:logits"])


def test_probabilities_are_learnt_by_their_logarithm() -> None:
    spec = replace(SPEC, outputs=(tensor("p", "FP32", -1, 3, kind="probabilities"),))
    assert learnable_outputs(spec) == {"p": "nll_of_probabilities"}


def test_non_finite_inputs_name_ten_rows_and_how_many(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    arrays["x"][5:19, 2] = np.nan
    reply = fault(tmp_path, arrays)
    assert "tensor 'x', rows 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, … (14 rows): expected finite" in reply


def test_one_infinite_target_names_its_row(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    arrays["target:vector"] = np.zeros((ROWS, 2), np.float32)
    arrays["target:vector"][7, 1] = -np.inf
    assert "tensor 'target:vector', row 7: expected finite" in fault(tmp_path, arrays)


@pytest.mark.parametrize("wrong", [3, -1, -100, 2**40])
def test_a_class_that_there_is_not_names_its_rows_and_the_range(
    tmp_path: Path, arrays: dict[str, np.ndarray], wrong: int
) -> None:
    arrays["target:logits"][[2, 21]] = wrong
    assert f"'target:logits', rows 2, 21: expected classes 0..2, got {wrong}" in fault(tmp_path, arrays)


def test_a_target_value_that_is_nan_may_be_given_as_missing_and_nothing_else(
    tmp_path: Path, arrays: dict[str, np.ndarray]
) -> None:
    def read(**more: Any) -> TrainingData:
        save_file(arrays, tmp_path / "train.safetensors")
        return read_training(tmp_path / "train.safetensors", SPEC, **more)

    arrays["target:vector"] = (
        np.random.default_rng().standard_normal((len(arrays["x"]), 2)).astype(np.float32)
    )
    arrays["target:vector"][3, 1] = np.nan
    for quarantine in (False, True):
        found = read(quarantine=quarantine, masked=True)
        assert np.isnan(found.samples.targets["vector"]).sum() == 1 and not found.quarantined
    assert list(read(quarantine=True).quarantined) == [3]
    with pytest.raises(BadSamples, match="target:vector', row 3: expected finite"):
        read()
    arrays["target:vector"][5, 0] = np.inf
    with pytest.raises(BadSamples, match="target:vector', row 5: expected finite"):
        read(masked=True)
    assert list(read(quarantine=True, masked=True).quarantined) == [5]
    arrays["x"][7, 0] = np.nan
    assert list(read(quarantine=True, masked=True).quarantined) == [5, 7]


@pytest.mark.parametrize("ignored", [-100, 255, 0])
def test_a_target_that_is_not_to_be_learnt_is_marked_and_refuses_no_row(
    tmp_path: Path, arrays: dict[str, np.ndarray], ignored: int
) -> None:
    arrays["target:logits"][2], arrays["target:logits"][3] = ignored, 1
    save_file(arrays, tmp_path / "train.safetensors")
    for quarantine in (False, True):
        found = read_training(tmp_path / "train.safetensors", SPEC, quarantine=quarantine, ignored=ignored)
        targets = found.samples.targets["logits"]
        assert targets[2] == IGNORED and targets[3] == 1 and found.rows == ROWS
        assert ((targets == IGNORED) == (arrays["target:logits"] == ignored)).all()


def test_soft_labels_are_shares_of_the_classes_and_are_judged_by_the_largest(
    tmp_path: Path, arrays: dict[str, np.ndarray]
) -> None:
    scores = np.random.default_rng().random((ROWS, 3)).astype(np.float32)
    arrays["target:logits"] = scores / scores.sum(1, keepdims=True)
    found = read(tmp_path, arrays)
    assert found.samples.targets["logits"].dtype == np.float32
    assert (with_classes(SPEC, found.samples).targets["logits"] == scores.argmax(1)).all()
    for wrong in ([0.5, 0.6, 0.0], [1.5, -0.5, 0.0]):
        arrays["target:logits"][4] = wrong
        assert "'target:logits', row 4: expected a share of 0 or more for each class" in fault(
            tmp_path, arrays
        )
    arrays["target:logits"] = arrays["target:logits"][:, :2]
    assert "'target:logits'" in fault(tmp_path, arrays)


def _only_inputs(arrays: dict[str, np.ndarray]) -> None:
    del arrays["target:logits"]


def _one_row(arrays: dict[str, np.ndarray]) -> None:
    for name in arrays:
        arrays[name] = arrays[name][:1]


def _no_rows(arrays: dict[str, np.ndarray]) -> None:
    for name in arrays:
        arrays[name] = arrays[name][:0]


BAD: dict[str, tuple[Any, list[str]]] = {
    "no target": (_only_inputs, ["no target to learn from", "'target:logits'", "'target:vector'"]),
    "unknown output": (
        lambda a: a.update({"target:nothing": a["target:logits"]}),
        ["target:nothing", "target:logits"],
    ),
    "an output nobody learns": (
        lambda a: a.update({"target:best": a["target:logits"]}),
        ["'target:best'", "kind indices", "'target:logits'"],
    ),
    "classes as floats": (
        lambda a: a.update({"target:logits": a["target:logits"].astype(np.float32)}),
        ["'target:logits'", "expected datatype INT64, got FP32"],
    ),
    "classes one-hot": (
        lambda a: a.update({"target:logits": np.eye(3, dtype=np.int64)[a["target:logits"]]}),
        ["'target:logits'", "expected shape [-1], got [24,3]", "one class for each decision"],
    ),
    "a target of other rows": (
        lambda a: a.update({"target:logits": a["target:logits"][:-1]}),
        ["'target:logits'", "expected 24 rows as in 'x'", "23 rows"],
    ),
    "a vector of another width": (
        lambda a: a.update({"target:vector": np.zeros((ROWS, 5), np.float32)}),
        ["'target:vector'", "expected shape [-1,2], got [24,5]"],
    ),
    "a vector in double": (
        lambda a: a.update({"target:vector": np.zeros((ROWS, 2))}),
        ["'target:vector'", "expected datatype FP32, got FP64"],
    ),
    "inputs of another shape": (
        lambda a: a.update({"x": np.zeros((ROWS, 5), np.float32)}),
        ["'x'", "expected shape [-1,4], got [24,5]"],
    ),
    "inputs of another datatype": (
        lambda a: a.update({"x": a["x"].astype(np.int32)}),
        ["'x'", "expected datatype FP32, got INT32"],
    ),
    "another name": (lambda a: a.update({"y": np.zeros((ROWS, 4), np.float32)}), ["unknown ['y']"]),
    "one row": (_one_row, ["at least 2 rows", "held out", "got 1"]),
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_does_not_fit_says_where_what_was_expected_and_what_came(
    tmp_path: Path, arrays: dict[str, np.ndarray], case: str
) -> None:
    spoil, words = BAD[case]
    spoil(arrays)
    reply = fault(tmp_path, arrays)
    assert [word for word in words if word not in reply] == [], reply


def test_an_empty_file_is_refused(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    _no_rows(arrays)
    assert "expected shape [-1,4], got [0,4]" in fault(tmp_path, arrays)


def test_a_named_length_must_be_that_of_the_inputs_in_the_targets_too(tmp_path: Path) -> None:
    spec = ModelSpec(
        "tagger",
        (tensor("ids", "INT64", -1, "length=1..9"),),
        (tensor("tags", "FP32", -1, "length=1..9", 4, kind="logits"),),
    )
    arrays = {"ids": np.ones((3, 6), np.int64), "target:tags": np.zeros((3, 6), np.int64)}
    assert read(tmp_path, arrays, spec).rows == 3
    arrays["target:tags"] = np.zeros((3, 5), np.int64)
    assert "expected shape [-1,6], got [3,5]" in fault(tmp_path, arrays, spec)


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    np.savez(tmp_path / "train.npz", x=np.array([{"a": 1}] * 2, dtype=object))
    with pytest.raises(BadSamples, match="object arrays are not read"):
        read_training(tmp_path / "train.npz", SPEC)


def test_what_a_packed_file_unpacks_to_is_bounded(tmp_path: Path) -> None:
    content = io.BytesIO()
    np.save(content, np.zeros(10**6))
    with zipfile.ZipFile(tmp_path / "train.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", content.getvalue())
    with pytest.raises(BadSamples, match="too large: expected at most 100000 bytes"):
        read_training(tmp_path / "train.npz", SPEC, 100_000)


@pytest.mark.parametrize("count", [2, 3, 10, 101])
@pytest.mark.parametrize("share", [0.001, 0.1, 0.5])
def test_a_split_is_disjoint_complete_the_same_again_and_leaves_none_empty(count: int, share: float) -> None:
    seed = int(np.random.default_rng().integers(2**31))
    train, held = split(count, share, seed)
    assert sorted([*train, *held]) == list(range(count))
    assert len(held) == min(max(1, round(count * share)), count - 1)
    for first, second in zip((train, held), split(count, share, seed), strict=True):
        np.testing.assert_array_equal(first, second)
    if count > 100:
        assert not np.array_equal(held, split(count, share, seed + 1)[1])


def test_held_out_rows_that_were_trained_on_are_found(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    train, held = split(ROWS, 0.25, 7)
    arrays["x"][held[1]] = arrays["x"][train[3]]
    data = read(tmp_path, arrays)
    assert seen_in_training(data, train, held) == [held[1]]


def test_a_validation_file_that_shares_rows_is_refused_by_row(
    tmp_path: Path, arrays: dict[str, np.ndarray]
) -> None:
    training = read(tmp_path, arrays)
    other = {**arrays, "x": arrays["x"] + 1}
    check_no_overlap(training, read(tmp_path, other))
    other["x"][[4, 9]] = arrays["x"][[0, 3]]
    with pytest.raises(
        BadSamples, match="validation_file: rows 4, 9: expected rows that are not in the training"
    ):
        check_no_overlap(training, read(tmp_path, other))
    behind = replace(read(tmp_path, other), quarantined={5: "NaN or infinity"})
    with pytest.raises(BadSamples, match="rows 4, 10:"):
        check_no_overlap(training, behind)


def test_rows_that_cannot_be_learnt_from_are_left_out_with_the_fault_of_each(
    tmp_path: Path, arrays: dict[str, np.ndarray]
) -> None:
    ids = tensor("id", "INT64", -1, 2)
    spec = replace(SPEC, inputs=(*SPEC.inputs, replace(ids, range=ValueRange((0,), (9,)))))
    arrays["id"] = np.random.default_rng().integers(0, 10, (ROWS, 2))
    arrays["x"][3, 1], arrays["x"][20, 0], arrays["x"][9, 2] = np.nan, -np.inf, 1e30
    arrays["id"][4, 1], arrays["id"][5, 0] = 10, -1
    arrays["target:logits"][6] = 3
    save_file(arrays, tmp_path / "train.safetensors")
    data = read_training(tmp_path / "train.safetensors", spec, quarantine=True)
    assert list(data.quarantined) == [3, 4, 5, 6, 9, 20]
    words = ("NaN", "0..9", "0..9", "0..2", "square is infinite", "infinity")
    assert all(word in fault for word, fault in zip(words, data.quarantined.values(), strict=True))
    kept = [row for row in range(ROWS) if row not in data.quarantined]
    assert data.numbers.tolist() == kept
    assert np.array_equal(data.samples.arrays["x"], arrays["x"][kept])
    with pytest.raises(BadSamples):
        read_training(tmp_path / "train.safetensors", spec)


def test_where_rows_are_left_out_a_refusal_names_the_rows_of_the_file(
    tmp_path: Path, arrays: dict[str, np.ndarray]
) -> None:
    """Shares of classes that do not add up are refused, also where bad rows are left out."""
    arrays["target:logits"] = np.eye(3, dtype=np.float32)[arrays["target:logits"]]
    arrays["x"][[0, 4]] = np.nan
    arrays["target:logits"][[7, 9], 0] += 0.5
    save_file(arrays, tmp_path / "train.safetensors")
    with pytest.raises(BadSamples, match="rows 7, 9: expected a share of 0 or more"):
        read_training(tmp_path / "train.safetensors", SPEC, quarantine=True)


def test_tensors_with_other_numbers_of_rows_are_refused_with_quarantine_too(
    tmp_path: Path, arrays: dict[str, np.ndarray]
) -> None:
    arrays["x"][ROWS - 1] = np.nan
    save_file({**arrays, "target:logits": arrays["target:logits"][:-3]}, tmp_path / "train.safetensors")
    with pytest.raises(BadSamples, match=f"{ROWS - 3}"):
        read_training(tmp_path / "train.safetensors", SPEC, quarantine=True)


def test_a_file_without_rows_is_refused_with_quarantine_too(
    tmp_path: Path, arrays: dict[str, np.ndarray]
) -> None:
    save_file({name: array[:0] for name, array in arrays.items()}, tmp_path / "train.safetensors")
    with pytest.raises(BadSamples, match=r"expected shape .*, got \[0,"):
        read_training(tmp_path / "train.safetensors", SPEC, quarantine=True)


def test_a_file_of_which_every_ninth_row_is_bad_is_refused(
    tmp_path: Path, arrays: dict[str, np.ndarray]
) -> None:
    many = {name: np.concatenate([array] * 6) for name, array in arrays.items()}
    many["x"][::9] = np.nan
    save_file(many, tmp_path / "train.safetensors")
    with pytest.raises(BadSamples, match=r"16 of 144 rows .*row 0: 'x': NaN"):
        read_training(tmp_path / "train.safetensors", SPEC, quarantine=True)
