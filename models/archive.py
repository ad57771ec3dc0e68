"""Exported programs on disk: ``.pt2`` archives that are checked before torch opens them.

``torch.export.load`` is not safe on a crafted file: sample inputs and custom objects are pickles,
shape expressions go through ``sympy.sympify`` (which evaluates them), and a node's target may name any
function below ``torch``. So an archive of ours has none of the first (its sample inputs are an empty member, which torch's
reader wants to see), and what is left is held against
an allow-list here, before anything of it is loaded.
"""

import io
import json
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from .errors import DamagedFile

_MEMBER = re.compile(
    r"(archive_format|archive_version|byteorder|version|\.data/version|\.data/serialization_id|"
    r"models/model\.json|data/weights/(weight_\d+|model_weights_config\.json)|"
    r"data/constants/(tensor_\d+|model_constants_config\.json))"
)
_TARGET = re.compile(
    r"(torch\.ops\.(aten|prims|higher_order)\.\w+(\.\w+)?|_operator\.\w+|math\.\w+|"
    r"torch\.sym_(int|float|max|min|not|ite|sqrt|sum)|torch\._sym_sqrt)"
)
# Numbers, symbols, arithmetic, comparisons, and torch's own sympy functions: no attribute, no dunder.
_EXPRESSION = re.compile(r"[\w\s+\-*/%(),<>=&|~!.]*")
_SYMBOL = re.compile(r"Symbol\('\w+'")
_CALL = re.compile(r"([A-Za-z_]\w*)\s*\(")
_FUNCTIONS = {
    "Max", "Min", "Mod", "PythonMod", "FloorDiv", "CleanDiv", "CeilDiv", "CeilToInt", "FloorToInt",
    "TruncToInt", "TruncToFloat", "IntTrueDiv", "FloatTrueDiv", "ToFloat", "PowByNatural", "FloatPow",
    "RoundToInt", "RoundDecimal", "ModularIndexing", "Where", "Eq", "Ne", "Lt", "Le", "Gt", "Ge", "Not",
    "And", "Or", "Add", "Mul", "Pow", "Float", "Identity", "Integer", "Symbol", "Rational", "Abs", "floor", "ceiling", "OpaqueUnaryFn_sqrt",
}  # fmt: skip
MAX_ENTRIES = 200_000


def save_program(program: ExportedProgram, path: Path, *, weights: bool) -> None:
    """Write a program without sample inputs; with ``weights=False`` also without its state dict.

    A weight that is left out is stored as one zero, expanded: `load_program` puts the real one in.
    """
    state = dict(program.state_dict)
    if not weights:
        for name, tensor in state.items():
            stub = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            program.state_dict[name] = torch.nn.Parameter(stub, requires_grad=False) if is_parameter else stub
    buffer = io.BytesIO()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that an expanded stub is not a complete tensor
            torch.export.save(program, buffer)
    finally:
        program.state_dict.update(state)
    with zipfile.ZipFile(buffer) as source, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as target:
        for item in source.infolist():
            target.writestr(item, b"" if "/sample_inputs/" in item.filename else source.read(item))


def load_program(path: Path, state: Mapping[str, torch.Tensor] | None = None) -> ExportedProgram:
    """Check an archive, then load it; ``state`` replaces the weights that were left out.

    Raises DamagedFile naming the file and what about it is not allowed.
    """
    try:
        check_archive(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about the absent sample inputs
            program = torch.export.load(io.BytesIO(path.read_bytes()))
    except DamagedFile:
        raise
    except Exception as error:
        raise DamagedFile(f"{path} cannot be loaded by torch {torch.__version__}: {error}") from error
    if state is not None:
        _put_in(program, state, path)
    return program


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


def check_archive(path: Path) -> None:
    """Refuse an archive with anything in it that loading could execute."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            if len(names) > MAX_ENTRIES:
                raise DamagedFile(f"{path} has {len(names)} members; {MAX_ENTRIES} is the limit")
            for name in names:
                empty = "/sample_inputs/" in name and archive.getinfo(name).file_size == 0
                if not empty and not _MEMBER.fullmatch(name.partition("/")[2]):
                    raise DamagedFile(f"{path}: the member '{name}' does not belong into a program of ours")
            documents = {name: json.loads(archive.read(name)) for name in names if name.endswith(".json")}
    except (OSError, zipfile.BadZipFile, ValueError) as error:
        raise DamagedFile(f"{path} is not a program archive: {error}") from error
    for name, document in documents.items():
        for key, value in _walk(document):
            if fault := _fault(key, value):
                raise DamagedFile(f"{path}: {name} holds {fault}, which loading could execute")


def _fault(key: str, value: Any) -> str | None:
    if key == "use_pickle" and value:
        return "a pickled tensor"
    if key == "target" and isinstance(value, str) and _resolved(value) and not _TARGET.fullmatch(value):
        return f"the target {value!r}"
    if key == "expr_str" and not _harmless(value):
        return f"the expression {value!r}"
    if key in ("as_custom_obj", "custom_obj", "as_operator") and value:
        return f"a custom object ({value!r})"
    return None


def _resolved(target: str) -> bool:
    """Whether torch would look this name up; any other string stays a string."""
    return target.startswith(("torch", "_operator", "math", "#"))


def _harmless(expression: Any) -> bool:
    if not isinstance(expression, str) or len(expression) > 4096:
        return False
    expression = _SYMBOL.sub("Symbol(", expression)  # the one place for a quoted word
    return (
        _EXPRESSION.fullmatch(expression) is not None
        and "__" not in expression
        and not re.search(r"\.\s*[A-Za-z_]", expression)
        and set(_CALL.findall(expression)) <= _FUNCTIONS
    )


def _walk(node: Any) -> Iterator[tuple[str, Any]]:
    stack = [node]
    while stack:
        current = stack.pop()
        if isinstance(current, dict):
            for key, value in current.items():
                yield key, value
                stack.append(value)
        elif isinstance(current, list):
            stack.extend(current)
