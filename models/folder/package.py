"""A model folder: ``model.toml`` and the files it names, read strictly and without running any of them."""

import re
import tomllib
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..errors import BadFolder
from ..files.guarded_reading import guarded, reading
from ..files.opened_file import opened_named
from ..spec.spec import Batching, ModelSpec, ParityLimits
from .model_keys import BATCHING, EMBEDDINGS, HALF_DTYPES, KERAS_LEVELS, PARITY, PRECISION, SOURCE, TOP
from .model_name import NAME
from .toml_reader import one_of
from .training_reader import TrainingReader, net_weights

_OF_A_PROGRAM = ("archive_format", "serialized_exported_program.json")  # the second: up to torch 2.6
_MOST_BYTES = 4 * 2**20  # of a model.toml


@dataclass(frozen=True, slots=True)
class Precision:
    """The precision asked for: Apex's level, the half dtype, and the nodes to keep in FP32."""

    level: str = "O1"
    dtype: str = "fp16"
    keep: tuple[str, ...] = ()
    embeddings: str = "keep"

    @classmethod
    def parse(
        cls, level: str, dtype: str | None, keep: Iterable[str], embeddings: str, where: str
    ) -> "Precision":
        """The precision that the settings ask for. Keras' words for the level are taken too, and mean a dtype.
        ``dtype`` None: it was not given. Raises BadFolder naming ``where``."""
        one_of(level, PRECISION["level"].one_of, f"{where} level")
        if dtype is not None:
            one_of(dtype, HALF_DTYPES, f"{where} dtype")
        one_of(embeddings, EMBEDDINGS, f"{where} embeddings")
        level_meant, meant = KERAS_LEVELS.get(level, (level, None))
        if None not in (dtype, meant) and dtype != meant and level_meant != "O0":
            raise BadFolder(f"{where} level {level} means {meant}, and dtype says {dtype}: give one of them")
        return cls(level_meant, dtype or meant or "fp16", tuple(keep), embeddings)

    def to_json(self) -> dict[str, Any]:
        """The precision that was asked for, as the first entries of a version's plan (``precision.json``)."""
        return {
            "level": self.level,
            "dtype": self.dtype,
            "embeddings": self.embeddings,
            "keep": list(self.keep),
        }


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder that was read; nothing in it has been run.

    ``source`` is ``file.py:function``, ``hf:folder`` (transformers), ``program.pt2`` or ``model.onnx``.
    ``file_names``: name → name in the ONNX file. ``guessed``: model.toml's text where there is none, with ``notes``.
    ``metrics``: what judges a fine-tuned version, the first that fits an output before the others. ``loss``: what it
    minimises, a name of `loss_and_optimizer_names.py` or ``file.py:function``; None: the default of the output's kind.
    ``transform``: ``file.py:function`` that augments a row. ``own_optimizer``: one that makes the optimizer of a
    training. ``fp32_modules``: patterns of the modules that it computes in FP32. ``declared_steps``: of a training with
    several optimizers (`training_reader.py`). ``module``: an ``nn.Module`` of this process, which is captured instead
    of ``source``.
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
    metrics: tuple[str, ...] = ()
    loss: str | None = None
    transform: str | None = None
    own_optimizer: str | None = None
    fp32_modules: tuple[str, ...] = ()
    declared_steps: Mapping[str, Any] | None = None
    module: Any = None

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

    @property
    def weight_files(self) -> tuple[Path, ...]:
        """The file of the weights; with an index of several safetensors files all that lie beside it."""
        if self.weights is None:
            return ()
        beside = self.weights.name.endswith(".safetensors.index.json")
        return (self.weights, *(sorted(self.weights.parent.glob("*.safetensors")) if beside else ()))

    @property
    def net_weights(self) -> tuple[Path, ...]:
        """The weights of the nets beside the model."""
        return tuple(self.folder / name for name in net_weights(self.declared_steps))


@guarded("a model folder")
def read_folder(folder: Path) -> ModelFolder:
    """Read ``folder/model.toml``. Raises BadFolder with file, key and the nearest valid key."""
    folder = folder.resolve()
    file = folder / "model.toml"
    try:
        with opened_named(file, _MOST_BYTES) as opened:
            text = opened.read().decode()
    except FileNotFoundError as error:
        raise BadFolder(
            f"{file} does not exist: a model folder needs a model.toml (name, source, [[inputs]] and "
            '[[outputs]]; the tutorial, docs/README.md, has one to copy under "A model folder")'
        ) from error
    except NotADirectoryError as error:
        raise BadFolder(f"{folder} is a file: expected the model folder that has the model.toml") from error
    except (OSError, UnicodeDecodeError) as error:
        raise BadFolder(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return parse_folder(text, file)


def parse_folder(text: str, file: Path) -> ModelFolder:
    """``text`` as the model.toml that is, or would be, ``file``. Raises BadFolder as `read_folder` does."""
    try:
        data = tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, and the interpreter's for a number of very many digits
        raise BadFolder(f"{file} cannot be read: {error}") from error
    except RecursionError as error:
        raise BadFolder(f"{file} cannot be read: its values are nested too deep") from error
    try:
        with reading(file, "a model.toml"):
            return _Reader(file).read(data)
    except OSError as error:  # of a path that the file names: too long, for example
        raise BadFolder(f"{file} names what cannot be looked at: {error.strerror}") from error


def check_program(path: Path) -> None:
    """Raises BadFolder for a file that is no archive of ``torch.export.save``, by the names of its entries."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError):
        names = []
    if not any(name.endswith(_OF_A_PROGRAM) for name in names):
        raise BadFolder(
            f"{path} is not an exported program: expected the archive that torch.export.save writes (no state dict, no "
            "TorchScript); is the file whole?"
        )


class _Reader(TrainingReader):
    """Makes a ModelFolder from the parsed TOML."""

    def read(self, data: Mapping[str, Any]) -> ModelFolder:
        self.known(data, TOP, "")
        for name, key in TOP.items():
            if key.needed and name not in data:
                raise self.error(f"the key '{name}' is missing")
        precision = self.table(data, "precision", PRECISION)
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
                precision.get("dtype"),
                self.strings(precision.get("keep", []), "precision.keep"),
                precision.get("embeddings", "keep"),
                f"{self.file}: [precision]",
            ),
            file_names=self.file_names(data),
            metrics=self.metrics(data),
            loss=self.loss(data),
            transform=self.transform(data),
            own_optimizer=self.own_optimizer(data),
            fp32_modules=self.fp32_modules(data),
            declared_steps=self.declared_steps(data),
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
        given = {"max_batch_size": TOP["max_batch_size"].default, "form": TOP["form"].default, **data}
        rows, form = self.typed(given, "max_batch_size", int), self.typed(given, "form", str)
        self.held(rows, TOP["max_batch_size"], "max_batch_size")
        self.held(form, TOP["form"], "form")
        limits = self.table(data, "parity", PARITY)
        return ModelSpec(
            name=name,
            inputs=self.tensors(data, "inputs", batched=rows > 0),
            outputs=self.tensors(data, "outputs", batched=rows > 0),
            max_batch_size=rows,
            form=form,
            parity=ParityLimits(**limits, overridden=tuple(sorted(limits.keys() - {"min_recall"}))),
            batching=self.batching(data, rows),
        )

    def batching(self, data: Mapping[str, Any], rows: int) -> Batching:
        said = {**self.typed({"batching": {}, **data}, "batching", dict)}
        # `buckets` and `lengths` are lists; `buckets` may be a word.
        buckets, lengths = said.pop("buckets", "auto"), said.pop("lengths", [])
        numbers = self.table({"batching": said}, "batching", BATCHING)
        if 0 < numbers.get("max_request_rows", 0) < rows:
            raise self.error(
                f"[batching] max_request_rows = {numbers['max_request_rows']}: expected at least max_batch_size "
                f"({rows}), or 0 for 16 times that"
            )
        sizes = self.ascending(lengths, "lengths", "sizes of an axis, such as [16, 32, 64]")
        return Batching(**numbers, buckets=self.buckets(buckets, rows), lengths=sizes)

    def buckets(self, value: Any, rows: int) -> tuple[int, ...] | Literal["auto"]:
        if value == "auto":
            return "auto"
        found = self.ascending(value, "buckets", "'auto' or numbers of rows, such as [1, 2, 4, 8]")
        if found[-1:] > (rows,):
            raise self.error(
                f"[batching] buckets = {value}: expected numbers of at most max_batch_size ({rows})"
            )
        return found

    def ascending(self, value: Any, key: str, expected: str) -> tuple[int, ...]:
        if not isinstance(value, list) or not all(type(item) is int and item > 0 for item in value):
            raise self.error(f"[batching] {key} = {value!r}: expected {expected}")
        if value != sorted(set(value)):
            raise self.error(f"[batching] {key} = {value}: expected ascending numbers")
        return tuple(value)

    def source(self, source: str) -> str:
        if source.startswith("hf:"):
            return self.transformers(source)
        if not re.fullmatch(SOURCE, source):
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
