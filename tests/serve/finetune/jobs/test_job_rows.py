"""A job's files are read by a process of their own: what it finds, and what its death means."""

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from halfeven.models.errors import BadSamples, NotReady
from halfeven.models.spec.spec import Dim, ModelSpec, TensorSpec
from halfeven.models.store.store import Store, Version
from halfeven.serve.finetune.jobs import job_rows, row_reader
from halfeven.serve.finetune.jobs.job_rows import (
    Asked,
    JobRows,
    ReaderLost,
    check,
    divide,
    lines_until,
)
from halfeven.serve.finetune.jobs.records.row_files import BadTrainingFile
from safetensors.numpy import load_file, save_file

from tests.patience import PATIENCE_S

SPEC = ModelSpec(
    "net",
    (TensorSpec("x", "FP32", (Dim(), Dim(4, 4))),),
    (TensorSpec("y", "FP32", (Dim(), Dim(3, 3)), kind="logits"),),
    max_batch_size=8,
)
VALUES = {
    "bad_rows": "quarantine",
    "validation_split": 0.25,
    "loss": None,
    "class_weights": None,
    "trainable": None,
}

DYING_OF_A_PICTURE = """
import os
from halfeven.serve.finetune.data import tables
from halfeven.serve.finetune.jobs.row_reader import main

tables.read_pictures = lambda *_: os.kill(os.getpid(), 9)
main()
"""


@pytest.fixture
def parent(tmp_path: Path) -> Version:
    with Store(tmp_path / "store").draft("net") as draft:
        draft.write_json("spec.json", SPEC.to_json())
        return draft.publish("live", {})


def rows(path: Path, count: int = 40) -> Path:
    """Rows, of which row 5 has a class that there is not."""
    random = np.random.default_rng()
    targets = random.integers(0, 3, count)
    targets[5] = 3
    save_file({"x": random.standard_normal((count, 4), np.float32), "target:y": targets}, path)
    return path


def asked(parent: Version, file: Path, **hyperparameters: Any) -> Asked:
    return Asked(parent, {"training_file": file}, VALUES | hyperparameters, seed=3, priority="normal")


def staying() -> bool:
    return False


def admitted(order: Asked, folder: Path) -> Any:
    return check(order, {"training_file": "'rows' (file-1)"}, folder, staying)


def test_the_rows_are_divided_into_the_files_that_the_trainer_and_the_conversion_read(
    parent: Version, tmp_path: Path
) -> None:
    found = divide(
        asked(parent, rows(tmp_path / "rows")), tmp_path, lambda child: lines_until(child, staying)
    )
    data, train = load_file(tmp_path / "data.safetensors"), json.loads((tmp_path / "rows.json").read_text())
    assert (found.rows, found.train, found.left_out, len(train)) == (39, 29, [5], 29)
    held = sorted(set(range(39)) - set(train))
    assert found.held_out.arrays["x"].tobytes() == data["x"][held].tobytes()
    assert found.held_out.targets["y"].tolist() == data["target:y"][held].tolist()
    assert found.numbers([4, 5]) == [4, 6], "the row that was left out is counted in the caller's file"


@pytest.mark.slow
def test_what_is_wrong_with_a_file_is_said_as_its_caller_names_it(parent: Version, tmp_path: Path) -> None:
    file = rows(tmp_path / ("a" * 64))
    with pytest.raises(BadTrainingFile) as refused:
        admitted(asked(parent, file, bad_rows="refuse"), tmp_path)
    assert (refused.value.code, refused.value.param) == ("bad_training_file", "training_file")
    words = "training_file 'rows' (file-1): tensor 'target:y', row 5: expected classes 0..2"
    assert str(refused.value).startswith(words)
    assert admitted(asked(parent, file), tmp_path)["train"] == 29
    assert list(tmp_path.glob(".upload-*")) == []


@pytest.mark.slow
def test_however_long_what_is_said_of_a_file_would_be_it_is_said(parent: Version, tmp_path: Path) -> None:
    names = {f"layer.{number}.of.another.model": np.zeros(1, np.float32) for number in range(8_000)}
    save_file(names, file := tmp_path / "names")
    with pytest.raises(BadTrainingFile, match=r"expected the tensors \['x'\]") as refused:
        admitted(asked(parent, file), tmp_path)
    assert len(str(refused.value)) < 3000


@pytest.mark.slow
def test_of_many_held_out_rows_that_are_trained_on_ten_are_named_and_all_are_counted(
    parent: Version, tmp_path: Path
) -> None:
    count = 40_000
    alike = {"x": np.zeros((count, 4), np.float32), "target:y": np.zeros(count, np.int64)}
    save_file(alike, file := tmp_path / "alike")
    found = divide(asked(parent, file), tmp_path, lambda child: lines_until(child, staying))
    assert (found.twin_count, len(found.twins)) == (count // 4, 10)


def test_rows_are_numbered_as_in_the_caller_s_file_without_counting_through_it(tmp_path: Path) -> None:
    draw = np.random.default_rng()
    left_out = draw.choice(100, 10, replace=False).tolist()
    kept, places = np.delete(np.arange(100), left_out), draw.integers(0, 90, 20)
    assert JobRows(tmp_path, 90, 60, {}, left_out, [], 0).numbers(places) == kept[places].tolist()
    assert JobRows(tmp_path, 10**12, 60, {}, [0], [], 0).numbers([10**12 - 1]) == [10**12]


def test_a_reader_that_dies_refuses_the_file_and_no_answer_of_the_server(
    parent: Version, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = '{"type": "reading", "param": "training_file"}'
    killed = f"import os\nprint('{begun}', flush=True)\nos.kill(os.getpid(), 9)\n"
    (tmp_path / "dying_reader.py").write_text(killed)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(job_rows, "READER", "dying_reader")
    order = asked(parent, rows(tmp_path / "rows"))
    with pytest.raises(BadTrainingFile, match=r"training_file 'rows' \(file-1\): it cannot be read: .*-9"):
        admitted(order, tmp_path)
    with pytest.raises(ReaderLost, match="give fewer rows"):
        divide(order, tmp_path, lambda child: lines_until(child, staying))


@pytest.mark.slow
def test_a_reader_that_dies_leaves_nothing_of_a_tar_beside_the_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (files := tmp_path / "files").mkdir()
    (job := tmp_path / "job").mkdir()
    with tarfile.open(files / "rows", "w") as archive:
        archive.addfile(tarfile.TarInfo("ant/1.png"), io.BytesIO())
    with Store(tmp_path / "store").draft("net") as draft:
        draft.write_json("spec.json", SPEC.to_json())
        order = asked(draft.publish("live", {}), files / "rows")
    (tmp_path / "dying_reader.py").write_text(DYING_OF_A_PICTURE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(job_rows, "READER", "dying_reader")
    with pytest.raises(BadTrainingFile, match="-9"):
        admitted(order, files)
    for _ in range(2):
        with pytest.raises(ReaderLost):
            divide(order, job, lambda child: lines_until(child, staying))
    assert [path.name for path in files.iterdir()] == ["rows"]
    assert len(list(job.rglob("1.png"))) == 1, "the job's own folder has what the last one left"


def test_a_server_that_leaves_does_not_wait_for_a_reader(parent: Version, tmp_path: Path) -> None:
    with pytest.raises(NotReady):
        check(asked(parent, rows(tmp_path / "rows")), {"training_file": "'rows'"}, tmp_path, lambda: True)


def test_a_file_beyond_the_memory_of_the_reader_is_refused_with_the_limit() -> None:
    line = row_reader.refusal(MemoryError(), {"max_bytes": 1 << 30})
    assert (line["code"], "more than 6.0 GiB" in line["message"]) == (BadSamples.code, True)


@pytest.mark.slow
def test_the_reader_imports_no_server_and_no_torch() -> None:
    asked = f"import sys, {job_rows.READER}; print(sorted({{'torch', 'fastapi', 'onnx'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout.strip() == "[]", done.stderr
