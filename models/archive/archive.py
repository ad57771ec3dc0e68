"""Exported programs on disk: ``.pt2`` archives that are checked before torch opens them.

``torch.export.load`` is not safe on a crafted file. Sample inputs and custom objects are pickles; shape
expressions go through ``sympy.sympify``, which evaluates them; a node's target may name any function below
``torch``; and its reader of zip archives can be made to see another archive than Python's. So an archive of ours
has no pickles, everything else is checked against allow-lists (`CheckedArchive`), and torch is never given the file:
the checked members are written again, in memory, by torch's own writer.
"""

import io
import json
import re
import threading
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.export import ExportedProgram

from ..errors import DamagedFile
from ..files.opened_file import OpenedFile
from .admitted_operators import is_admitted, strided_fault
from .plain_zip import NotPlain, PlainZip
from .shape_expressions import is_arithmetic, is_symbol

MODEL = "models/model.json"
_MEMBER = re.compile(
    r"(archive_format|archive_version|byteorder|version|\.data/version|\.data/serialization_id|"
    r"models/model\.json|data/weights/(weight_\d+|model_weights_config\.json)|"
    r"data/constants/(tensor_\d+|model_constants_config\.json))"
)
# Torch's reader wants to see such an entry, which has to be empty.
_SAMPLE_INPUTS = re.compile(r"data/sample_inputs/[\w.\-]+")
_NAME = re.compile(r"\w*", re.ASCII)  # becomes a variable in the source code that torch.fx makes of a graph
_PATH = re.compile(r'[^"\\\x00-\x1f]*')  # becomes getattr(module, "…") there
_WORDS = re.compile(r"[\w.+\-]*")  # devices, versions, kinds
_PATHS = ("parameter_name", "buffer_name", "tensor_constant_name", "fqn", "path_name")
_FREE_TEXT = ("metadata", "as_string", "as_strings")  # stays text
# The keys of a node's metadata that are read. Others would be looked up among torch's functions.
_METADATA = ("stack_trace", "nn_module_stack", "custom")


class CheckedArchive:
    """A program archive that loading cannot make execute anything; ``documents``: the parsed JSON by member.

    It is read once, and every value is checked against allow-lists by its key: names of inputs and weights become
    source code when torch unpacks a program, a pytree may import any module, custom objects and pickled tensors run
    code.

    Members are named without the archive's folder. Raises DamagedFile naming ``path`` and the part that is not allowed.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        try:
            self._zip = PlainZip(file)
            self._names = {name.partition("/")[2]: name for name in self._zip.members}
            self._check_members()
            self.documents: dict[str, Any] = {
                name: json.loads(self._zip.read(whole).decode())
                for name, whole in self._names.items()
                if name.endswith(".json")
            }
        except (NotPlain, ValueError, RecursionError) as error:
            raise DamagedFile(f"{path} is not a program archive: {error}") from error
        for name, document in self.documents.items():
            self._check_document(name, document)

    @property
    def stored(self) -> list[str]:
        """The members that hold tensors."""
        return [name for name in self._names if re.fullmatch(r"data/\w+/(weight|tensor)_\d+", name)]

    def read(self, name: str) -> bytearray:
        """The bytes of one member."""
        try:
            return self._zip.read(self._names[name])
        except (NotPlain, KeyError) as error:
            raise DamagedFile(f"{self._path}: the member '{name}' cannot be read: {error}") from error

    def _check_members(self) -> None:
        if len({name.partition("/")[0] for name in self._zip.members}) > 1:
            raise DamagedFile(f"{self._path} has members of two archives")
        for name, whole in self._names.items():
            empty = _SAMPLE_INPUTS.fullmatch(name) and self._zip.members[whole].size == 0
            if not empty and not _MEMBER.fullmatch(name):
                raise DamagedFile(
                    f"{self._path}: the member '{whole}' does not belong into a program of ours"
                )

    def _check_document(self, name: str, document: Any) -> None:
        try:
            if name == MODEL:
                document[
                    "guards_code"
                ] = []  # source code, and the server checks every request against the spec
            for key, value in _walk(document):
                if fault := _fault(key, value):
                    raise DamagedFile(f"{self._path}: {name} holds {fault}, which loading could execute")
                if isinstance(value, dict) and isinstance(value.get("nodes"), list):
                    if fault := strided_fault(value["nodes"]):
                        raise DamagedFile(f"{self._path}: {name} holds {fault}")
                    _leave_out(value["nodes"])
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise DamagedFile(
                f"{self._path}: {name} is not written as torch writes it ({type(error).__name__}: {error})"
            ) from error


def _leave_out(nodes: list[Any]) -> None:
    for node in nodes:
        node["metadata"] = {key: text for key, text in node.get("metadata", {}).items() if key in _METADATA}


def _fault(key: str, value: Any) -> str | None:
    if key == "use_pickle" and value:
        return "a pickled tensor"
    if key in ("as_custom_obj", "custom_obj", "custom_obj_values", "as_operator") and value:
        return f"a custom object ({value!r})"
    if key == "range_constraints" and not all(is_symbol(name) for name in value):
        return f"range_constraints of {sorted(value)[:3]!r}"
    if isinstance(value, str) and not _allowed(key, value):
        return f"{key} = {value[:200]!r}"
    return None


def _allowed(key: str, text: str) -> bool:
    if key == "target":
        return is_admitted(text)
    if key == "expr_str":
        return is_arithmetic(text)
    if key in ("in_spec", "out_spec"):
        return _plain_tree(json.loads(text)[1])
    if key in ("name", "as_name", "forward_arg_names"):
        return _NAME.fullmatch(text) is not None
    return (_PATH if key in _PATHS else _WORDS).fullmatch(text) is not None


def _plain_tree(tree: Mapping[str, Any]) -> bool:
    """Tuples, lists and dictionaries of leaves: other types in a pytree may import a module."""
    kind, context, children = tree["type"], tree["context"], tree["children_spec"]
    if not all(_plain_tree(child) for child in children):
        return False
    if kind == "builtins.dict":
        return all(isinstance(key, str) and _NAME.fullmatch(key) for key in json.loads(context))
    return (kind is None and context is None) or (
        kind in ("builtins.tuple", "builtins.list") and context == "null"
    )


def _walk(document: Any) -> Iterator[tuple[str, Any]]:
    """Every value with its key, or that of the list that it is in; free text is left out."""
    stack: list[tuple[str, Any]] = [("", document)]
    while stack:
        key, value = stack.pop()
        items = (
            list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else [value]
        )
        if key in _FREE_TEXT and all(isinstance(item, str) for item in items):
            continue
        yield key, value
        if isinstance(value, dict):
            stack.extend(value.items())
        elif isinstance(value, list):
            stack.extend((key, item) for item in value)


_ONE_AT_A_TIME = threading.Lock()  # torch.export keeps its serialiser in a global
_ZIP_VERSION = 6  # as torch.export.save writes it
_FORMAT = {"archive_format": b"pt2", "archive_version": b"0", "data/sample_inputs/model.pt": b""}


def save_program(program: ExportedProgram, path: Path, *, weights: bool) -> None:
    """Write a program without sample inputs; with ``weights=False`` also without its state dict.

    A weight that is left out is stored as one zero, expanded: `load_program` puts the real one in.
    """
    state = dict(program.state_dict)
    if not weights:
        for name, tensor in state.items():
            shape = () if tensor.numel() else tensor.shape  # torch saves no expanded tensor without elements
            stub = torch.zeros(shape, dtype=tensor.dtype).expand(tensor.shape)
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            program.state_dict[name] = torch.nn.Parameter(stub, requires_grad=False) if is_parameter else stub
    buffer = io.BytesIO()
    try:
        with _ONE_AT_A_TIME, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that an expanded stub is not a complete tensor
            torch.export.save(program, buffer)  # into a file, torch's error hides the system's
    finally:
        program.state_dict.update(state)
    with zipfile.ZipFile(buffer) as source, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as target:
        for item in source.infolist():
            data = b"" if "/sample_inputs/" in item.filename else source.read(item)
            target.writestr(zipfile.ZipInfo(item.filename), data)  # nothing of torch's own header is kept


def load_program(
    source: Path | OpenedFile, state: Mapping[str, torch.Tensor] | None = None
) -> ExportedProgram:
    """Check an archive, then load the checked members; ``state`` replaces the weights that were left out.

    Raises DamagedFile naming the file and the part of it that is not allowed.
    """
    path = source.path if isinstance(source, OpenedFile) else source
    try:
        with opened_archive(source) as file:
            fresh = _written_anew(CheckedArchive(path, file.handle))
        with _ONE_AT_A_TIME, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about the absent sample inputs
            program = torch.export.load(fresh)
    except DamagedFile:
        raise
    except Exception as error:
        raise DamagedFile(f"{path} cannot be loaded by torch {torch.__version__}: {error}") from error
    if state is not None:
        _put_in(program, state, path)
    return program


def opened_archive(source: Path | OpenedFile) -> AbstractContextManager[OpenedFile]:
    """The file itself, or the one at a path, which is closed at the end."""
    return nullcontext(source) if isinstance(source, OpenedFile) else OpenedFile(source)


def _written_anew(archive: CheckedArchive) -> io.BytesIO:
    """The checked members, and no others, as torch's writer lays them out: one at a time, so that memory has each once.

    torch's reader needs the empty sample inputs.
    """
    fresh = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(fresh)
    writer.set_min_version(_ZIP_VERSION)
    documents = {name: json.dumps(document).encode() for name, document in archive.documents.items()}
    for name, text in {**_FORMAT, **documents}.items():
        writer.write_record(name, text, len(text))
    for name in archive.stored:
        data = bytes(archive.read(name))
        writer.write_record(name, data, len(data))
    writer.write_end_of_file()
    fresh.seek(0)
    return fresh


def _put_in(program: ExportedProgram, state: Mapping[str, torch.Tensor], path: Path) -> None:
    for name, stub in program.state_dict.items():
        tensor = state.get(name)
        if tensor is None or tensor.shape != stub.shape or tensor.dtype != stub.dtype:
            came = "no such tensor" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            raise DamagedFile(
                f"the weights of {path}: '{name}' must be {stub.dtype} {list(stub.shape)}, got {came}"
            )
        is_parameter = isinstance(stub, torch.nn.Parameter)
        program.state_dict[name] = torch.nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor
