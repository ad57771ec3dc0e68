"""Exported programs on disk: ``.pt2`` archives that are checked before torch opens them.

``torch.export.load`` is not safe on a crafted file. Sample inputs and custom objects are pickles; shape
expressions go through ``sympy.sympify``, which evaluates them; a node's target may name any function below
``torch``; and its reader of zip archives can be made to see another archive than Python's. So an archive of ours
has no pickles, everything else is checked against allow-lists (`contents.py`), and torch is never given the file:
the checked members are written again, in memory, by torch's own writer.
"""

import io
import json
import threading
import warnings
import zipfile
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch.export import ExportedProgram

from ..errors import DamagedFile
from ..files.opened_file import OpenedFile
from .contents import CheckedArchive

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
            torch.export.save(program, buffer)
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
