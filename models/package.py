"""A model folder: ``model.toml`` and the files it names, read strictly and without running any of them."""

import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .batch_axis import batch_first
from .datatypes import DATATYPES
from .errors import BadFolder
from .pictures.pixels import Picture
from .spec import FORMS, KINDS, Batching, Dim, ModelSpec, ParityLimits, TensorSpec
from .store import NAME
from .toml_reader import TomlReader, one_of
from .value_range import ValueRange
from .wire import Wire

MAX_TENSORS = 256
MAX_RANK = 16

# The words of Keras' and TensorFlow's dtype policies, as (level, dtype).
_KERAS_LEVELS = {
    "float32": ("O0", "fp16"),
    "mixed_float16": ("O1", "fp16"),
    "mixed_bfloat16": ("O1", "bf16"),
    "float16": ("O3", "fp16"),
    "bfloat16": ("O3", "bf16"),
}
LEVELS = ("O0", "O1", "O2", "O3")
HALF_DTYPES = ("fp16", "bf16")


@dataclass(frozen=True, slots=True)
class Precision:
    """The precision asked for: Apex's level, the half dtype, and the nodes to keep in FP32."""

    level: str = "O1"
    dtype: str = "fp16"
    keep: tuple[str, ...] = ()
    embeddings: str = "keep"

    @classmethod
    def parse(cls, level: str, dtype: str, keep: Iterable[str], embeddings: str, where: str) -> "Precision":
        """Also takes Keras' words for the level. Raises BadFolder naming ``where``."""
        level, dtype = _KERAS_LEVELS.get(level, (level, dtype))
        one_of(level, (*LEVELS, *_KERAS_LEVELS), f"{where} level")
        one_of(dtype, HALF_DTYPES, f"{where} dtype")
        one_of(embeddings, ("keep", "half"), f"{where} embeddings")
        return cls(level, dtype, tuple(keep), embeddings)


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder that was read; nothing in it has been run.

    ``source`` is ``file.py:function``, ``hf:folder`` (transformers), ``program.pt2`` or ``model.onnx``.
    ``file_names``: name → name in the ONNX file. ``guessed``: model.toml's text where there is none, with ``notes``.
    """

    folder: Path
    source: str
    path: tuple[Path, ...]
    weights: Path | None
    samples: Path | None
    spec: ModelSpec
    precision: Precision
    file_names: Mapping[str, str] = field(default_factory=dict)
    guessed: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """The kind of the source: "python", "hf", "program" or "onnx"."""
        if self.source.startswith("hf:"):
            return "hf"
        return {".pt2": "program", ".onnx": "onnx"}.get(Path(self.source).suffix, "python")

    @property
    def source_files(self) -> tuple[Path, ...]:
        """The files that the source names; of a transformers folder the configuration and the weights."""
        if self.kind != "hf":
            return (self.folder / self.source.partition(":")[0],)
        inside = self.folder / self.source.removeprefix("hf:")
        return (inside / "config.json", *sorted(inside.glob("*.safetensors")))


def read_folder(folder: Path) -> ModelFolder:
    """Read ``folder/model.toml``. Raises BadFolder with file, key and the nearest valid key."""
    folder = folder.resolve()
    file = folder / "model.toml"
    try:
        text = file.read_text()
    except FileNotFoundError as error:
        raise BadFolder(
            f"{file} does not exist: a model folder needs a model.toml (name, source, [[inputs]] and "
            '[[outputs]]; the README has one to copy under "Bring your own model")'
        ) from error
    except NotADirectoryError as error:
        raise BadFolder(f"{folder} is a file: expected the model folder that has the model.toml") from error
    except (OSError, UnicodeDecodeError) as error:
        raise BadFolder(f"{file} cannot be read: {error}") from error
    return parse_folder(text, file)


def parse_folder(text: str, file: Path) -> ModelFolder:
    """``text`` as the model.toml that is, or would be, ``file``. Raises BadFolder as `read_folder` does."""
    try:
        return _Reader(file).read(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise BadFolder(f"{file} cannot be read: {error}") from error


class _Reader(TomlReader):
    """Makes a ModelFolder from the parsed TOML."""

    def read(self, data: Mapping[str, Any]) -> ModelFolder:
        self.known(data, _TOP, "")
        for key in ("name", "source", "inputs", "outputs"):
            if key not in data:
                raise self.error(f"the key '{key}' is missing")
        precision = self.table(
            data, "precision", {"level": str, "dtype": str, "keep": list, "embeddings": str}
        )
        spec = self.spec(data)
        return ModelFolder(
            folder=self.file.parent,
            source=self.source(self.typed(data, "source", str)),
            path=tuple(self.root(item) for item in self.strings(data.get("path", []), "path")),
            weights=self.existing(data.get("weights"), "weights", "weights.safetensors"),
            samples=self.existing(None, "samples", "samples.safetensors") or self.pictures(spec),
            spec=spec,
            precision=Precision.parse(
                precision.get("level", "O1"),
                precision.get("dtype", "fp16"),
                self.strings(precision.get("keep", []), "precision.keep"),
                precision.get("embeddings", "keep"),
                f"{self.file}: [precision]",
            ),
            file_names=self.file_names(data),
        )

    def file_names(self, data: Mapping[str, Any]) -> dict[str, str]:
        tensors = [*data["inputs"], *data["outputs"]]
        found = {t["name"]: self.typed(t, "file_name", str, t["name"]) for t in tensors if "file_name" in t}
        if found and not data["source"].endswith(".onnx"):
            raise self.error(
                f"file_name = {next(iter(found.values()))!r}: only tensors of an ONNX file have one"
            )
        return found

    def spec(self, data: Mapping[str, Any]) -> ModelSpec:
        name = self.typed(data, "name", str)
        if not NAME.fullmatch(name):
            raise self.error(f"name = {name!r} is not a model name: expected {NAME.pattern}")
        rows = self.typed({"max_batch_size": 64, **data}, "max_batch_size", int)
        if not 0 <= rows <= 65536:
            raise self.error(f"max_batch_size = {rows}: expected 0 (not batched) to 65536")
        form = self.typed({"form": "auto", **data}, "form", str)
        one_of(form, FORMS, f"{self.file}: form")
        limits = self.table(data, "parity", dict.fromkeys(_PARITY, float))
        if bad := [key for key, value in limits.items() if not 0 <= value < math.inf]:
            raise self.error(f"[parity] {bad[0]} = {limits[bad[0]]}: expected a finite number of at least 0")
        if bad := [key for key in _SHARES if limits.get(key, 0) > 1]:
            raise self.error(f"[parity] {bad[0]} = {limits[bad[0]]}: expected a share from 0 to 1")
        return ModelSpec(
            name=name,
            inputs=self.tensors(data, "inputs", batched=rows > 0),
            outputs=self.tensors(data, "outputs", batched=rows > 0),
            max_batch_size=rows,
            form=form,
            parity=ParityLimits(**limits, overridden=tuple(sorted(limits))),
            batching=self.batching(data, rows),
        )

    def batching(self, data: Mapping[str, Any], rows: int) -> Batching:
        said = self.typed({"batching": {}, **data}, "batching", dict)
        self.known(said, (*_BATCHING, "buckets"), "batching")
        numbers = {key: self.typed(said, key, int, "batching") for key in said if key != "buckets"}
        if bad := [key for key, value in numbers.items() if value < _BATCHING[key]]:
            raise self.error(
                f"[batching] {bad[0]} = {numbers[bad[0]]}: expected a number of at least {_BATCHING[bad[0]]}"
            )
        if 0 < numbers.get("max_request_rows", 0) < rows:
            raise self.error(
                f"[batching] max_request_rows = {numbers['max_request_rows']}: expected at least max_batch_size "
                f"({rows}), or 0 for 16 times that"
            )
        return Batching(**numbers, buckets=self.buckets(said.get("buckets", "auto"), rows))

    def buckets(self, value: Any, rows: int) -> tuple[int, ...] | Literal["auto"]:
        if value == "auto":
            return "auto"
        if not isinstance(value, list) or not all(type(item) is int and item > 0 for item in value):
            raise self.error(
                f"[batching] buckets = {value!r}: expected 'auto' or numbers of rows, such as [1, 2, 4, 8]"
            )
        if value != sorted(set(value)) or value[-1:] > [rows]:
            raise self.error(
                f"[batching] buckets = {value}: expected ascending numbers of at most max_batch_size ({rows})"
            )
        return tuple(value)

    def tensors(self, data: Mapping[str, Any], key: str, batched: bool) -> tuple[TensorSpec, ...]:
        entries = self.typed(data, key, list)
        if not 1 <= len(entries) <= MAX_TENSORS:
            raise self.error(f"[[{key}]]: expected 1 to {MAX_TENSORS} tensors, got {len(entries)}")
        tensors = tuple(self.tensor(entry, f"{key}[{i}]", batched) for i, entry in enumerate(entries))
        names = [tensor.name for tensor in tensors]
        if twice := [name for name in names if names.count(name) > 1]:
            raise self.error(f"[[{key}]]: the name '{twice[0]}' stands there twice")
        return tensors

    def tensor(self, entry: Any, where: str, batched: bool) -> TensorSpec:
        if not isinstance(entry, dict):
            raise self.error(f"{where}: expected a table, got {entry!r}")
        self.known(entry, _TENSOR, where)
        datatype = self.typed(entry, "datatype", str, where)
        one_of(datatype, tuple(DATATYPES), f"{self.file}: {where}.datatype")
        kind = self.typed({"kind": "tensor", **entry}, "kind", str, where)
        one_of(kind, KINDS, f"{self.file}: {where}.kind")
        name = self.typed(entry, "name", str, where)
        if not name:
            raise self.error(f"{where}.name is empty: a tensor needs a name")
        axis = self.batch_axis(entry, where, batched)
        tensor = TensorSpec(
            name=name,
            datatype=datatype,
            shape=self.shape(self.typed(entry, "shape", list, where), where, batched, axis),
            kind=kind,
            labels=self.labels(entry, where),
            picture=self.picture(entry, where),
            wire=self.wire(entry, where),
            range=self.range(entry, where),
            batch_axis=axis,
        )
        try:
            if tensor.wire is not None:
                tensor.wire.check(datatype)
            if tensor.picture is not None or kind == "image":
                Picture.of(tensor, batched)
            if kind == "score":
                _check_score(tensor, batched)
        except BadFolder as error:
            raise self.error(f"{where}.{error}") from None
        return tensor

    def batch_axis(self, entry: Mapping[str, Any], where: str, batched: bool) -> int:
        axis, shape = self.typed({"batch_axis": 0, **entry}, "batch_axis", int, where), entry.get("shape")
        if axis and not batched:
            raise self.error(
                f"{where}.batch_axis = {axis}: max_batch_size = 0 says that the model is not batched; leave one out"
            )
        if axis and ("picture" in entry or entry.get("kind") == "image"):
            raise self.error(f"{where}.batch_axis = {axis}: pictures have the batch as their first axis")
        if isinstance(shape, list) and not 0 <= axis < max(len(shape), 1):
            raise self.error(
                f"{where}.batch_axis = {axis}: expected an axis of shape = {shape}, counted from 0 "
                f"(0 to {max(len(shape) - 1, 0)})"
            )
        return axis

    def shape(self, items: list[Any], where: str, batched: bool, axis: int) -> tuple[Dim, ...]:
        """The dimensions with the batch, which is on ``axis``, in front."""
        if len(items) > MAX_RANK:
            raise self.error(f"{where}.shape: expected at most {MAX_RANK} dimensions, got {len(items)}")
        try:
            shape = tuple(Dim.parse(item) for item in items)
        except BadFolder as error:
            raise self.error(f"{where}.shape: {error}") from None
        if batched and (not shape or shape[axis].fixed):
            which = f"axis {axis}" if axis else "the first axis"
            raise self.error(
                f"{where}.shape = {items}: {which} is the batch and must be free (-1); "
                "set batch_axis where the batch is another axis, or max_batch_size = 0 for a model that is not batched"
            )
        return batch_first(shape, axis)

    def labels(self, entry: Mapping[str, Any], where: str) -> tuple[str, ...]:
        if "labels_file" not in entry:
            return tuple(self.strings(entry.get("labels", []), f"{where}.labels"))
        if "labels" in entry:
            raise self.error(f"{where} has both labels and labels_file: expected one of them")
        path = self.existing(self.typed(entry, "labels_file", str, where), f"{where}.labels_file", None)
        assert path is not None
        try:
            return tuple(path.read_text(encoding="utf-8").splitlines())
        except UnicodeDecodeError as error:
            raise self.error(f"{where}.labels_file: {path} is not UTF-8 text ({error})") from error

    def picture(self, entry: Mapping[str, Any], where: str) -> Mapping[str, Any] | None:
        if "picture" not in entry:
            return None
        return self.table(entry, "picture", _PICTURE, where)

    def range(self, entry: Mapping[str, Any], where: str) -> ValueRange | None:
        if "range" not in entry:
            return None
        datatype, shape = entry["datatype"], entry["shape"]
        if where.startswith("outputs") or DATATYPES[datatype].is_float or datatype == "BOOL":
            raise self.error(f"{where}.range: only an input of integers has a range, expected none here")
        try:
            found = ValueRange.parse(entry["range"])
        except ValueError as error:
            raise self.error(f"{where}.range: {error}") from None
        if len(found.low) > 1 and (not shape or shape[-1] != len(found.low)):
            raise self.error(
                f"{where}.range has {len(found.low)} pairs: expected one for each place of the last axis of "
                f"shape = {shape}, or a single pair"
            )
        return found

    def wire(self, entry: Mapping[str, Any], where: str) -> Wire | None:
        said = [key for key in _WIRE if key in entry]
        if not said:
            return None
        if where.startswith("outputs"):
            raise self.error(f"{where}.{said[0]}: answers have the model's datatype; expected it on an input")
        if "wire_datatype" not in entry:
            raise self.error(f"{where}.{said[0]} is given without wire_datatype; add one, such as 'UINT8'")
        datatype = self.typed(entry, "wire_datatype", str, where)
        one_of(datatype, tuple(DATATYPES), f"{self.file}: {where}.wire_datatype")
        scale, offset = (
            self.typed({key: value, **entry}, key, float, where)
            for key, value in (("wire_scale", 1.0), ("wire_offset", 0.0))
        )
        if not math.isfinite(scale) or scale == 0.0 or not math.isfinite(offset):
            raise self.error(f"{where}: wire_scale = {scale}, wire_offset = {offset}: expected finite numbers, "
                             "the scale not 0")  # fmt: skip
        if "picture" in entry and (datatype != "UINT8" or len(said) > 1):
            raise self.error(
                f"{where}: requests for a picture carry its pixels: expected wire_datatype = 'UINT8' alone "
                "(scale, mean and std of the picture entry are applied on the device)"
            )
        return Wire(datatype, scale, offset)

    def source(self, source: str) -> str:
        if source.startswith("hf:"):
            return self.transformers(source)
        if not re.fullmatch(r"[^:]+\.py:[A-Za-z_]\w*|[^:]+\.(pt2|onnx)", source):
            raise self.error(
                f"source = {source!r}: expected a Python file and a function, such as 'model.py:build', "
                "an exported program ('program.pt2'), an ONNX file ('model.onnx') or a transformers folder ('hf:.')"
            )
        self.existing(source.partition(":")[0], "source", None)
        return source

    def transformers(self, source: str) -> str:
        """A folder with config.json and safetensors weights, as ``save_pretrained`` writes it."""
        folder = self.file.parent / source.removeprefix("hf:")
        for pattern in ("config.json", "*.safetensors"):
            if not folder.is_dir() or not any(folder.glob(pattern)):
                raise self.error(
                    f"source = {source!r}: there is no {pattern} in {folder}; expected a local transformers "
                    "folder, as model.save_pretrained() writes it (no name of a hub, no pickled weights)"
                )
        return source

    def existing(self, value: Any, key: str, default: str | None) -> Path | None:
        """The path that a key names inside the folder; the default only where it exists."""
        if value is None:
            path = self.file.parent / (default or "")
            return path if default and path.is_file() else None
        if not isinstance(value, str):
            raise self.error(f"{key} = {value!r}: expected a file name")
        path = self.file.parent / value
        if not path.is_file():
            raise self.error(f"{key} = {value!r}: there is no such file in {self.file.parent}")
        return path

    def pictures(self, spec: ModelSpec) -> Path | None:
        """The folder ``samples`` of a model that takes pictures, where there is no samples file."""
        path = self.file.parent / "samples"
        return path if path.is_dir() and any(tensor.picture for tensor in spec.inputs) else None

    def root(self, item: str) -> Path:
        """An import root, as ``path`` names it from the folder."""
        path = self.file.parent / item
        if not path.is_dir():
            raise self.error(
                f"path = {item!r}: there is no such folder (it is taken from {self.file.parent})"
            )
        return path


def _check_score(tensor: TensorSpec, batched: bool) -> None:
    inner = tensor.shape[1:] if batched else tensor.shape
    if not tensor.type.is_float or any((dim.minimum, dim.maximum) != (1, 1) for dim in inner):
        raise BadFolder(
            f"kind = 'score' is one floating number a row: expected a shape such as [-1] or [-1, 1], got "
            f"{tensor.datatype} {tensor.describe_shape()}; several classes are 'probabilities', a vector 'embedding'"
        )


_PICTURE = {"size": list, "color": str, "scale": float, "mean": list, "std": list}
_SHARES = ("max_flips", "max_ties", "max_swaps", "min_top10_overlap")
_PARITY = ("max_error_u", "min_sqnr_db", "min_slice_sqnr_db", "max_kl_nats", *_SHARES)
_BATCHING = {  # with the least value of each
    "max_queue_delay_us": 0, "max_queue_size": 1, "max_queue_bytes": 1, "max_queue_ms": 0,
    "max_batch_bytes": 0, "timeout_ms": 0, "max_request_rows": 0,
}  # fmt: skip
_TOP = (
    "name", "source", "path", "weights", "max_batch_size", "form",
    "inputs", "outputs", "precision", "parity", "batching",
)  # fmt: skip
_WIRE = ("wire_datatype", "wire_scale", "wire_offset")
_TENSOR = (
    "name", "datatype", "shape", "batch_axis", "file_name", "kind", "labels", "labels_file", "picture", "range", *_WIRE,
)  # fmt: skip
