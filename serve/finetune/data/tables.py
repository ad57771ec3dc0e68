"""Parquet, CSV, JSON lines and tars of pictures as tensors.

A column has the name of an input or ``target:OUTPUT``, and holds a number or (nested) lists of them in each row; or an
input of several elements has a column for each: ``x.0``, ``x.1``, … in C order. An empty cell of floats is NaN.
A tar holds what a folder of pictures does (`exporters/inputs/picture_folder.py`): folders named as the labels.
"""

import itertools
import tarfile
import tempfile
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from ....exporters.inputs.picture_folder import read_pictures
from ....exporters.inputs.samples import TARGET
from ....models.errors import BadInput, BadSamples
from ....models.files.durable import no_space_left
from ....models.files.guarded_reading import guarded
from ....models.spec.spec import ModelSpec, TensorSpec
from ..judging.judging_metrics import classifies

PARQUET, JSON_LINES, CSV, TAR = "parquet", "JSON lines", "CSV", "tar"
MOST_PICTURES = 1_000_000
# Bytes that pyarrow reads at a time: its default, its limit.
_LEAST_BLOCK, _LARGEST_BLOCK = 1 << 20, 2**31 - 1
IN_WORK = ".upload-table-"  # beside the upload, `Files` deletes at the next start what a killed process left


@guarded("a table")
def kind_of(path: Path, spec: ModelSpec) -> str | None:
    """The kind of table that a file is, by its first bytes; None for npz and safetensors. Raises BadSamples."""
    with path.open("rb") as file:
        head = file.read(1 << 16)
    if head[:4] == b"PAR1":
        return PARQUET
    if head[257:262] == b"ustar":
        return TAR
    if head[:2] == b"PK" or head[8:9] == b"{":  # npz; safetensors, behind the length of its header
        return None
    names = {tensor.name for tensor in spec.inputs}
    with suppress(UnicodeDecodeError):
        line = head.split(b"\n")[0].decode("utf-8-sig").strip()
        if line.startswith("{") and line[1:].lstrip().startswith('"'):
            return JSON_LINES
        columns = [column.strip().strip('"') for column in line.split(",")]
        if names & {*columns, *(column.rpartition(".")[0] for column in columns)}:
            return CSV
    raise BadSamples(
        f"{path.name}: neither a safetensors or npz file nor a table: the first line of a table is a JSON object, or "
        f"names columns such as {min(names, default='')!r}, in UTF-8 with commas between; it begins with {head[:40]!r}"
    )


@guarded("a table")
def read_table(
    path: Path, kind: str, spec: ModelSpec, max_bytes: int, work: Path | None = None
) -> dict[str, np.ndarray]:
    """The tensors of a file of this kind; ``work``: a folder to unpack it in, by default the file's own. Raises
    BadSamples with what is wrong."""
    try:
        if kind == TAR:
            return pictures_of(path, spec, max_bytes, work)
        return tensors_of(path, kind, spec, max_bytes)
    except BadInput as error:
        raise BadSamples(f"the {kind} file cannot be read: {' '.join(str(error).split())}") from error


def tensors_of(path: Path, kind: str, spec: ModelSpec, max_bytes: int) -> dict[str, np.ndarray]:
    """The tensors that the spec knows, by name; the datatype of each is the spec's, classes are INT64."""
    table = _table(path, kind, max_bytes)
    if not table.num_rows:
        raise BadSamples("it has no rows; give at least 2, one to train on and one held out to judge")
    there = frozenset(table.column_names)
    known: dict[str, tuple[TensorSpec, Any]] = {
        tensor.name: (tensor, tensor.type.numpy) for tensor in spec.inputs
    }
    for tensor in spec.outputs:
        dtype = np.int64 if classifies(tensor) else np.float32
        known[TARGET + tensor.name] = (tensor, dtype)
    found: dict[str, np.ndarray] = {}
    taken: set[str] = set()
    for name, (_, dtype) in known.items():
        columns = _columns(name, there)
        taken.update(columns)
        if columns:
            parts = [_numbers(table.column(column), column, np.dtype(dtype)) for column in columns]
            found[name] = parts[0] if columns == [name] else np.stack(parts, axis=-1)
    if unknown := [column for column in table.column_names if column not in taken]:
        raise BadSamples(
            f"the columns {unknown[:5]} are unknown: expected {sorted(known)}, or 'NAME.0', 'NAME.1', …"
        )
    return {name: np.ascontiguousarray(_shaped(array, known[name][0], spec)) for name, array in found.items()}


def pictures_of(
    path: Path, spec: ModelSpec, max_bytes: int, work: Path | None = None
) -> dict[str, np.ndarray]:
    """The rows of a tar of pictures, as those of the folder that it was made of."""
    with tempfile.TemporaryDirectory(dir=work or path.parent, prefix=IN_WORK) as folder:
        try:
            with tarfile.open(path, "r:") as archive:
                _unpack(archive, Path(folder), max_bytes)
        except tarfile.TarError as error:
            raise BadSamples(str(error)) from error
        return read_pictures(Path(folder), spec, max_bytes)


def _unpack(archive: tarfile.TarFile, folder: Path, max_bytes: int) -> None:
    """Plain files of at most one folder each, under names of their own parts: nothing is written anywhere else."""
    size = 0
    for count, member in enumerate(archive):
        parts = [part for part in PurePosixPath(member.name).parts if part != "."]
        if member.isdir():
            continue
        size += member.size
        if not member.isfile() or not 1 <= len(parts) <= 2 or any(part in ("..", "/") for part in parts):
            raise BadSamples(f"'{member.name[:80]}': expected plain pictures, in folders named as the labels")
        if size > max_bytes or count >= MOST_PICTURES:
            raise BadSamples(f"it holds more than {max_bytes} bytes or {MOST_PICTURES} pictures; give fewer")
        content = archive.extractfile(member)
        assert content is not None
        try:
            (folder / Path(*parts)).parent.mkdir(exist_ok=True)
            (folder / Path(*parts)).write_bytes(content.read())
        except (OSError, ValueError) as error:
            if no_space_left(error):
                raise
            why = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise BadSamples(
                f"'{member.name[:80]}': expected a name that a file can have there: {why}"
            ) from error


def _table(path: Path, kind: str, max_bytes: int) -> Any:
    try:
        import pyarrow
        from pyarrow import csv, parquet
    except ImportError as error:
        raise BadSamples(
            f"Parquet, CSV and JSON lines are read by pyarrow, which cannot be imported here ({error}): send "
            "safetensors or npz, or have the server's operator pip install 'halfeven[finetune]'"
        ) from error

    try:
        if kind == CSV:
            return _named_once(csv.read_csv(path, csv.ReadOptions(block_size=_block(path))))
        if kind == JSON_LINES:
            _check_objects(path)
            return _named_once(_json_lines(path))
        file, batches, size = parquet.ParquetFile(path), [], 0
        for batch in file.iter_batches(batch_size=1024):
            size += batch.nbytes
            if size > max_bytes:
                raise BadSamples(f"its rows need more than {max_bytes} bytes; give fewer")
            batches.append(batch)
        return _named_once(pyarrow.Table.from_batches(batches, file.schema_arrow))
    except (pyarrow.ArrowException, OSError) as error:  # a Parquet file that breaks off is an OSError
        raise BadSamples(str(error)) from error
    except UnicodeDecodeError as error:
        raise BadSamples(f"a column's name is not UTF-8 ({error}); write the file as UTF-8") from None


def _block(path: Path) -> int:
    """Bytes that hold each line whole: pyarrow refuses one that is longer than its block, as those of pictures are."""
    with path.open("rb") as file:
        longest = max(map(len, file), default=0)
    return min(max(_LEAST_BLOCK, longest + 1), _LARGEST_BLOCK)


def _json_lines(path: Path) -> Any:
    """The table of a file of JSON lines. pyarrow 26 gives lists of nothing but nulls a wrong length where numbers come
    late in the file: with the types that it has seen in the end it reads them well."""
    import pyarrow
    from pyarrow import json

    block = json.ReadOptions(block_size=_block(path))
    table = json.read_json(path, block)
    try:
        table.validate(full=True)
    except pyarrow.ArrowInvalid:
        table = json.read_json(path, block, json.ParseOptions(explicit_schema=table.schema))
    return table


def _check_objects(path: Path) -> None:
    """Raises BadSamples for a line that is no object: pyarrow 26 crashes on a file of nothing but nulls."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            start = line.lstrip(b" \t\r\n\xef\xbb\xbf")[:20]
            if start and not start.startswith(b"{"):
                raise BadSamples(
                    f"line {number}: expected an object with a value for each column, got {start!r}"
                )


def _named_once(table: Any) -> Any:
    """Raises BadSamples where a column is there twice."""
    if twice := [name for name, times in Counter(table.column_names).items() if times > 1]:
        raise BadSamples(f"the column {twice[0][:80]!r} is there twice: expected each once")
    return table


def _columns(name: str, there: Collection[str]) -> list[str]:
    """The columns of one tensor. Those behind a gap in the numbers are none of them: they would be other elements."""
    if name in there:
        return [name]
    return list(itertools.takewhile(there.__contains__, (f"{name}.{place}" for place in itertools.count())))


def _numbers(column: Any, name: str, dtype: np.dtype[Any]) -> np.ndarray:
    """``[rows, …]``: every row has lists of the same lengths."""
    import pyarrow.types

    values, lengths = column.combine_chunks(), [len(column)]
    while _is_list(values.type):
        fixed = getattr(values.type, "list_size", None)
        sizes = {fixed} if fixed is not None else set(values.value_lengths().to_pylist())
        if len(sizes) != 1 or None in sizes or values.null_count:
            some = ", ".join(sorted(map(str, sizes))[:5])
            raise BadSamples(f"column '{name}': expected lists of one length in all rows, got {some}")
        lengths.append(sizes.pop())
        values = values.flatten()
    whole = pyarrow.types.is_integer(values.type) or pyarrow.types.is_boolean(values.type)
    if dtype.kind in "iub" and (not whole or values.null_count):
        fault = "an empty cell" if whole else f"{values.type}"
        raise BadSamples(f"column '{name}': expected whole numbers, got {fault}")
    if not (whole or pyarrow.types.is_floating(values.type)):
        raise BadSamples(f"column '{name}': expected numbers, got {values.type}")
    found = values.to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore"):  # a number beyond FP32 becomes infinite, and its row is refused by name
        cast = found.astype(dtype)
    if dtype.kind in "iub" and (wrong := np.flatnonzero(cast != found)).size:  # it would be another number
        row, least, most = wrong[0] // max(1, len(found) // len(column)), *_bounds(dtype)
        raise BadSamples(
            f"column '{name}', row {row}: expected whole numbers from {least} to {most}, got {found[wrong[0]]}"
        )
    return cast.reshape(lengths)


def _bounds(dtype: np.dtype[Any]) -> tuple[int, int]:
    return (0, 1) if dtype.kind == "b" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))


def _is_list(kind: Any) -> bool:
    import pyarrow.types as types

    tests = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view)
    return any(test(kind) for test in (*tests, types.is_large_list_view))


def _shaped(array: np.ndarray, tensor: TensorSpec, spec: ModelSpec) -> np.ndarray:
    """Rows that were written flat in the shape of their tensor, where that is known."""
    inner = tensor.shape[1:] if spec.batched else tensor.shape
    if array.dtype == np.int64 and classifies(tensor):
        inner = inner[:-1]
    sizes = [dim.minimum for dim in inner if dim.fixed]
    if len(sizes) == len(inner) and array.ndim <= 2 and array.size == len(array) * np.prod(sizes):
        return array.reshape(len(array), *sizes)
    return array
