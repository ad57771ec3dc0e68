"""The decomposition that torch.onnx begins with, done for those nodes alone that need it, and what it looks up, once.

`torch.onnx.export` traces every program again, to replace operations for which it has no translation, and those that
write into their inputs. That trace is three quarters of an export (1.8 of 2.4 processor seconds of the corpus' 'zoo
llama'), and most programs have few such nodes.
"""

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._C import DispatchKey
from torch._export import utils as ops_of_torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx import GraphModule, Node
from torch.onnx._internal.exporter import _decomp, _fx_passes, _registration

from ....models.program import with_graph, writes_into_inputs
from ..autocast.surgery import Decompositions, fake_mode, put_in_place, traced

_ATEN = torch.ops.aten
_NEW = (  # composite operations that always compute
    _ATEN.batch_norm.default, _ATEN.instance_norm.default, _ATEN.group_norm.default, _ATEN.layer_norm.default,
    _ATEN.linear.default, _ATEN.matmul.default, _ATEN.conv1d.default, _ATEN.conv2d.default, _ATEN.conv3d.default,
    _ATEN.conv1d.padding, _ATEN.conv2d.padding, _ATEN.conv3d.padding, _ATEN.conv_transpose1d.default,
    _ATEN.conv_transpose2d.input, _ATEN.conv_transpose3d.input,
)  # fmt: skip


@contextmanager
def decomposed_where_needed() -> Iterator[None]:
    """Inside the block, in which one file at a time is written, torch.onnx traces only those programs again that it
    cannot translate otherwise."""
    decompose: Any = getattr(_fx_passes, "decompose_with_registry", None)

    def decomposed(program: ExportedProgram, registry: Any) -> ExportedProgram:
        known = set(_decomp.get_onnx_implemented_overloads(registry))
        return _translatable(program, known) or decompose(program, registry)

    with replaced(_fx_passes, "decompose_with_registry", decomposed):
        yield


def _translatable(program: ExportedProgram, known: set[Any]) -> ExportedProgram | None:
    """The program with ``known`` operations alone, none of which writes; None where single nodes cannot be replaced.

    That is so where a program has bodies of control flow or complex values (Fourier transforms), where it changes an
    input or a weight, and where a node writes into what may share its memory with another value.
    """
    has_bodies = any(node.op == "get_attr" for node in program.graph.nodes)
    if (
        has_bodies
        or any(map(_is_complex, program.graph.nodes))
        or any(one.kind is not OutputKind.USER_OUTPUT for one in program.graph_signature.output_specs)
    ):
        return None
    module = copy.deepcopy(program.graph_module)  # it holds no weights
    for node in _calls(module):
        if _is_cast(node):
            _copy_instead(node)
        elif writes_into_inputs(node.target) and not _written_apart(node):
            return None
    if unknown := [node for node in _calls(module) if node.target not in known]:
        table, mode = _decomp.create_onnx_friendly_decomposition_table(known), fake_mode(module)
        if not all(_replaced_by_parts(node, module, mode, table) for node in unknown):
            return None
    module.graph.eliminate_dead_code()
    return with_graph(program, module) if all(node.target in known for node in _calls(module)) else None


def _is_complex(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_complex()


def _calls(module: GraphModule) -> list[Node]:
    return [node for node in module.graph.nodes if node.op == "call_function"]


def _written_apart(node: Node) -> bool:
    """Make a node that writes into its first argument give a new tensor. False, and nothing is changed, where that
    argument may share its memory with another value, or where there is no such operation."""
    source, target = node.args[0] if node.args else None, node.target
    if not isinstance(source, Node) or len(source.users) != 1 or not _is_new(source.target):
        return False
    assert isinstance(target, OpOverload)
    written = [one for one in target._schema.arguments if one.alias_info and one.alias_info.is_write]
    packet = getattr(_ATEN, target._schema.name.removeprefix("aten::").removesuffix("_"), None)
    apart = getattr(packet, target._overloadname, None)
    if written != list(target._schema.arguments[:1]) or apart is None or apart._schema.is_mutable:
        return False
    node.target = apart
    return True


def _is_new(target: Any) -> bool:
    """True for an operation that gives a tensor with memory of its own: a composite one may return its argument."""
    if not isinstance(target, OpOverload) or any(one.alias_info for one in target._schema.returns):
        return False
    return target in _NEW or not target.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)


def _is_cast(node: Node) -> bool:
    """True for a cast that changes the datatype alone."""
    return node.target is _ATEN.to.dtype and len(node.args) == 2 and not node.kwargs


def _copy_instead(cast: Node) -> None:
    """Write a cast as a decomposition does."""
    source, dtype = cast.args
    assert isinstance(source, Node)
    if source.meta["val"].dtype == dtype and all(user.op != "output" for user in cast.users):
        cast.replace_all_uses_with(source)
    cast.target, cast.args, cast.kwargs = _ATEN._to_copy.default, (source,), {"dtype": dtype}


def _is_in(mode: FakeTensorMode, node: Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, FakeTensor) or value.fake_mode is mode


def _replaced_by_parts(node: Node, module: GraphModule, mode: FakeTensorMode, table: Decompositions) -> bool:
    """Replace a node by the operations that it consists of. False, and nothing is changed, where they are not known."""
    target, name = node.target, node.name
    if not isinstance(target, OpOverload) or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    try:
        inner = traced(node, module, lambda args, kwargs: target(*args, **kwargs), mode, table)
    except Exception:  # whatever torch raises for values that it cannot trace apart from their program
        return False
    parts = [one for one in inner.graph.nodes if one.op in ("call_function", "get_attr")] if inner else []
    if (
        inner is None
        or not parts
        or not all(one.op == "call_function" and _is_in(mode, one) for one in parts)
    ):
        return False
    put_in_place(node, inner, module)[-1].name = name  # it may be an output: the signature has its name
    return True


_ONE_FILE_AT_A_TIME = threading.Lock()  # what is replaced in torch is replaced for every thread


@contextmanager
def looked_up_once() -> Iterator[None]:
    """Inside the block, in which files are written and no op is registered, torch.onnx looks up two tables once, and
    not anew for every file.

    These are its translations of ATen ops with their signatures (0.5 s of each small file), and the list of all
    composite ops, which it takes once for each of the 27 namespaces of ops (0.2 s). A conversion writes two files and
    more.

    The translations stay known to the next block. They are those of torch alone: to translate an op otherwise, torch
    would change them for all later files. A torch that has no such function looks up as it does.
    """
    composite_ops = cache(getattr(ops_of_torch, "_materialize_cpp_cia_ops", lambda: None))
    with (
        _ONE_FILE_AT_A_TIME,
        replaced(_registration.ONNXRegistry, "from_torchlib", staticmethod(_translations)),
        replaced(ops_of_torch, "_materialize_cpp_cia_ops", composite_ops),
    ):
        yield


_look_up: Any = getattr(_registration.ONNXRegistry, "from_torchlib", None)


@cache
def _translations(*asked: Any, **named: Any) -> Any:
    return _look_up(*asked, **named)


@contextmanager
def replaced(owner: Any, name: str, function: object) -> Iterator[None]:
    """Inside the block the owner has this function under this name; none where it had none."""
    if name not in vars(owner):
        yield
        return
    original = vars(owner)[name]
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, original)
