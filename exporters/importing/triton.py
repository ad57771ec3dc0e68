"""Triton model repositories: every model of an ONNX file becomes a model folder, one for each version that is served.

The layout: https://github.com/triton-inference-server/server/blob/main/docs/user_guide/model_repository.md. A client of
the model needs no change: names, datatypes, sizes and the batch are those of ``config.pbtxt``, and where it states
none those of the file, as Triton completes them.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath

from onnx import GraphProto, ValueInfoProto

from ...models.errors import BadFolder, HalfevenError
from ...models.files.guarded_reading import reading
from ..guessing.guess import Guess, name_for
from ..guessing.onnx_file import guess_onnx
from ..guessing.writing import copy_model_file, filled_folder
from ..onnx.reading.signature import datatype_of, size_of
from .imported import Refusal, Written, foreign_file, foreign_text, write_toml
from .triton_config import TritonConfig, TritonTensor, read_config

CONFIG = "config.pbtxt"
MAX_LABELS_BYTES = 16 << 20
# The back end by the file that a version has, where config.pbtxt names none.
_FILES = {
    "model.onnx": "onnxruntime", "model.plan": "tensorrt", "model.pt": "pytorch", "model.py": "python",
    "model.savedmodel": "tensorflow", "model.graphdef": "tensorflow", "model.xml": "openvino",
}  # fmt: skip
_PYTORCH = (
    "TorchScript has lost the module that it was made of: export that one with torch.onnx.export or "
    "torch.export.save, and give the file to `halfeven init`"
)
_TENSORRT = (
    "a plan runs on one kind of GPU alone: give the ONNX file that it was built from to `halfeven init`"
)
_TENSORFLOW = "write the model as ONNX (tf2onnx does), and give the file to `halfeven init`"
_WAYS = {
    "tensorrt": _TENSORRT,
    "tensorrt_plan": _TENSORRT,
    "pytorch": _PYTORCH,
    "pytorch_libtorch": _PYTORCH,
    "tensorflow": _TENSORFLOW,
    "tensorflow_savedmodel": _TENSORFLOW,
    "tensorflow_graphdef": _TENSORFLOW,
    "openvino": "give the ONNX file or the module that it was converted from to `halfeven init`",
    "python": "its code answers requests itself: write a function that gives the torch.nn.Module in it, and give "
    "model.py:function to `halfeven init`",
}  # fmt: skip
_ONNX = ("onnxruntime", "onnxruntime_onnx")


def is_repository(path: Path) -> bool:
    """True if a folder is a Triton model (it has a config.pbtxt or a version with a model file), or a Triton repository
    (at least one of its folders is such a model)."""
    return _is_model(path) or any(_is_model(place) for place in _folders(path))


def take_repository(path: Path, out: Path, overwrite: bool) -> Iterator[Written | Refusal]:
    """Write every model of a repository, or the one model, into a folder of its name below ``out``.

    Several versions of a model get a folder each in it, named by their numbers, in ascending order. Whatever is wrong
    with one model is its refusal; the others are taken.
    """
    taken, path = dict[str, str](), path.resolve()
    for place in [path] if _is_model(path) else filter(_is_model, _folders(path)):
        try:
            if (other := taken.setdefault(name_for(place / "model"), place.name)) != place.name:
                raise BadFolder(
                    f"{place.name} and {other} have the same name here: rename one of the folders"
                )
            with reading(place, "a model of a Triton repository"):
                written = _Model(place, path, out, overwrite).written()
            yield from written
        except (HalfevenError, OSError) as error:
            yield Refusal(place.name, error)


@dataclass(frozen=True, slots=True)
class _Version:
    number: int
    file: Path


class _Model:
    """``root``: the folder that was given, out of which no file is taken."""

    def __init__(self, path: Path, root: Path, out: Path, overwrite: bool) -> None:
        self.path, self.root, self.out, self.overwrite = path, root, out, overwrite
        has_config = os.path.lexists(path / CONFIG)
        self.config = read_config(self.path / CONFIG, root) if has_config else TritonConfig()
        self.left = list(self.config.left)
        self.notes = [] if has_config else [f"there is no {CONFIG}: the file says what it takes and gives"]

    def written(self) -> list[Written]:
        versions = self.versions()
        name = name_for(self.path / "model")
        if name != self.path.name:
            self.left.append(
                f"the name '{self.path.name}': a name has letters, digits, '.', '_' and '-' alone"
            )
        target, written = self.out / name, list[Written]()
        # Every version is guessed before one is written: a fault of the last one leaves nothing behind.
        for version in versions:
            guess = self.guess(version, name)
            place = target / str(version.number) if len(versions) > 1 else target
            origin, left = f"version {version.number} of {self.path}", tuple(dict.fromkeys(self.left))
            written.append(Written(guess, origin, place, left, tuple(self.notes)))
        with filled_folder(target, self.overwrite) as folder:
            for version, one in zip(versions, written, strict=True):
                place = folder / one.folder.relative_to(target)
                place.mkdir(exist_ok=True)
                copy_model_file(version.file, place, one.guess.source)
                write_toml(one.guess, one.left, place)
        return written

    def versions(self) -> list[_Version]:
        """The versions that the version policy serves, in ascending order. Raises BadFolder where none is an ONNX
        file."""
        found = sorted(int(place.name) for place in _folders(self.path) if _is_version(place))
        for place in _folders(self.path):
            if not _is_version(place) and _file_in(place, self.config.file):
                self.left.append(
                    f"folder '{place.name}': a version's name is a number that does not begin with 0"
                )
        self.check_back_end([self.path / str(number) for number in found])
        kind, *numbers = self.config.policy
        if kind == "latest":
            served = found[-max(numbers[0], 1) :]
        else:
            served = found if kind == "all" else [number for number in found if number in numbers]
            self.left += [f"version {number}: it is not there" for number in numbers if number not in found]
        if not served:
            raise BadFolder(
                f"{self.path} has no version to take: expected a folder such as 1 with a model.onnx in it"
            )
        self.left += [f"version {number}: version_policy does not serve it" for number in found
                      if number not in served]  # fmt: skip
        return [_Version(number, self.file_of(self.path / str(number))) for number in served]

    def check_back_end(self, versions: list[Path]) -> None:
        """Raises BadFolder naming the way out for another back end than ONNX Runtime."""
        names = (name for name in _FILES if any((place / name).exists() for place in versions))
        backend = self.config.backend or next((_FILES[name] for name in names), "onnxruntime")
        if backend == "ensemble":
            steps = ", ".join(self.config.steps) or "none"
            raise BadFolder(f"an ensemble is no model of its own: its steps ({steps}) are taken one by one where they "
                            "are ONNX files, and the caller passes the answers on")  # fmt: skip
        if backend not in _ONNX:
            way = _WAYS.get(backend, "write the model as ONNX, and give the file to `halfeven init`")
            raise BadFolder(f"its back end is '{backend}', expected onnxruntime: {way}")

    def file_of(self, version: Path) -> Path:
        file = _file_in(version, self.config.file)
        if file is None:
            raise BadFolder(
                f"{version}: expected the model in {self.config.file or 'model.onnx'}, which is not there"
            )
        foreign_file(self.root, file, "a model").close()
        return file

    def guess(self, version: _Version, name: str) -> Guess:
        """The guessed model.toml. Where config.pbtxt and the file differ, config.pbtxt decides, as it does in
        Triton."""
        rows, config = self.config.max_batch_size, self.config
        stated = {tensor.name: tensor for tensor in (*config.inputs, *config.outputs)}
        narrow = partial(_narrow, config=config, where=version.file, left=self.left)
        guess = guess_onnx(version.file, narrow, None if rows is None else rows > 0)
        for tensor in guess.spec.inputs if not guess.spec.batched else ():
            dims = stated[tensor.name].dims if tensor.name in stated else None
            if dims is not None and len(dims) < len(tensor.shape):
                raise BadFolder(
                    f"{CONFIG} leaves the batch out of input '{tensor.name}' and has no max_batch_size, and the file "
                    "has no batch: state max_batch_size: 0, and the first axis in dims"
                )
        labels = {tensor.name: self.labels(tensor) for tensor in config.outputs if tensor.labels}
        spec = replace(
            guess.spec,
            name=name,
            max_batch_size=guess.spec.max_batch_size if rows is None else rows,
            outputs=tuple(
                replace(tensor, labels=labels.get(tensor.name, ())) for tensor in guess.spec.outputs
            ),
            batching=config.batching,
        )
        known = {(name, "shape") for name, tensor in stated.items() if tensor.dims and -1 not in tensor.dims}
        doubts = {place: why for place, why in guess.doubts.items() if place not in known}
        # Triton takes a file of any name.
        fits = version.file.suffix == ".onnx" and ":" not in guess.source
        return replace(guess, spec=spec, doubts=doubts, source=guess.source if fits else "model.onnx")

    def labels(self, tensor: TritonTensor) -> tuple[str, ...]:
        file = self.path / _plain(tensor.labels or "", f"label_filename of output '{tensor.name}'")
        what = f"the labels of output '{tensor.name}', at most {MAX_LABELS_BYTES} bytes"
        text = foreign_text(self.root, file, MAX_LABELS_BYTES, what)
        lines = text.removesuffix("\n").split("\n")  # as Triton: no other ends
        return tuple(line.removesuffix("\r") for line in lines)


def _narrow(graph: GraphProto, config: TritonConfig, where: Path, left: list[str]) -> None:
    """Write what config.pbtxt states into the graph's inputs and outputs. Raises BadFolder where they disagree."""
    constants = {tensor.name for tensor in graph.initializer}
    for what, values, tensors in (
        ("input", graph.input, config.inputs),
        ("output", graph.output, config.outputs),
    ):
        known: Mapping[str, ValueInfoProto] = {value.name: value for value in values}
        for tensor in tensors:
            if tensor.name not in known:
                raise BadFolder(f"{CONFIG} has the {what} '{tensor.name}', {where.name} has {sorted(known)}")
            _state(known[tensor.name], tensor, config.max_batch_size, f"{what} '{tensor.name}'")
        named = {tensor.name for tensor in tensors}
        rest = [
            value for value in values if named and value.name not in named and value.name not in constants
        ]
        left += [f"{CONFIG} has no input '{value.name}': the file needs it, so requests have it"
                 for value in rest if what == "input"]  # fmt: skip
        for value in rest if what == "output" else ():
            graph.output.remove(value)


def _state(value: ValueInfoProto, tensor: TritonTensor, rows: int | None, what: str) -> None:
    """``rows``: max_batch_size. Where it is not stated, Triton puts a batch in front where the file has one there."""
    if tensor.datatype is not None and tensor.datatype != datatype_of(value):
        raise BadFolder(f"{CONFIG} says {tensor.datatype} for {what}, the file has {datatype_of(value)}")
    if tensor.dims is None:
        return
    shape = value.type.tensor_type.shape
    in_front = len(shape.dim) == len(tensor.dims) + 1 and size_of(value, 0) is None
    batched = in_front if rows is None else rows > 0
    sizes = ([-1] if batched else []) + list(tensor.dims)
    if not value.type.tensor_type.HasField("shape"):
        for _ in sizes:
            shape.dim.add()
    has = [size_of(value, axis) for axis in range(len(shape.dim))]
    fits = len(has) == len(sizes) and all(
        one in (None, size) or size == -1 for one, size in zip(has, sizes, strict=True)
    )
    if not fits or any(size < -1 for size in sizes):
        said = " with the batch in front" if batched else ""
        raise BadFolder(
            f"{CONFIG} says {sizes}{said} for {what}, the file has {[-1 if s is None else s for s in has]}"
        )
    for dim, size in zip(shape.dim, sizes, strict=True):
        if size >= 0:
            dim.dim_value = size


def _file_in(version: Path, named: str | None) -> Path | None:
    """The ONNX file of a version; several files lie in a folder of the file's name."""
    file = version / _plain(named or "model.onnx", "default_model_filename")
    inside = file / file.name if (file / file.name).is_file() else file / "model.onnx"
    return file if file.is_file() else inside if inside.is_file() else None


def _plain(name: str, what: str) -> str:
    place = PurePosixPath(name)
    if not name or place.is_absolute() or ".." in place.parts or "\\" in name or "\0" in name:
        raise BadFolder(
            f"{CONFIG}: {what} is {name!r}: expected the name of a file inside the model's folder"
        )
    return name


def _is_model(path: Path) -> bool:
    versions = (place for place in _folders(path) if _is_version(place))
    return (path / CONFIG).is_file() or any((place / name).exists() for place in versions for name in _FILES)


def _is_version(path: Path) -> bool:
    return path.name.isascii() and path.name.isdigit() and path.name[0] != "0"


def _folders(path: Path) -> list[Path]:
    return sorted(place for place in path.iterdir() if place.is_dir()) if path.is_dir() else []
