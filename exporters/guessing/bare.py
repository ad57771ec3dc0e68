"""A model that comes without a model.toml: read as the folder that it would be, or refused with advice where the file
holds weights or pickles alone."""

import pickletools
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from ...models.errors import BadFolder, BadSamples, BadSetting
from ...models.files.guarded_reading import guarded
from ...models.files.zip_members import members_of
from ...models.folder.model_name import NAME
from ...models.folder.package import ModelFolder, check_program, parse_folder, read_folder
from ..inputs.samples import read_tensors
from .guess import Guess, name_for

TOML = "model.toml"
_TRANSFORMERS = "hf:."  # the source of a folder of transformers
_MOST = 1 << 20  # bytes of a config.json that are read


def folder_at(
    path: Path,
    samples: Path | None = None,
    name: str | None = None,
    changed: Callable[[Guess], Guess] = lambda guess: guess,
) -> ModelFolder:
    """A model folder as its model.toml has it; a bare file or transformers folder as it is guessed to be.

    ``samples``: real inputs, which a bare ONNX file or transformers model is run with. A model.toml beside a file that
    names that file counts. ``name``: of the model, in place of the file's. ``changed``: what the caller knows better
    than the guess.
    Raises BadFolder where the path is neither, BadSetting for a ``name`` where a model.toml has one.
    """
    if name is not None and not NAME.fullmatch(name):
        raise BadSetting(f"the name {name!r} is not a model name: expected {NAME.pattern}")
    if not path.exists():
        raise BadFolder(_missing(path))
    is_file = path.is_file() and path.name != TOML
    if not is_file and not _is_transformers(path):
        if path.is_dir() and not (path / TOML).exists() and (advice := _instead_of(path)):
            raise BadFolder(advice)
        return _named(read_folder(path), name)
    path = absolute(path)
    try:
        path.name.encode()
    except UnicodeEncodeError:  # the model.toml of the version names it
        raise BadFolder(f"the name {path.name!r} is not in UTF-8: rename the model") from None
    place = path.parent if is_file else path
    if is_file and (place / TOML).is_file() and (beside := read_folder(place)).source == path.name:
        return _named(beside, name)
    runs = samples is not None and samples.is_file() and (not is_file or path.suffix == ".onnx")
    guess = guess_at(str(path), read_tensors(samples) if samples is not None and runs else None)
    guess = guess if name is None else replace(guess, spec=replace(guess.spec, name=name))
    return guessed_folder(changed(guess), place)


def _missing(path: Path) -> str:
    file, _, function = str(path).rpartition(":")
    if function and Path(file).is_file():
        return f"{path} is a function: `halfeven init {path} --samples FILE` writes its model folder"
    return (
        f"{path} does not exist: expected an ONNX file, an exported program, a transformers folder or a model folder "
        "of this machine; nothing is downloaded"
    )


def _instead_of(folder: Path) -> str:
    """A message: what in a folder without a model.toml is a model, and what to do with it; empty where nothing is."""
    if (folder / "saved_model.pb").exists():
        return _as_onnx_first(folder, _SAVED_MODEL)
    files = sorted(one.name for one in folder.iterdir() if one.suffix in (".onnx", ".pt2"))
    if not files:
        return ""
    shown = ", ".join(files[:_SHOWN]) + (", …" if len(files) > _SHOWN else "")
    first = folder / files[0]
    return f"the folder {folder} has no model.toml, but models: {shown}; give one: `halfeven convert {first}`"


def _as_onnx_first(path: Path, what_and_how: tuple[str, str]) -> str:
    what, how = what_and_how
    return f"{path} is {what}, which halfeven does not read: {how.format(path)}"


def guessed_folder(guess: Guess, place: Path) -> ModelFolder:
    """The model folder that ``place`` would be with a model.toml as guessed."""
    folder = parse_folder(guess.toml(), place / TOML)
    return replace(folder, samples=None, weights=None, guessed=guess.toml(), notes=guess.sentences)


def _named(folder: ModelFolder, name: str | None) -> ModelFolder:
    if name in (None, folder.spec.name):
        return folder
    raise BadSetting(
        f"--name {name}: the model.toml in {folder.folder} names the model '{folder.spec.name}': expected --name for a "
        "bare file or transformers folder alone; change name there"
    )


@guarded("a model")
def guess_at(path: str, samples: Mapping[str, np.ndarray] | None = None) -> Guess:
    """The guess for a file, a transformers folder, or ``file.py:function`` with example inputs (first axis = samples).

    An ONNX file or transformers model is run with ``samples`` where they are given. Raises BadFolder for a path of
    another kind, BadSamples for a function without samples.
    """
    file, function = path, ""
    if ":" in path and not Path(path).exists():
        file, _, function = path.rpartition(":")
    where = absolute(Path(file))
    if where.suffix == ".onnx" and where.is_file() and not function:
        from .onnx_file import guess_onnx  # brings onnx, without which a wrong path is named at once

        return guess_onnx(where, samples=samples)
    if source := _module_source(path, where, function, samples):
        from .module_source import guess_module  # brings torch, which an ONNX file does not need

        folder, named = (where, where / "model") if source == _TRANSFORMERS else (where.parent, where)
        return guess_module(folder, source, name_for(named), samples if function or where.is_dir() else None)
    if not where.exists():
        raise BadFolder(
            f"{path} does not exist: expected a model file, a transformers folder or model.py:build"
        )
    if where.suffix in SUFFIXES and (advice := advice_for(where)):
        raise BadFolder(advice)
    if known := _OTHERS.get(where.suffix.lower()):
        raise BadFolder(_as_onnx_first(Path(path), known))
    if where.is_dir() and not (where / TOML).exists() and (advice := _instead_of(Path(path))):
        raise BadFolder(advice)
    raise BadFolder(
        f"{path} is no model folder and nothing that is taken without one: expected a folder with a model.toml, an "
        "ONNX file (.onnx), an exported program (.pt2), a transformers folder (config.json and safetensors), or "
        "model.py:build"
    )


def _module_source(
    path: str, where: Path, function: str, samples: Mapping[str, np.ndarray] | None
) -> str | None:
    """The source, as model.toml has it, of what only a child may open; None for anything else."""
    if function and where.suffix == ".py" and where.is_file():
        if samples is None:
            raise BadSamples(
                f"{path}: what a module takes is seen from example inputs: give them as --samples FILE (safetensors or "
                "npz, one array for each argument of forward, first axis = samples)"
            )
        return f"{where.name}:{function}"
    if where.suffix == ".pt2" and where.is_file():
        check_program(where)
        return where.name
    return _TRANSFORMERS if _is_transformers(where) else None


def absolute(path: Path) -> Path:
    """The absolute path of a file or folder. A link to a file keeps its own name: a download cache keeps
    ``model.onnx`` as a link to a file that is named by its digest."""
    return path.parent.resolve() / path.name if path.is_file() else path.resolve()


def _is_transformers(path: Path) -> bool:
    """True for a folder of transformers without a model.toml, which would count. Other libraries write a config.json
    too, which names no model."""
    config = path / "config.json"
    if (
        not path.is_dir()
        or (path / TOML).is_file()
        or not config.is_file()
        or not any(path.glob("*.safetensors"))
    ):
        return False
    with config.open("rb") as file:
        content = file.read(_MOST)
    return b'"model_type"' in content or b'"architectures"' in content


# Models of other libraries: what they are, and how they become ONNX by their own library's tools.
_SAVED_MODEL = (
    "a saved model of TensorFlow",
    "`python -m tf2onnx.convert --saved-model {} --output model.onnx` makes an ONNX file of it",
)
_KERAS = (
    "a model of Keras",
    'keras.saving.load_model("{}").export("model.onnx", format="onnx") makes an ONNX file of it (Keras 3)',
)
_PICKLE = (
    "a pickle that may run any code",
    "load it where it was made and write ONNX there (scikit-learn: skl2onnx.to_onnx), or give a module to "
    "halfeven.convert in Python",
)
_ENGINE = ("an engine of TensorRT for one GPU", "convert the ONNX file that it was built from")
_OTHERS = {
    ".h5": _KERAS,
    ".keras": _KERAS,
    ".pkl": _PICKLE,
    ".pickle": _PICKLE,
    ".joblib": _PICKLE,
    ".plan": _ENGINE,
    ".engine": _ENGINE,
    ".tflite": (
        "a model of TensorFlow Lite",
        "`python -m tf2onnx.convert --tflite {} --output model.onnx` makes an ONNX file of it",
    ),
}
_SHOWN = 3  # files of a folder that a message names
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
_MOST_OF_A_PICKLE = 1 << 22  # bytes of a pickle that are looked through
_OF_WEIGHTS = ("collections", "torch", "torch._utils", "torch.storage", "numpy", "builtins")
_CONVERT = (
    'halfeven.convert(net, samples={"x": x}).save("halfeven-store")  # x: real inputs, first axis = samples'
)


def advice_for(file: Path) -> str:
    """A message: what the file of weights or pickles holds (`torch.save`, `torch.jit.save`, safetensors), and three
    lines of Python that make a model of it. The message is empty where torch did not write the file. A pickle may run
    code: it is looked through here, and never opened."""
    found = _held(file)
    if found is None:
        return ""
    what, load = found
    library = "safetensors.torch" if file.suffix == ".safetensors" else "torch"
    lines = (f"import halfeven, {library}", load, _CONVERT)
    return f"{file} holds {what}. Three lines of Python make it a model of ours:\n" + "\n".join(
        f"    {line}" for line in lines
    )


def _held(file: Path) -> tuple[str, str] | None:
    """Two texts: what the file holds, and the line of Python that makes the module ``net`` of it. None where torch did
    not write the file."""
    path = repr(str(file))
    weights = "weights without the code that they belong to"
    if file.suffix == ".safetensors":
        load = f"net = Net(); safetensors.torch.load_model(net, {path})  # Net: the class of the weights"
        return weights, load
    try:
        with zipfile.ZipFile(file) as archive:
            names = [member.filename for member in members_of(archive)]
            pickle = next(
                (name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")), None
            )
            if pickle is None:
                return None
            with archive.open(pickle) as member:
                classes = _classes(member.read(_MOST_OF_A_PICKLE))
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError):
        return None
    if any(name.count("/") == 1 and name.endswith("/constants.pkl") for name in names):
        return (
            "TorchScript, which torch.export does not read",
            f"net = Net(); net.load_state_dict(torch.jit.load({path}).state_dict())  # Net: the class it was made of",
        )
    if classes:
        return (
            f"a pickled {classes[0]}, which needs the code of its class",
            f"net = torch.load({path}, weights_only=False)  # where that class can be imported; if you trust it",
        )
    opened = f"torch.load({path}, weights_only=True)"
    which = 'Net: the class of the weights; of a checkpoint take its key, as ["model"]'
    return weights, f"net = Net(); net.load_state_dict({opened})  # {which}"


def _classes(pickle: bytes) -> list[str]:
    """The classes that the pickle names, ``module.Name`` each, but those of weights. Nothing of it is run."""
    found: list[str] = []
    texts: list[str] = []
    try:
        for operation, argument, _ in pickletools.genops(pickle):
            if operation.name == "GLOBAL":
                found.append(str(argument).replace(" ", "."))
            elif operation.name == "STACK_GLOBAL" and len(texts) > 1:
                found.append(".".join(texts[-2:]))
            elif isinstance(argument, str):
                texts.append(argument)
    except ValueError:  # cut off, or no pickle
        pass
    return [name for name in found if name.rpartition(".")[0] not in _OF_WEIGHTS]
