"""A program archive read directly into a graph that runs: the part of ``torch.export.load`` that a server needs.

``torch.export.load`` imports sympy and a shape environment (73 MB, two seconds for the first program) for reasoning
about shapes. A server only runs the proven program. So the archive's JSON
(torch/_export/serde/schema.py, major version 8) is read here into a `torch.fx.GraphModule`, for programs that are a
straight list of ATen operations. Anything else (control flow, mutated buffers, another version) is left to torch:
`read_module` then gives None.
"""

import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from ..errors import DamagedFile
from ..files.opened_file import OpenedFile
from ..program import Look, without_idle_nodes
from .archive import MODEL, CheckedArchive, opened_archive

_SCHEMA = 8
_DTYPES = {
    1: torch.uint8, 2: torch.int8, 3: torch.int16, 4: torch.int32, 5: torch.int64, 6: torch.float16,
    7: torch.float32, 8: torch.float64, 9: torch.complex32, 10: torch.complex64, 11: torch.complex128,
    12: torch.bool, 13: torch.bfloat16, 28: torch.uint16, 34: torch.uint32, 35: torch.uint64,
}  # fmt: skip
_STRIDED = 7
_MEMORY_FORMATS = {
    1: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d, 4: torch.preserve_format,
}  # fmt: skip
_OPERATORS = {
    "add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "pow", "eq", "ne", "lt", "le", "gt", "ge", "and_", "or_",
}  # fmt: skip
_AS_IT_IS = ("as_int", "as_ints", "as_bool", "as_bools", "as_string", "as_strings")


class _NotPlain(Exception):
    """A program that only torch can read."""


def read_module(source: Path | OpenedFile, state: Mapping[str, Tensor] | None = None) -> GraphModule | None:
    """The program of an archive, with the weights in ``state`` where it has none; None: it takes torch to read it.

    Raises DamagedFile naming the file, as `load_program` does.
    """
    path = source.path if isinstance(source, OpenedFile) else source
    try:
        with opened_archive(source) as file:
            archive = CheckedArchive(path, file.handle)
            return _Reading(path, archive, state).module()
    except DamagedFile:
        raise
    except OSError as error:
        raise DamagedFile(f"{path} cannot be read: {error}") from error
    except Exception:  # torch reads it, or raises the error
        return None


class _Reading:
    def __init__(self, path: Path, archive: CheckedArchive, state: Mapping[str, Tensor] | None) -> None:
        self.path, self.archive, self.state = path, archive, state
        document = archive.documents[MODEL]
        if document["schema_version"]["major"] != _SCHEMA:
            raise _NotPlain
        self.program = document["graph_module"]["graph"]
        self.signature = document["graph_module"]["signature"]
        self.graph, self.root = Graph(), nn.Module()
        self.nodes: dict[str, Node] = {}
        self.stored: dict[str, dict[str, Any]] = {}  # folder → weight → where it lies
        self.flat: dict[str, Tensor] = {}

    def module(self) -> GraphModule:
        for spec in self.signature["input_specs"]:
            self._input(spec)
        for node in self.program["nodes"]:
            self._node(node)
        self.graph.output(tuple(self._output(spec) for spec in self.signature["output_specs"]))
        self.graph.lint()
        return without_idle_nodes(GraphModule(self.root, self.graph, "Program"))

    def _input(self, spec: dict[str, Any]) -> None:
        ((kind, found),) = spec.items()
        if kind == "user_input":
            name = found["arg"]["as_tensor"]["name"]
            self._known(name, self.graph.placeholder(name))
            return
        key = {
            "parameter": "parameter_name",
            "buffer": "buffer_name",
            "tensor_constant": "tensor_constant_name",
        }
        if kind not in key:
            raise _NotPlain
        name, path = found["arg"]["name"], found[key[kind]]
        attribute = f"weight_{len(self.nodes)}"  # its name in the model may be no name of an attribute
        constant = kind == "tensor_constant" or found.get("persistent") is False
        self.root.register_buffer(attribute, self._tensor(path, constant), persistent=False)
        self._known(name, self.graph.create_node("get_attr", attribute, name=name))

    def _tensor(self, path: str, constant: bool) -> Tensor:
        """A weight: the one given, or the archive's own."""
        folder = "constants" if constant else "weights"
        if folder not in self.stored:
            self.stored[folder] = self.archive.documents[f"data/{folder}/model_{folder}_config.json"][
                "config"
            ]
        known = self.stored[folder][path]
        meta = known["tensor_meta"]
        dtype, sizes = _DTYPES[meta["dtype"]], [size["as_int"] for size in meta["sizes"]]
        if self.state is not None and not constant:
            tensor = self.state.get(path)
            if tensor is None or tensor.dtype != dtype or list(tensor.shape) != sizes:
                came = "no such tensor" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
                raise DamagedFile(f"the weights of {self.path}: '{path}' must be {dtype} {sizes}, got {came}")
            return tensor
        if meta["layout"] != _STRIDED or known["use_pickle"]:
            raise _NotPlain
        strides = [stride["as_int"] for stride in meta["strides"]]
        name = f"data/{folder}/{known['path_name']}"
        if name not in self.flat:  # once, where weights are tied
            stored = self.archive.read(name)
            self.flat[name] = torch.frombuffer(stored, dtype=dtype) if stored else torch.empty(0, dtype=dtype)
        return self.flat[name].as_strided(sizes, strides, meta["storage_offset"]["as_int"])

    def _node(self, node: dict[str, Any]) -> None:
        target = _target(node["target"])
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for one in node["inputs"]:
            value = self._argument(one["arg"])
            if one["kind"] == 1:
                args.append(value)
            elif one["kind"] == 2:
                kwargs[one["name"]] = value
            else:
                raise _NotPlain
        outputs = node["outputs"]
        single = _single_name(target, outputs)
        made = self.graph.create_node(
            "call_function", target, tuple(args), kwargs, name=single or node["name"]
        )
        if single is not None:
            self._known(single, made)
            return
        parts = (
            outputs[0]["as_tensors"]
            if "as_tensors" in outputs[0]
            else [one.get("as_tensor") for one in outputs]
        )
        for place, part in enumerate(parts):
            if part is not None:
                item = self.graph.create_node(
                    "call_function", operator.getitem, (made, place), name=part["name"]
                )
                self._known(part["name"], item)

    def _known(self, name: str, node: Node) -> None:
        if name in self.nodes:
            raise _NotPlain
        self.nodes[name] = node
        meta = self.program["tensor_values"].get(name)
        if meta is not None:
            sizes = tuple(
                str(size.get("as_int", size.get("as_expr", {}).get("expr_str"))) for size in meta["sizes"]
            )
            node.meta["look"] = Look(_DTYPES[meta["dtype"]], sizes)

    def _output(self, spec: dict[str, Any]) -> Node:
        return self.nodes[spec["user_output"]["arg"]["as_tensor"]["name"]]

    def _argument(self, argument: dict[str, Any]) -> Any:
        ((kind, value),) = argument.items()
        if kind in _AS_IT_IS:
            return value
        if kind == "as_none":
            return None
        if kind in ("as_float", "as_floats"):
            return [float(one) for one in value] if isinstance(value, list) else float(value)
        if kind == "as_tensor":
            return self.nodes[value["name"]]
        if kind == "as_tensors":
            return [self.nodes[one["name"]] for one in value]
        if kind in ("as_sym_int", "as_sym_float", "as_sym_bool"):
            return self._symbol(value)
        if kind in ("as_sym_ints", "as_sym_floats", "as_sym_bools"):
            return [self._symbol(one) for one in value]
        if kind in ("as_optional_tensor", "as_optional_tensors"):
            return (
                [self._argument(one) for one in value] if isinstance(value, list) else self._argument(value)
            )
        if kind == "as_scalar_type":
            return _DTYPES[value]
        if kind == "as_memory_format":
            return _MEMORY_FORMATS[value]
        if kind == "as_layout" and value == _STRIDED:
            return torch.strided
        if kind == "as_device" and value["type"] == "cpu":
            return torch.device("cpu")
        raise _NotPlain

    def _symbol(self, value: dict[str, Any]) -> Any:
        ((kind, found),) = value.items()
        return self.nodes[found] if kind == "as_name" else found


def _target(name: str) -> Any:
    """The function by its name, `torch.ops.aten.add.Tensor` or `_operator.mul`; the archive's check admits no
    others."""
    words = name.split(".")
    if words[0] == "_operator" and words[1] in _OPERATORS:
        return getattr(operator, words[1])
    if words[:3] == ["torch", "ops", "aten"] and len(words) == 5:
        return getattr(getattr(torch.ops.aten, words[3]), words[4])
    raise _NotPlain


def _single_name(target: Any, outputs: list[dict[str, Any]]) -> str | None:
    """The name of a node's one result; None where it has a list or several of them."""
    returns = getattr(getattr(target, "_schema", None), "returns", None)
    if not outputs:
        raise _NotPlain
    ((kind, value),) = outputs[0].items()
    if kind == "as_tensors" or (returns is not None and len(returns) != 1):
        return None
    if kind == "as_tensor":
        return value["name"]
    if kind in ("as_sym_int", "as_sym_float", "as_sym_bool"):
        return value["as_name"]
    raise _NotPlain
