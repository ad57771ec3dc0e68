"""TorchServe archives (``.mar``): an ONNX file, an exported program, a transformers folder, or weights with the file of
their module become a model folder. Pickled modules and TorchScript are refused: opening one may run its code.

The layout: https://github.com/pytorch/serve/blob/master/model-archiver/README.md. The model file of an archive is the
operator's code, as that of a model folder is: it runs in the child process of a capture, and nowhere else.
"""

import ast
import errno
import json
import re
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from ...models.errors import BadFolder, BadSamples, HalfevenError, TooLarge
from ...models.files.guarded_reading import reading
from ...models.files.tensor_file import save_tensors
from ...models.files.zip_members import members_of
from ...models.spec.spec import ModelSpec
from ..guessing.bare import guess_at
from ..guessing.guess import Guess, name_for
from ..guessing.module_source import guess_module
from ..guessing.writing import SAMPLES, copy_model_file, filled_folder
from .imported import Refusal, Written, foreign_bytes, foreign_text, write_toml

MANIFEST = "MAR-INF/MANIFEST.json"
LABELS = "index_to_name.json"
MAX_TEXT_BYTES = 16 << 20  # of a manifest, of labels
_WEIGHTS = (".safetensors", ".pt", ".pth", ".bin")
_CLASSIFIER = "image_classifier"  # TorchServe's own handler: it applies the softmax
_NO_CODE = (
    "without a model file it is TorchScript or a pickled module, which may run code and is not opened: where the model "
    "was made, write model.onnx (torch.onnx.export) or program.pt2 (torch.export.save) for `halfeven init`, or pack "
    "its state dict with its model file (torch-model-archiver --model-file)"
)


def take_archives(
    paths: Sequence[Path], out: Path, samples: Mapping[str, np.ndarray] | None, overwrite: bool
) -> Iterator[Written | Refusal]:
    """Write the model of each archive into a folder of its name below ``out``; a second one of a name is refused.

    ``samples``: real inputs, which weights with a model file need. Whatever is wrong is the model's refusal.
    """
    taken = dict[str, str]()
    for path in paths:
        try:
            with reading(path, "a TorchServe archive"):
                written = _take(path, out, samples, overwrite, taken)
            taken[written.guess.spec.name] = path.name
            yield written
        except (HalfevenError, OSError) as error:
            yield Refusal(path.name, error)


def _take(
    path: Path,
    out: Path,
    samples: Mapping[str, np.ndarray] | None,
    overwrite: bool,
    taken: Mapping[str, str],
) -> Written:
    """``taken``: model name → the archive that it was taken from."""
    with tempfile.TemporaryDirectory(prefix="halfeven-import-") as scratch:
        unpack(path, Path(scratch))
        archive = _Archive(path, Path(scratch), samples)
        if other := taken.get(archive.name):
            raise BadFolder(
                f"{path.name} and {other} have the same name here, '{archive.name}': import them into two folders"
            )
        guess = archive.guess()
        target = out / guess.spec.name
        with filled_folder(target, overwrite) as folder:
            archive.copy(guess, folder)
            write_toml(guess, archive.left, folder)
        return Written(guess, str(path), target, tuple(archive.left))


@dataclass
class _Archive:
    path: Path
    folder: Path
    samples: Mapping[str, np.ndarray] | None
    left: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        document = self.document(MANIFEST)
        model = document.get("model") if isinstance(document, dict) else None
        if not isinstance(model, dict):
            raise BadFolder(
                f"{self.path}: {MANIFEST} has no model: expected what torch-model-archiver writes"
            )
        self.name = name_for(Path(self.text(model, "modelName") or self.path.stem, "model"))
        self.file, self.code = self.existing(model, "serializedFile"), self.existing(model, "modelFile")
        self.handler = self.text(model, "handler") or ""
        self.settings = self.existing(model, "configFile")

    def guess(self) -> Guess:
        """The guessed model.toml, with the archive's labels and batch. Settings that are not taken over go to
        ``left``."""
        guess = self.guess_of_file()
        spec = replace(guess.spec, name=self.name)
        if self.handler:
            reason = (
                "it prepares inputs and changes answers; here clients send and get the model's own tensors"
            )
            self.left.append(f"handler '{self.handler}': {reason}")
        spec, doubts = self.labelled(spec)
        return replace(guess, spec=self.batched(spec), doubts={**guess.doubts, **doubts})

    def guess_of_file(self) -> Guess:
        suffix = Path(self.file or "").suffix
        if self.file and suffix in (".onnx", ".pt2"):
            return guess_at(str(self.folder / self.file))
        if self.code and (not self.file or suffix in _WEIGHTS):
            if self.samples is None:
                raise BadSamples(
                    f"{self.path}: what the module in {self.code} takes is seen from example inputs: give them as "
                    "--samples FILE (safetensors or npz, one array for each argument of forward, first axis = samples)"
                )
            source = f"{self.code}:{_module_class(self.folder / self.code, self.path)}"
            return guess_module(self.folder, source, self.name, self.samples, self.file)
        if suffix == ".safetensors" and (self.folder / "config.json").is_file():
            return guess_at(str(self.folder))
        raise BadFolder(f"{self.path}: {self.file or 'no serializedFile'}: {_NO_CODE}")

    def copy(self, guess: Guess, folder: Path) -> None:
        """Copy the model's files into the folder; for a module also every other file that its code may read."""
        if guess.source.endswith(".onnx"):
            copy_model_file(self.folder / guess.source, folder)
        handler = PurePosixPath(self.handler.partition(":")[0]).name
        # The model file may have the handler in it.
        inner = {"MAR-INF", handler, self.settings} - {self.file, self.code}
        places = () if guess.source.endswith(".onnx") else sorted(self.folder.iterdir())
        for place in (place for place in places if place.name not in inner):
            if place.is_dir():
                shutil.copytree(place, folder / place.name)
            else:
                shutil.copyfile(place, folder / place.name)
        if (given := self.samples if guess.samples is None else guess.samples) is not None:
            arrays = {name: np.ascontiguousarray(array) for name, array in given.items()}
            save_tensors(folder / SAMPLES, arrays)

    def labelled(self, spec: ModelSpec) -> tuple[ModelSpec, dict[tuple[str, str], str]]:
        """The spec with the labels of ``index_to_name.json``, where exactly one output has as many classes; and the
        doubts."""
        if not (self.folder / LABELS).is_file():
            return spec, {}
        labels = _labels(self.document(LABELS))
        fitting = [t for t in spec.outputs if labels and t.shape and t.shape[-1].minimum == len(labels)]
        if len(fitting) != 1:
            self.left.append(f"{LABELS}: expected 0 to n with a name each, and one output of n + 1 places")
            return spec, {}
        tensor, doubts = replace(fitting[0], labels=labels), dict[tuple[str, str], str]()
        if self.handler == _CLASSIFIER and tensor.kind == "tensor":
            tensor = replace(tensor, kind="logits")
            doubts[tensor.name, "kind"] = f"the handler {_CLASSIFIER} applies a softmax to it"
        outputs = tuple(tensor if t.name == tensor.name else t for t in spec.outputs)
        return replace(spec, outputs=outputs), doubts

    def batched(self, spec: ModelSpec) -> ModelSpec:
        """The spec with the batch size and delay of the archive's configuration file; its other keys go to ``left``."""
        if self.settings is None:
            return spec
        numbers: dict[str, int] = {}
        for line in self.read(self.settings).splitlines():
            if match := re.match(r"([A-Za-z_]\w*)\s*:\s*(.*?)\s*(#.*)?$", line):
                key, value = match[1], match[2]
                if (
                    key in ("batchSize", "maxBatchDelay")
                    and value.isascii()
                    and value.isdigit()
                    and len(value) < 7
                ):
                    numbers[key] = int(value)
                else:
                    self.left.append(f"{self.settings}: {key}")
        rows, delay = numbers.get("batchSize", 1), numbers.get("maxBatchDelay", 0)
        if not spec.batched or not 1 < rows <= 65536:  # 1 is TorchServe's default
            return spec
        batching = replace(spec.batching, max_queue_delay_us=1000 * delay)
        return replace(spec, max_batch_size=rows, batching=batching)

    def existing(self, model: Mapping[str, Any], key: str) -> str | None:
        """The file in the archive's folder that a key of the manifest names; None where it names none."""
        name = self.text(model, key)
        if not name:
            return None
        if "/" in name or "\\" in name or not (self.folder / name).is_file():
            raise BadFolder(f"{self.path}: {MANIFEST} names {key} {name!r}, which is no file of the archive")
        return name

    def text(self, model: Mapping[str, Any], key: str) -> str | None:
        value = model.get(key)
        if value is not None and not isinstance(value, str):
            raise BadFolder(f"{self.path}: {MANIFEST}: {key} = {value!r}: expected a string")
        return value

    def document(self, name: str) -> Any:
        try:
            return json.loads(self.read(name))
        except (ValueError, RecursionError) as error:
            raise BadFolder(f"{self.path}: {name} is not JSON ({error})") from error

    def read(self, name: str) -> str:
        file = self.folder / name
        try:
            return foreign_text(self.folder, file, MAX_TEXT_BYTES, "what torch-model-archiver writes")
        except (BadFolder, TooLarge) as error:
            raise BadFolder(f"{self.path}: {name} in it: {str(error).replace(str(file), name)}") from error


def _module_class(file: Path, archive: Path) -> str:
    """The name of the one class that a model file defines (TorchServe requires one). The file is parsed, not run."""
    try:
        tree = ast.parse(foreign_bytes(file.parent, file, MAX_TEXT_BYTES, "a model file"))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadFolder(f"{archive}: {file.name} is not Python: {error}") from error
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    if len(classes) != 1:
        raise BadFolder(
            f"{archive}: {file.name} defines the classes {classes}: expected one, as TorchServe does. Take it out of "
            f"the archive, and name the class or function that gives the module: `halfeven init {file.name}:NAME "
            "--samples FILE`"
        )
    return classes[0]


def _labels(document: Any) -> tuple[str, ...]:
    """The class names in the order of their index; empty where the document is not {"0": name, …}. A name may be a
    list, as ImageNet has them (["n01440764", "tench"]): then its last entry is taken."""
    if not isinstance(document, dict):
        return ()
    found = (document.get(str(index)) for index in range(len(document)))
    named = (name[-1] if isinstance(name, list) and name else name for name in found)
    names = [name for name in named if isinstance(name, str)]
    return tuple(names) if len(names) == len(document) else ()


def archives_at(path: Path) -> list[Path]:
    """The archive at a path, or all archives in a folder such as TorchServe's model store."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return [file for file in files if file.suffix == ".mar" and file.is_file()]


MAX_MEMBERS = 10_000
MAX_BYTES = 64 << 30  # unpacked, all members together
# Weights hardly compress: an archive whose content is more than this many times as large was made to fill a disk.
MAX_RATIO = 50
FREE_BYTES = 256 << 20  # unpacked; up to this size the ratio is not checked
_ENCRYPTED = 1
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.ENOENT, errno.EIO, errno.EROFS)


def unpack(path: Path, folder: Path) -> None:
    """Write every member below an empty ``folder``.

    Raises BadFolder for a file that is no zip archive, is damaged, or has a member that is no plain file inside the
    folder, TooLarge beyond the bounds. The sizes that are checked are those that are read: Python's reader gives no
    more bytes of a member than its header says.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = [member for member in members_of(archive) if not member.is_dir()]
            _bound(path, members)
            for member in members:
                target = folder / _place(path, member)
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as source, target.open("xb") as file:
                    shutil.copyfileobj(source, file, 1 << 20)
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise BadFolder(f"{path} has two members in one place: {Path(error.filename).name}") from error
    except Exception as error:  # zipfile and its decompressors raise many kinds on damaged bytes
        if isinstance(error, HalfevenError) or (isinstance(error, OSError) and error.errno in _OF_THE_DISK):
            raise
        raise BadFolder(f"{path} is not a whole zip archive, which a .mar file is: {error}") from error


def _bound(path: Path, members: list[zipfile.ZipInfo]) -> None:
    total = sum(member.file_size for member in members)
    most = min(MAX_BYTES, max(FREE_BYTES, MAX_RATIO * path.stat().st_size))
    if len(members) > MAX_MEMBERS or total > most:
        raise TooLarge(
            f"{path} has {len(members)} members of {total} bytes unpacked: expected at most {MAX_MEMBERS}, and of an "
            f"archive of {path.stat().st_size} bytes at most {most}"
        )


def _place(path: Path, member: zipfile.ZipInfo) -> PurePosixPath:
    name, place = member.orig_filename, PurePosixPath(member.orig_filename)
    wrong = not place.parts or place.is_absolute() or ".." in place.parts or "\\" in name or "\0" in name
    if wrong or ":" in place.parts[0]:
        raise BadFolder(
            f"{path}: the member {name!r} lies outside the archive's folder; nothing of it is taken"
        )
    if stat.S_ISLNK(member.external_attr >> 16):
        raise BadFolder(f"{path}: the member {name!r} is a link: expected files alone")
    if member.flag_bits & _ENCRYPTED:
        raise BadFolder(f"{path}: the member {name!r} is encrypted: pack the archive without a password")
    return place
