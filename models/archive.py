"""Exported programs on disk: ``.pt2`` archives that are checked before torch opens them.

``torch.export.load`` is not safe on a crafted file. Sample inputs and custom objects are pickles; shape
expressions go through ``sympy.sympify``, which evaluates them; a node's target may name any function below
``torch``; a pytree may import any module; guards, names of inputs and names of weights become source code
when the program is unpacked. So an archive of ours has none of the first (its sample inputs are an empty
member, which torch's reader wants to see), its guards are forgotten (the protocol holds every request against
the spec), and the rest is held against allow-lists here, before any of it is loaded.
"""

import io
import json
import re
import threading
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
    r"(torch\.ops\.(?!aten\.(save|from_file)\.)(aten|prims)\.\w+\.\w+|_operator\.\w+|math\.\w+|"
    r"torch\.ops\.higher_order\.(wrap_with_autocast|wrap_with_set_grad_enabled|cond|while_loop|scan|map_impl)|"
    r"torch\.sym_(int|float|max|min|not|ite|sqrt|sum)|torch\._sym_sqrt)"
)
# A shape expression, as sympy's srepr writes it: these words, symbols and numbers; no other name.
_EXPRESSION = re.compile(r"[\w\s+\-*/%(),<>=&|~!.]*")
_SYMBOL = re.compile(r"Symbol\('([a-z]+\d+)'")
_NUMBER = re.compile(r"\b\d+\.?\d*(e[+-]?\d+)?|'-?\d[\d.e+-]*'")
_WORD = re.compile(r"[A-Za-z_]\w*")
_SYMBOL_NAME = re.compile(r"[a-z]+\d+")
_FUNCTIONS = {
    "Max", "Min", "Mod", "PythonMod", "FloorDiv", "CleanDiv", "CeilDiv", "CeilToInt", "FloorToInt",
    "TruncToInt", "TruncToFloat", "IntTrueDiv", "FloatTrueDiv", "ToFloat", "PowByNatural", "FloatPow",
    "RoundToInt", "RoundDecimal", "ModularIndexing", "Where", "LShift", "RShift", "Identity",
    "IsNonOverlappingAndDenseIndicator", "Eq", "Ne", "Lt", "Le", "Gt", "Ge", "Not", "And", "Or", "Equality",
    "Unequality", "GreaterThan", "LessThan", "StrictGreaterThan", "StrictLessThan", "Add", "Mul", "Pow",
    "Abs", "Float", "Integer", "Rational", "Symbol", "floor", "ceiling", "OpaqueUnaryFn_sqrt",
    "true", "false", "True", "False", "oo", "int_oo",
    "precision", "integer", "positive", "negative", "nonnegative", "real", "evaluate",
}  # fmt: skip
_NAME = re.compile(r"\w*")  # becomes a variable in the source code that torch.fx makes of a graph
_PATH = re.compile(r'[^"\\\x00-\x1f]*')  # becomes getattr(module, "…") there
_WORDS = re.compile(r"[\w.+\-]*")  # devices, versions, kinds
_PATHS = ("parameter_name", "buffer_name", "tensor_constant_name", "fqn", "path_name")
_FREE_TEXT = ("metadata", "guards_code", "as_string", "as_strings")  # stays text, or is thrown away
MAX_ENTRIES = 200_000
_ONE_AT_A_TIME = threading.Lock()  # torch.export keeps its serialiser in a global


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
        with _ONE_AT_A_TIME, warnings.catch_warnings():
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
        data = io.BytesIO(path.read_bytes())  # what was checked is what is loaded
        check_archive(path, data)
        data.seek(0)
        with _ONE_AT_A_TIME, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about the absent sample inputs
            program = torch.export.load(data)
    except DamagedFile:
        raise
    except Exception as error:
        raise DamagedFile(f"{path} cannot be loaded by torch {torch.__version__}: {error}") from error
    program._guards_code = []
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


def check_archive(path: Path, data: io.BytesIO) -> None:
    """Refuse an archive (the bytes of ``path``) with anything in it that loading could execute."""
    try:
        with zipfile.ZipFile(data) as archive:
            names = archive.namelist()
            _check_members(path, archive, names)
            documents = {name: json.loads(archive.read(name)) for name in names if name.endswith(".json")}
    except (zipfile.BadZipFile, ValueError, EOFError) as error:
        raise DamagedFile(f"{path} is not a program archive: {error}") from error
    for name, document in documents.items():
        for key, value in _walk(document):
            if fault := _fault(key, value):
                raise DamagedFile(f"{path}: {name} holds {fault}, which loading could execute")


def _check_members(path: Path, archive: zipfile.ZipFile, names: list[str]) -> None:
    """Each member once and below one folder: torch's own reader must find what was checked."""
    if len(names) > MAX_ENTRIES:
        raise DamagedFile(f"{path} has {len(names)} members; {MAX_ENTRIES} is the limit")
    if len(set(names)) != len(names) or len({name.partition("/")[0] for name in names}) > 1:
        raise DamagedFile(f"{path} has a member twice, or members of two archives")
    for name in names:
        empty = "/sample_inputs/" in name and archive.getinfo(name).file_size == 0
        if not empty and not _MEMBER.fullmatch(name.partition("/")[2]):
            raise DamagedFile(f"{path}: the member '{name}' does not belong into a program of ours")


def _fault(key: str, value: Any) -> str | None:
    if key == "use_pickle" and value:
        return "a pickled tensor"
    if key in ("as_custom_obj", "custom_obj", "custom_obj_values", "as_operator") and value:
        return f"a custom object ({value!r})"
    if isinstance(value, str) and not _allowed(key, value):
        return f"{key} = {value[:200]!r}"
    return None


def _allowed(key: str, text: str) -> bool:
    if key == "target":
        return _TARGET.fullmatch(text) is not None
    if key == "expr_str":
        return _harmless(text)
    if key in ("in_spec", "out_spec"):
        return _plain_tree(json.loads(text)[1])
    if key in ("name", "as_name", "forward_arg_names"):
        return _NAME.fullmatch(text) is not None
    return (_PATH if key in _PATHS else _WORDS).fullmatch(text) is not None


def _harmless(expression: str) -> bool:
    bare = _NUMBER.sub("0", _SYMBOL.sub(r"Symbol(\1", expression))  # the two places for quotes
    return (
        len(expression) <= 4096
        and _EXPRESSION.fullmatch(bare) is not None
        and all(word in _FUNCTIONS or _SYMBOL_NAME.fullmatch(word) for word in _WORD.findall(bare))
    )


def _plain_tree(tree: Any) -> bool:
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
    """Every value with the key that it, or the list that holds it, stands under; no free text."""
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
