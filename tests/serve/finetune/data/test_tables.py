"""The same rows are the same tensors whatever the format of the file."""

import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from halfeven.exporters.inputs.picture_folder import read_pictures
from halfeven.models.errors import BadSamples
from halfeven.models.spec.spec import Dim, ModelSpec, TensorSpec
from halfeven.serve.finetune.data.datasets import TrainingData, read_training
from halfeven.serve.finetune.data.tables import CSV, JSON_LINES, PARQUET, pictures_of, tensors_of
from PIL import Image
from pyarrow import csv, parquet
from safetensors.numpy import save_file

SPEC = ModelSpec(
    "net",
    (
        TensorSpec("image", "FP32", (Dim(), Dim(2, 2), Dim(3, 3))),
        TensorSpec("id", "INT64", (Dim(), Dim(1, 1))),
    ),
    (
        TensorSpec("y", "FP32", (Dim(), Dim(4, 4)), kind="logits"),
        TensorSpec("value", "FP32", (Dim(), Dim(2, 2))),
    ),
    max_batch_size=8,
)
ROWS = 12
Arrays = dict[str, np.ndarray]


@pytest.fixture
def arrays() -> Arrays:
    random = np.random.default_rng()
    return {
        "image": random.standard_normal((ROWS, 2, 3)).astype(np.float32),
        "id": random.integers(0, 2**40, (ROWS, 1)),
        "target:y": random.integers(0, 4, ROWS),
        "target:value": random.standard_normal((ROWS, 2)).astype(np.float32),
    }


def flat(arrays: Arrays) -> pyarrow.Table:
    """A column for each element."""
    columns = {}
    for name, array in arrays.items():
        rows = array.reshape(ROWS, -1)
        many = {f"{name}.{place}": rows[:, place] for place in range(rows.shape[1])}
        columns |= many if len(many) > 1 else {name: rows[:, 0]}
    return pyarrow.table(columns)


def nested(arrays: Arrays) -> pyarrow.Table:
    return pyarrow.table({name: array.tolist() for name, array in arrays.items()})


def fixed(arrays: Arrays) -> pyarrow.Table:
    """A table whose arrays are flat lists of a fixed size."""
    return pyarrow.table(
        {
            name: pyarrow.FixedSizeListArray.from_arrays(array.ravel(), array[0].size)
            if array.ndim > 1
            else array
            for name, array in arrays.items()
        }
    )


def json_lines(arrays: Arrays, path: Path) -> None:
    rows = [{name: array[row].tolist() for name, array in arrays.items()} for row in range(ROWS)]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")


def packed(arrays: Arrays) -> bytes:
    out = io.BytesIO()
    np.savez(out, **arrays)  # type: ignore[arg-type]
    return out.getvalue()


WRITERS: dict[str, Callable[[Arrays, Path], object]] = {
    "npz": lambda arrays, path: path.write_bytes(packed(arrays)),
    "csv": lambda arrays, path: csv.write_csv(flat(arrays), path),
    "jsonl": json_lines,
    "parquet of columns": lambda arrays, path: parquet.write_table(flat(arrays), path, row_group_size=5),
    "parquet of lists": lambda arrays, path: parquet.write_table(nested(arrays), path),
    "parquet of fixed lists": lambda arrays, path: parquet.write_table(fixed(arrays), path),
}


def read(path: Path, quarantine: bool = False) -> TrainingData:
    return read_training(path, SPEC, quarantine=quarantine)


@pytest.mark.parametrize("kind", WRITERS)
def test_every_format_gives_the_same_bytes(kind: str, arrays: Arrays, tmp_path: Path) -> None:
    save_file(arrays, tmp_path / "rows.safetensors")
    WRITERS[kind](arrays, tmp_path / "a file without an ending")
    expected, found = read(tmp_path / "rows.safetensors"), read(tmp_path / "a file without an ending")
    assert found.losses == expected.losses
    for name, array in {**expected.samples.arrays, **expected.samples.targets}.items():
        came = {**found.samples.arrays, **found.samples.targets}[name]
        assert (came.dtype, came.shape) == (array.dtype, array.shape)
        assert came.tobytes() == array.tobytes()


@pytest.mark.slow
def test_an_empty_cell_is_a_row_with_nan_and_of_whole_numbers_a_fault(arrays: Arrays, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    csv.write_csv(flat(arrays), path)
    lines = path.read_text().splitlines()
    first = lines[0].replace('"', "").split(",")

    def emptied(column: str, row: int) -> None:
        cells = lines[1 + row].split(",")
        cells[first.index(column)] = ""
        path.write_text("\n".join([*lines[: 1 + row], ",".join(cells), *lines[2 + row :]]) + "\n")

    emptied("image.3", 5)
    assert list(read(path, quarantine=True).quarantined) == [5]
    with pytest.raises(BadSamples, match="tensor 'image', row 5: expected finite numbers"):
        read(path)
    emptied("id", 7)
    with pytest.raises(BadSamples, match="column 'id': expected whole numbers, got an empty cell"):
        read(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("image.0,name\n1,2\n", r"columns \['name'\] are unknown"),
        ("ID,Image.0\n1,2\n", "rows: neither .* names columns such as 'id', .* begins with b'ID,Image.0"),
        ('[{"id": [1]}]\n', "nor a table: the first line of a table is a JSON object"),
        ("id,image\n1,red\n", "column 'image': expected numbers, got string"),
        ("id,image.0,image.2\n1,2,3\n", r"columns \['image.2'\] are unknown"),
        ('{"id": [1], "image": {"a": 1}}\n', "column 'image': expected numbers, got struct"),
        ('{"id": [1], "image": [{"a": 1}]}\n', "column 'image': expected numbers, got struct"),
        (
            '{"id": [1], "image": [1, 2]}\n{"id": [1], "image": [1]}\n',
            "lists of one length in all rows, got 1, 2",
        ),
        ('{"id": [1], "image": \n', "JSON lines file cannot be read"),
    ],
)
def test_a_table_that_does_not_fit_is_refused_with_its_column(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_text(text)
    with pytest.raises(BadSamples, match=words):
        read(path)


PICTURES = ModelSpec(
    "net",
    (
        TensorSpec(
            "x", "FP32", (Dim(), Dim(1, 1), Dim(4, 4), Dim(4, 4)), picture={"color": "L", "size": [4, 4]}
        ),
    ),
    (TensorSpec("y", "FP32", (Dim(), Dim(2, 2)), kind="logits", labels=("ant", "bee")),),
    max_batch_size=8,
)


def test_a_tar_of_pictures_gives_the_rows_of_the_folder(tmp_path: Path) -> None:
    random = np.random.default_rng()
    for name in ("ant/1.png", "ant/2.png", "bee/1.png"):
        (tmp_path / "pictures" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (4, 4), np.uint8)).save(tmp_path / "pictures" / name)
    (tmp_path / "pictures" / "ant" / "._1.png").write_bytes(b"\0\5\x16\7")  # as the tar of macOS has it
    with tarfile.open(tmp_path / "rows.tar", "w") as archive:
        archive.add(tmp_path / "pictures", ".")
    expected = read_pictures(tmp_path / "pictures", PICTURES, 10**6)
    found = read_training(tmp_path / "rows.tar", PICTURES).samples
    assert found.arrays["x"].tobytes() == expected["x"].tobytes()
    assert found.targets["y"].tolist() == [0, 0, 1]


@pytest.mark.parametrize("name", ["../out.png", "/out.png", "a/b/c.png"])
def test_a_tar_writes_nothing_elsewhere(name: str, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "rows.tar", "w") as archive:
        member = tarfile.TarInfo(name)
        archive.addfile(member, io.BytesIO())
    with pytest.raises(BadSamples, match="expected plain pictures"):
        pictures_of(tmp_path / "rows.tar", PICTURES, 10**6)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.tar"]


def test_a_tar_with_a_link_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "rows.tar", "w") as archive:
        member = tarfile.TarInfo("ant/1.png")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(member)
    with pytest.raises(BadSamples, match="expected plain pictures"):
        pictures_of(tmp_path / "rows.tar", PICTURES, 10**6)


@pytest.mark.parametrize("names", [["ant", "ant/1.png"], [f"ant/{'1' * 300}.png"]])
def test_a_tar_with_a_name_that_no_file_can_have_is_refused_with_words(
    names: list[str], tmp_path: Path
) -> None:
    with tarfile.open(tmp_path / "rows.tar", "w") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    with pytest.raises(BadSamples, match="expected a name that a file can have there: File "):
        pictures_of(tmp_path / "rows.tar", PICTURES, 10**6)


def test_a_table_that_unpacks_to_more_than_the_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    parquet.write_table(pyarrow.table({"id": np.zeros(1_000_000, np.int64)}), path)
    assert path.stat().st_size < 100_000
    with pytest.raises(BadSamples, match="more than 1000000 bytes"):
        read_training(path, SPEC, max_bytes=1_000_000)


def test_a_table_that_pyarrow_gives_up_on_is_refused_with_words(arrays: Arrays, tmp_path: Path) -> None:
    """The reader itself refuses: a process that ended with a traceback says nothing to the caller."""
    path = tmp_path / "table"
    parquet.write_table(flat(arrays), path)
    cut = path.read_bytes()[:-200]
    tables = {
        PARQUET: [(cut, "magic bytes")],
        CSV: [(b"id,ima\xaege\n1,2\n", "not UTF-8"), (b"id,id\n1,2\n", "is there twice")],
        JSON_LINES: [
            (b'{"id": 1, "ima\xed\xa0\x80ge": 2}\n', "not UTF-8"),
            (b"\n null", "line 2: expected an object"),
        ],
    }
    for kind, cases in tables.items():
        for data, words in cases:
            path.write_bytes(data)
            with pytest.raises(BadSamples, match=words):
                tensors_of(path, kind, SPEC, 1 << 20)


def test_columns_of_an_input_with_a_dot_in_its_name_are_known(tmp_path: Path) -> None:
    spec = replace(SPEC, inputs=(TensorSpec("input.1", "FP32", (Dim(), Dim(2, 2))),))
    path = tmp_path / "rows"
    path.write_text("target:y,input.1.0,input.1.1\n1,2,3\n0,4,5\n")
    assert read_training(path, spec).samples.arrays["input.1"].tolist() == [[2, 3], [4, 5]]


def test_a_map_and_a_table_without_rows_are_refused_with_words(arrays: Arrays, tmp_path: Path) -> None:
    path, pairs = (
        tmp_path / "table",
        pyarrow.array([[("a", 1.0)]], pyarrow.map_(pyarrow.string(), pyarrow.float32())),
    )
    for table, words in (
        (pyarrow.table({"image": pairs}), "column 'image': expected numbers, got map"),
        (flat(arrays).slice(0, 0), "it has no rows"),
    ):
        parquet.write_table(table, path)
        with pytest.raises(BadSamples, match=words):
            read(path)


@pytest.mark.slow
@pytest.mark.parametrize("write", [json_lines, lambda arrays, path: csv.write_csv(flat(arrays), path)])
def test_a_row_may_be_longer_than_what_pyarrow_reads_at_a_time(
    write: Callable[[Arrays, Path], object], arrays: Arrays, tmp_path: Path
) -> None:
    path = tmp_path / "rows"
    write(arrays, path)
    expected = read(path)
    first, *others = path.read_text().splitlines()
    path.write_text("\n".join([first, *(line.replace(",", "," + " " * (1 << 19)) for line in others)]))
    found = read(path)
    for name, array in expected.samples.arrays.items():
        np.testing.assert_array_equal(found.samples.arrays[name], array)


@pytest.mark.parametrize(
    ("datatype", "value", "words"),
    [
        ("INT32", 2**32 + 5, "row 1: expected whole numbers from -2147483648 to 2147483647, got 4294967301"),
        ("UINT8", -4, "row 1: expected whole numbers from 0 to 255, got -4"),
        ("BOOL", 7, "row 1: expected whole numbers from 0 to 1, got 7"),
    ],
)
def test_a_whole_number_that_its_datatype_cannot_hold_does_not_become_another(
    datatype: str, value: int, words: str, tmp_path: Path
) -> None:
    spec = replace(SPEC, inputs=(TensorSpec("id", datatype, (Dim(), Dim(2, 2))),))
    path = tmp_path / "rows"
    path.write_text(f"id.0,id.1,target:y\n1,1,0\n1,{value},0\n")
    with pytest.raises(BadSamples, match=words):
        read_training(path, spec)
    parquet.write_table(pyarrow.table({"id": [[1, 1], [1, value]], "target:y": [0, 0]}), path)
    with pytest.raises(BadSamples, match=words):
        read_training(path, spec)


def test_a_number_beyond_fp32_is_refused_by_its_row(arrays: Arrays, tmp_path: Path) -> None:
    arrays["target:value"] = arrays["target:value"].astype(np.float64)
    arrays["target:value"][3, 1] = 1e300
    parquet.write_table(flat(arrays), tmp_path / "train.parquet")
    path = tmp_path / "train.parquet"
    assert np.isinf(tensors_of(path, PARQUET, SPEC, 1 << 20)["target:value"][3, 1])
    with pytest.raises(BadSamples, match="row 3: expected finite numbers"):
        read(path)


@pytest.mark.slow
def test_a_megabyte_of_json_lines_without_a_target_is_read_beside_those_that_have_one(tmp_path: Path) -> None:
    rows = [
        {"image": [[float(row)] * 3] * 2, "id": [row], "target:y": row % 4, "target:value": [None, None]}
        for row in range(20_000)
    ]
    rows[-1]["target:value"] = [1.0, 2.0]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert path.stat().st_size > 1 << 20
    data = read_training(path, SPEC, masked=True)
    assert data.rows == len(rows) and data.samples.targets["value"][-1].tolist() == [1.0, 2.0]
    assert np.isnan(data.samples.targets["value"][:-1]).all()
