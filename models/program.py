"""An exported program made ready to run: a plain graph of ATen calls, inputs and outputs in the spec's order."""

import copy
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass
from torch.fx import GraphModule, Node
from torch.fx.graph import CodeGen

# The operations that read a size, or how often something is repeated, from numbers.
_READ_SIZES = ("item", "_local_scalar_dense", "repeat_interleave", "bincount")
_FRAME = re.compile(r'File "([^"<]+)", line (\d+), in [^\n]*\n +([^\n]+)')
# These folders hold the code of this torch, of a torch that captured elsewhere, and of the process that captures.
_OTHERS_CODE = (
    f"{Path(torch.__file__).parent}/",
    "-packages/torch/",
    f"{Path(__file__).parent / 'capture'}/",
)
_DROPOUTS = (torch.ops.aten.dropout.default, torch.ops.aten.feature_dropout.default)


def runnable(program: ExportedProgram) -> GraphModule:
    """The program as a module that takes tensors in order and gives a tuple.

    Guards are left out (the request has been checked against the spec), and so are pytree handling, dropout in
    evaluation (the identity) and weights that no node reads.
    """
    module = program.module(check_guards=False)
    assert isinstance(module, GraphModule)
    module._forward_pre_hooks.clear()  # the range check of every call
    module._forward_pre_hooks_with_kwargs.clear()
    module.graph.set_codegen(CodeGen())
    _own_bodies(module)
    return without_idle_nodes(module)


def duplicate(module: GraphModule) -> GraphModule:
    """A copy that shares weights and bodies: its graph and its names may be changed."""
    with _without_future_warnings():
        return GraphModule(module, copy.deepcopy(module.graph))


def with_graph(
    program: ExportedProgram, module: GraphModule, weights: Mapping[str, Tensor] | None = None
) -> ExportedProgram:
    """The program with another graph and, where they are given, other weights; the inputs and outputs are the same."""
    with _without_future_warnings():
        state = None if weights is None else dict(weights)
        return program._update(module, program.graph_signature, state_dict=state)


@contextmanager
def _without_future_warnings() -> Iterator[None]:
    """Inside the block torch shows no FutureWarning about the trees in its own programs: each copy gives one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def _own_bodies(module: GraphModule) -> None:
    """Give the module copies of its bodies of control flow: `ExportedProgram.module` copies the graph, but shares the
    bodies, and a change of one would change the program."""
    for name, body in module._modules.items():
        if isinstance(body, GraphModule):
            own = duplicate(body)
            _own_bodies(own)
            setattr(module, name, own)


def without_idle_nodes(module: GraphModule) -> GraphModule:
    """The module, changed: no dropout in evaluation, no assertions of what a tensor is, no results and no weights that
    no node reads. `torch.export` keeps what forward computes and does not return."""
    for node in reversed([node for _, node in walk(module)]):
        is_dropout = node.target in _DROPOUTS and node.args[2] is False
        if is_dropout:
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        asserts = node.target is torch.ops.aten._assert_tensor_metadata.default
        if is_dropout or asserts or not (node.users or node.is_impure()):
            node.graph.erase_node(node)
    for body in module.modules():
        if isinstance(body, GraphModule):
            body.recompile()
    return module


@dataclass(frozen=True, slots=True)
class Look:
    """A node's tensor as known before the graph runs; a free size is an expression, equal sizes are equal
    expressions."""

    dtype: torch.dtype
    shape: tuple[str, ...]


def look_of(value: object) -> Look | None:
    """The tensor that a node gives, where it gives one; also for a node of an exported program's graph."""
    if not isinstance(value, Node):
        return None
    if (look := value.meta.get("look")) is not None:
        return look
    found = value.meta.get("val")
    return Look(found.dtype, tuple(map(str, found.shape))) if isinstance(found, Tensor) else None


def dimensions_of(value: object) -> int:
    """The number of dimensions of a node's tensor; 0 where that is not known."""
    look = look_of(value)
    return len(look.shape) if look is not None else 0


def argument(node: Node, place: int, default: Any = None) -> Any:
    """An argument by its place in the schema, whether it was given by place or by name."""
    if place < len(node.args):
        return node.args[place]
    declared = node.target._schema.arguments[place]  # type: ignore[union-attr]
    return node.kwargs.get(declared.name, declared.default_value if default is None else default)


def walk(module: GraphModule, prefix: str = "") -> Iterator[tuple[str, Node]]:
    """Every node with its name, those of control-flow bodies as ``<body>.<name>``, in the graph's order.

    A body's nodes stand before the op that runs it; a body that several ops run comes once.
    """
    for node in module.graph.nodes:
        body = getattr(module, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(body, GraphModule):
            yield from walk(body, f"{prefix}{node.target}.")
        yield prefix + node.name, node


def writes_into_inputs(target: object) -> bool:
    """True if an operation (the target of a node) changes an input: in a copy of the input the change would be lost."""
    return isinstance(target, OpOverload) and target._schema.is_mutable


def reads_sizes(module: GraphModule) -> bool:
    """True if a size, or the passes of a loop, come from numbers: they are other ones for other inputs."""
    return any(_reads_size(node.target) for _, node in walk(module))


def _reads_size(target: object) -> bool:
    if isinstance(target, HigherOrderOperator):
        return target.name() == "while_loop"
    return isinstance(target, OpOverload) and target._schema.name.removeprefix("aten::") in _READ_SIZES


def source_line(node: Node) -> str:
    """ " at FILE:LINE (`code`)": the line outside of torch that a node was traced from; empty where unknown."""
    file, line, code = _traced_from(node)
    return f" at {file}:{line} (`{code.strip()}`)" if file else ""


def source_place(node: Node) -> str:
    """ "NAME:LINE": the file and line outside of torch that a node was traced from; empty where unknown. The file's
    folder is left out: one model is captured alike in any folder."""
    file, line, _ = _traced_from(node)
    return f"{PurePath(file).name}:{line}" if file else ""


def _traced_from(node: Node) -> tuple[str, str, str]:
    """The file, the line and the code of the frame; each is empty where it is unknown."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    users = [frame for frame in frames if not any(place in frame[0] for place in _OTHERS_CODE)]
    return users[-1] if users else ("", "", "")


def on_device(program: ExportedProgram, device: torch.device | str) -> ExportedProgram:
    """The program with its weights, constants and sample inputs on a device; the program that came stays where it is.

    `move_to_device_pass` changes the program that it is given. Only the graph is copied: a weight that is on the
    device already is shared, and names that shared one weight share one afterwards.
    """
    tensors = [*program.state_dict.values(), *program.constants.values()]
    with _without_future_warnings():
        moved = copy.deepcopy(program, {id(tensor): tensor for tensor in tensors})
    names: dict[int, list[str]] = {}
    for name, tensor in moved.state_dict.items():
        names.setdefault(id(tensor), []).append(name)
    moved = move_to_device_pass(moved, device)
    for first, *others in names.values():
        for other in others:
            moved.state_dict[other] = moved.state_dict[first]
    return moved
