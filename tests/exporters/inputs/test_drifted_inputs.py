"""Inputs on which a half drifted: what is kept of them, for how long, and how they join the samples."""

import errno
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import NoReturn
from unittest.mock import Mock

import numpy as np
import pytest
from halfeven.exporters.inputs import drifted_inputs as kept
from halfeven.exporters.inputs.drifted_inputs import (
    drifted_digests,
    folder_of,
    hand_over,
    judging_with_drifted,
    keep_input,
    too_old,
    with_drifted,
)
from halfeven.exporters.inputs.samples import Samples
from halfeven.exporters.inputs.synthetic import generate, in_range, with_smaller_integers
from halfeven.models.errors import BadInput
from halfeven.models.spec.spec import ModelSpec
from halfeven.models.spec.value_range import ValueRange
from halfeven.models.store.store import Store

from tests.specs import tensor

SPEC = ModelSpec("net", (tensor("x", "FP32", -1, 4),), (tensor("y", "FP32", -1, 2),), 8)
CLASSES = replace(SPEC, outputs=(tensor("y", "FP32", -1, 2, kind="logits"),))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store")
    (store.root / "models" / "net").mkdir(parents=True)
    return store


def row(value: float, size: int = 4) -> dict[str, np.ndarray]:
    return {"x": np.full((1, size), value, np.float32)}


def kept_values(store: Store, samples: Samples) -> list[float]:
    return sorted(with_drifted(samples, SPEC, store)[0].arrays["x"][: -samples.count, 0].tolist())


def test_each_input_is_kept_once_and_no_more_of_them_than_were_asked_for(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = Samples({"x": np.zeros((2, 4), np.float32)})
    assert with_drifted(samples, SPEC, store) == (samples, ()) and not drifted_digests(store, "net")
    assert [keep_input(store, "net", row(value), 2) for value in (1, 2, 1, 3)] == [True, True, True, False]
    assert kept_values(store, samples) == [1, 2] and len(drifted_digests(store, "net")) == 2
    monkeypatch.setattr(kept, "MOST_BYTES", 200)
    assert not keep_input(store, "net", row(4), 10), "nor more bytes"


def test_one_that_is_too_old_is_deleted_by_whoever_looks(store: Store) -> None:
    for value in (1, 2):
        keep_input(store, "net", row(value), 10)
    old = sorted(folder_of(store, "net").iterdir())[0]
    then = time.time() - (kept.KEPT_DAYS + 1) * 86400
    os.utime(old, (then, then))
    before = drifted_digests(store, "net") | {old.stem: int(then)}
    assert too_old(before) == {old.stem} and len(before) == 2 and not old.exists()


def test_parity_asks_all_that_are_kept_and_no_sample_that_chose_the_plan(store: Store) -> None:
    stored = Samples({"x": np.array([[10.0] * 4, [11] * 4, [12] * 4, [13] * 4], np.float32)})
    for value in (1, 2, 3, 11):
        keep_input(store, "net", row(value), 10)
    found, _ = judging_with_drifted(stored, SPEC, store)
    assert sorted(found.judging.arrays["x"][:, 0].tolist()) == [1, 2, 3, 10, 12]


def test_an_input_that_is_a_sample_is_taken_once(store: Store) -> None:
    """Its copy would choose the plan that it judges."""
    samples = Samples({"x": np.array([[1.0] * 4, [2] * 4], np.float32)}, {"y": np.array([1, 0])})
    keep_input(store, "net", row(2), 10)
    found, (note,) = with_drifted(samples, CLASSES, store)
    assert found is samples and note.endswith("drifted: 1 among the samples")


def test_what_does_not_fit_the_samples_is_left_out_and_told(store: Store) -> None:
    """Another length, a file that is damaged, one that a killed server left."""
    samples = Samples({"x": np.zeros((2, 4), np.float32)})
    keep_input(store, "net", row(1), 10)
    keep_input(store, "net", row(2, size=5), 10)
    (folder_of(store, "net") / "0.safetensors").write_bytes(b"no tensors")
    (folder_of(store, "net") / ".0-x.unfinished").write_bytes(b"")
    found, notes = with_drifted(samples, SPEC, store)
    assert found.count == 3
    assert notes == (
        "inputs of live traffic on which a half drifted: 1 among the samples, 2 left out, since they do not fit",
    )
    store.remove_dead_drafts()
    assert not list(folder_of(store, "net").glob(".*"))


@pytest.mark.parametrize(("place", "call"), [(kept, "opened_named"), (Path, "iterdir")])
def test_inputs_that_this_user_may_not_read_are_named_and_not_left_out(
    place: object, call: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_input(store, "net", row(1), 10)

    def denied(path: Path, *_: object) -> NoReturn:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(place, call, denied)
    with pytest.raises(BadInput, match=r"drifted-inputs.* cannot be read \(Permission denied\)"):
        with_drifted(Samples({"x": np.zeros((2, 4), np.float32)}), SPEC, store)


def test_one_that_is_deleted_while_they_are_read_is_none_that_does_not_fit(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_input(store, "net", row(1), 10)
    gone = folder_of(store, "net") / "0.safetensors"
    monkeypatch.setattr(kept, "_files", lambda folder: dict.fromkeys([gone, *folder.iterdir()], 0.0))
    _, (note,) = with_drifted(Samples({"x": np.zeros((2, 4), np.float32)}), SPEC, store)
    assert note.endswith("drifted: 1 among the samples")


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.uint64])
def test_among_samples_with_classes_they_are_not_graded(dtype: type, store: Store) -> None:
    samples = Samples({"x": np.zeros((2, 4), np.float32)}, {"y": np.array([1, 0], dtype)})
    keep_input(store, "net", row(1), 10)
    found, notes = with_drifted(samples, CLASSES, store)
    targets = found.targets["y"]
    assert targets.tolist() == [-1, 1, 0] and targets.dtype == np.int64
    assert found.count == 3 and len(notes) == 1


@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_among_samples_whose_targets_are_values_they_are_left_out(dtype: type, store: Store) -> None:
    """A −1 would be graded there."""
    samples = Samples({"x": np.zeros((2, 4), np.float32)}, {"y": np.zeros((2, 2), dtype)})
    keep_input(store, "net", row(1), 10)
    found, notes = with_drifted(samples, SPEC, store)
    assert found is samples and len(notes) == 1


def test_generated_samples_that_are_drawn_again_keep_them_in_front(store: Store) -> None:
    ids = tensor("x", "INT64", -1, 4)
    spec = replace(SPEC, inputs=(ids,))
    exact = replace(SPEC, inputs=(replace(ids, range=ValueRange((0,), (3,))),))
    keep_input(store, "net", {"x": np.full((1, 4), 50)}, 10)
    samples, _ = with_drifted(generate(spec), spec, store)
    tried = list[Samples]()

    def failing(samples: Samples, _: object) -> NoReturn:
        tried.append(samples)
        raise BadInput("an index is too large")

    with pytest.raises(BadInput):
        with_smaller_integers(spec, samples, failing, BadInput)
    for found, largest in ((in_range(samples, spec, exact), 3), (tried[-1], 0)):
        first, *others = found.arrays["x"].max(axis=1)
        assert (first, max(others), found.drifted) == (50, largest, 1)


def test_a_file_with_them_is_given_to_the_user_whose_server_keeps_them(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_input(store, "net", row(1), 10)
    given = Mock()
    monkeypatch.setattr(os, "chown", given)
    hand_over(store.root / "samples.safetensors", store.root / "models/net")
    owner = folder_of(store, "net").stat()
    given.assert_called_once_with(store.root / "samples.safetensors", owner.st_uid, owner.st_gid)
